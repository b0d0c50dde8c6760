"""Groups of a mesh's lines: whose they are, over which backend, and how long they wait."""

import pytest
import torch
import torch.distributed as dist

from dure.comm.groups import ProcessGroup, Solo
from dure.comm.mesh import Mesh
from dure.errors import SpecInvalid
from dure.torchcompat.collectives import group_timeout_seconds
from tests.comm.gloo_ranks import on_ranks

CPU = torch.device("cpu")
AXES = {"data": 2, "tensor": 2}


def lines_of(group):
    """Return which ranks this rank's lines have, by what each sums up, and how long their groups wait."""
    mesh = Mesh(AXES, group, CPU)
    found = {}
    for axis in AXES:
        number = torch.tensor([10.0**group.rank])
        mesh.group(axis).all_reduce_sum(number)
        seconds = group_timeout_seconds(mesh.process_group(axis))
        names = mesh.device_mesh.get_group(axis) is mesh.process_group(axis)
        found[axis] = (number.item(), mesh.coordinate(axis), mesh.ranks(axis), seconds, names)
    return found


@pytest.mark.parametrize("backend", ["gloo", "cpu:dure_shm"])
def test_mesh_then_each_line_has_a_group_with_the_timeout_of_the_run(backend):
    data, tensor = ((0, 2), (1, 3)), ((0, 1), (2, 3))
    for rank, found in enumerate(on_ranks(4, lines_of, timeout_seconds=17.0, backend=backend)):
        for axis, lines in (("data", data), ("tensor", tensor)):
            (line,) = (line for line in lines if rank in line)
            assert found[axis] == (sum(10.0**other for other in line), line.index(rank), list(line), 17.0, True)


def groups_beside_cuda(group):
    """Make a mesh over gloo on a machine that has CUDA."""
    torch.cuda.is_available = lambda: True  # in this rank's process only
    mesh = Mesh({"replica": 1, "shard": 2}, group, CPU)
    return mesh.process_group("shard") is dist.group.WORLD, dist.get_backend(mesh.process_group("replica"))


def test_axis_of_all_ranks_when_there_is_cuda_then_its_group_is_the_run_s_own():
    assert on_ranks(2, groups_beside_cuda) == [(True, "gloo")] * 2


def subgroup_timeout(group):
    return group_timeout_seconds(group.subgroup())


def test_subgroup_then_has_the_timeout_of_the_run():
    assert on_ranks(2, subgroup_timeout, timeout_seconds=17.0) == [17.0, 17.0]
    assert Solo().subgroup() is None


def divide_on_a_device(group):
    """Ask for a mesh over devices that its backend does not reach."""
    with pytest.raises(
        SpecInvalid, match=r"but they talk over gloo, which does not: give every rank a device of its own"
    ):
        Mesh(AXES, group, torch.device("cuda"), divides_tensors=True)
    return True


def test_mesh_that_divides_tensors_when_ranks_share_a_gpu_over_gloo_then_is_refused():
    assert on_ranks(4, divide_on_a_device) == [True] * 4


class Standing(ProcessGroup):
    """A group of two ranks over a backend, with nobody in it."""

    def __init__(self, backend):
        self.rank, self.world_size, self.backend = 0, 2, backend


def test_mesh_that_divides_tensors_when_its_backend_reaches_the_devices_then_is_not_refused():
    from dure.comm import mesh

    mesh._check_backend(torch.device("cuda"), Standing("nccl"))
    mesh._check_backend(CPU, Standing("gloo"))
