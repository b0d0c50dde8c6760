"""The backend `dure_shm` beside gloo: what torch's own code gets from it."""

import os
import subprocess
import sys
import textwrap
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dure.comm.algorithms import shm
from dure.comm.dure_shm import group as group_module
from dure.comm.dure_shm.backend import SharedMemoryGroup
from dure.errors import EnvironmentLacks, PeerLost, RanksDisagree
from dure.torchcompat.collectives import all_gather_single, reduce_scatter_single
from tests.comm.gloo_ranks import on_ranks

RANKS = [1, 2, 3, 4]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WHOLE = [torch.int64, torch.int32, torch.uint8]
TIMEOUT = timedelta(seconds=20)


def shm_group(**options):
    """Make a group over all ranks beside gloo's."""
    return dist.new_group(backend="cpu:dure_shm", timeout=TIMEOUT, **options)


def small_segment():
    """Let short vectors need many rounds. In a rank's own process."""
    shm.SHARE_BYTES, shm.WHOLE_BYTES = 4096, 1024


def whole_values(shape, dtype, rank):
    """Small whole numbers: sums of four, and products, are exact in every dtype, so every order gives the same."""
    return torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sizes():
    world_size = dist.get_world_size()
    return sorted({0, 1, world_size - 1, world_size + 1, 257, 5 * world_size * 1024 + 3})


# -- the same as gloo


def compare_reductions(group):
    """Return in which cases all_reduce and the forms of reduce_scatter differ from gloo's."""
    small_segment()
    ours, rank, world_size = shm_group(), group.rank, group.world_size
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
    wrong = []

    def check(case, one, other):
        wrong.extend([case] * (not torch.equal(one, other)))

    for dtype in [*FLOATS, *WHOLE]:
        for op in [*ops, *([dist.ReduceOp.BXOR, dist.ReduceOp.BOR, dist.ReduceOp.BAND] if dtype in WHOLE else [])]:
            for size in sizes():
                case = (str(op), dtype, size)
                one, other = whole_values((size,), dtype, rank), whole_values((size,), dtype, rank)
                dist.all_reduce(one, op, group=ours)
                dist.all_reduce(other, op)
                check(("all_reduce", *case), one, other)
                long = whole_values((size * world_size,), dtype, rank)
                one = torch.empty(size, dtype=dtype)
                getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(one, long, op, group=ours)
                expected = long.clone()
                dist.all_reduce(expected, op)
                check(("reduce_scatter_single", *case), one, expected[size * rank : size * (rank + 1)])
                one = torch.empty(size, dtype=dtype)
                dist.reduce_scatter(one, [*long.view(world_size, size)], op, group=ours)
                check(("reduce_scatter", *case), one, expected[size * rank : size * (rank + 1)])
    return wrong


def compare_moves(group):
    """Return in which cases broadcast and the forms of all_gather differ from gloo's."""
    small_segment()
    ours, rank, world_size = shm_group(), group.rank, group.world_size
    wrong = []

    def check(case, one, other):
        wrong.extend([case] * (not torch.equal(one, other)))

    for dtype in [*FLOATS, *WHOLE, torch.bool, torch.complex64]:
        for size in sizes():
            own = whole_values((size,), dtype, rank)
            everybodys = [whole_values((size,), dtype, other) for other in range(world_size)]
            gathered = [torch.empty(size, dtype=dtype) for _ in range(world_size)]
            dist.all_gather(gathered, own, group=ours)
            check(("all_gather", dtype, size), torch.cat(gathered), torch.cat(everybodys))
            long = torch.empty(size * world_size, dtype=dtype)
            getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(long, own, group=ours)
            check(("all_gather_single", dtype, size), long, torch.cat(everybodys))
            for root in range(world_size):
                sent = own.clone()
                dist.broadcast(sent, root, group=ours)
                check(("broadcast", dtype, size, root), sent, everybodys[root])
    return wrong


@pytest.mark.parametrize("num_ranks", RANKS)
def test_reductions_then_they_are_gloos(num_ranks):
    assert on_ranks(num_ranks, compare_reductions, timeout_seconds=60.0) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
def test_moves_then_they_bring_what_they_should(num_ranks):
    assert on_ranks(num_ranks, compare_moves, timeout_seconds=60.0) == [[]] * num_ranks


def reduce_noise(group):
    """Return the bits that real sums and means of real sizes have on this rank, and how far they are from gloo's."""
    ours, found = shm_group(), []
    for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, group.world_size)):
        for size in (1000, 1_000_007):
            one = torch.randn(size, generator=torch.Generator().manual_seed(group.rank))
            other = one.clone()
            dist.all_reduce(one, op, group=ours)
            dist.all_reduce(other)
            found.append((one.view(torch.int32).sum().item(), (one - other / divisor).abs().max().item()))
    return found


def test_all_reduce_of_real_numbers_then_all_ranks_have_the_same_bits():
    first, *others = on_ranks(3, reduce_noise)
    assert others == [first, first]
    # three float32 of size one to ten, added in another order
    assert max(difference for _, difference in first) < 1e-5


def go_everywhere(group):
    """Use the calls that training rarely makes; messages and sparse tensors go through gloo."""
    ours, rank, world_size = shm_group(), group.rank, group.world_size
    number = torch.tensor([float(rank)])
    received = torch.zeros(1)
    request = dist.isend(number, (rank + 1) % world_size, group=ours)
    dist.recv(received, (rank - 1) % world_size, group=ours)
    request.wait()
    reduced = number.clone()
    dist.reduce(reduced, 0, group=ours)
    gathered = [torch.zeros(1) for _ in range(world_size)]
    dist.gather(number, gathered if rank == 1 else None, 1, group=ours)
    scattered = torch.zeros(1)
    dist.scatter(scattered, [torch.tensor([10.0 * r]) for r in range(world_size)] if rank == 0 else None, 0, group=ours)
    swapped = torch.zeros(world_size)
    dist.all_to_all_single(swapped, torch.arange(world_size) + 10.0 * rank, group=ours)
    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank}, group=ours)
    torch.sparse.check_sparse_tensor_invariants.disable()  # said aloud: gloo's own tensors warn otherwise (2.11)
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (world_size,))
    dist.all_reduce(sparse, group=ours)
    dist.barrier(group=ours)
    return (
        received.item(), reduced.item() if rank == 0 else 3.0, [t.item() for t in gathered] if rank == 1 else [0, 1, 2],
        scattered.item(), swapped.tolist(), [said["rank"] for said in objects], sparse.to_dense().tolist(),
    )  # fmt: skip


def test_messages_and_rarer_collectives_then_they_bring_what_they_should():
    for rank, answer in enumerate(on_ranks(3, go_everywhere)):
        swapped = [rank + 10.0 * other for other in range(3)]
        assert answer == ((rank - 1) % 3, 3.0, [0, 1, 2], 10.0 * rank, swapped, [0, 1, 2], [1.0, 1.0, 1.0])


def use_odd_tensors(group):
    """Return what became of tensors that are no plain vectors."""
    ours, rank = shm_group(), group.rank
    transposed = (torch.arange(6.0).view(2, 3) + rank).t()
    dist.all_reduce(transposed, group=ours)
    column = torch.zeros(4, 3)
    dist.broadcast(column.fill_(rank + 1.0)[:, 1], 1, group=ours)
    places = [torch.zeros(3, 2).t() for _ in range(2)]
    dist.all_gather(places, (torch.arange(6.0).view(2, 3) * (rank + 1)), group=ours)
    parameter = nn.Parameter(torch.full((3,), rank + 1.0))
    version = parameter._version
    dist.all_reduce(parameter, group=ours)
    with torch.inference_mode():
        inferred = torch.full((3,), rank + 1.0)
        dist.all_reduce(inferred, group=ours, async_op=True).wait()
    scalar = torch.tensor(rank + 1.0)
    dist.all_reduce(scalar, dist.ReduceOp.PRODUCT, group=ours)
    ours.allreduce_coalesced([many := torch.ones(2), more := torch.ones(3, 2).t(), ints := torch.ones(1).int()]).wait()
    assert parameter._version == version
    return (
        transposed.tolist(), column.tolist(), [place.tolist() for place in places], parameter.tolist(),
        inferred.tolist(), scalar.item(), [many.tolist(), more.tolist(), ints.tolist()],
    )  # fmt: skip


def test_tensors_that_are_no_plain_vectors_then_they_are_reduced_in_place():
    for rank, answer in enumerate(on_ranks(2, use_odd_tensors)):
        own = rank + 1.0
        assert answer == (
            [[1.0, 7.0], [3.0, 9.0], [5.0, 11.0]],
            [[own, 2.0, own]] * 4,
            [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]],
            [3.0] * 3,
            [3.0] * 3,
            2.0,
            [[2.0] * 2, [[2.0] * 3] * 2, [2]],
        )


def fall_back(group):
    """Make a group whose ranks cannot share memory."""

    def refuse(*_, **__):
        raise EnvironmentLacks("rank 1 cannot open the memory of rank 0")

    group_module.open_shared_memory = refuse  # in this rank's process only
    ours, rank = shm_group(), group.rank
    assert "cannot open" in ours.why_gloo
    total, own = torch.ones(3), torch.full((2,), float(rank))
    dist.all_reduce(total, group=ours)
    long, part = torch.empty(4), torch.empty(2)
    all_gather_single(long, own, group=ours)
    reduce_scatter_single(part, long, group=ours)
    listed = [torch.empty(2), torch.empty(2)]
    dist.all_gather(listed, own, group=ours)
    dist.reduce_scatter(part, listed, group=ours)
    sent = own.clone()
    dist.broadcast(sent, 1, group=ours)
    dist.barrier(group=ours)
    outputs = [torch.empty(4)]
    ours.allgather_into_tensor_coalesced(outputs, [own]).wait()
    ours.allreduce_coalesced([total]).wait()
    reduced, scattered, swapped = own.clone(), torch.empty(2), torch.empty(2)
    dist.reduce(reduced, 0, group=ours)
    dist.gather(own, listed if rank == 0 else None, 0, group=ours)
    dist.scatter(scattered, listed if rank == 0 else None, 0, group=ours)
    dist.all_to_all_single(swapped, own, group=ours)
    if "2.11" not in torch.__version__:  # whose gloo makes none
        dist.all_to_all(listed, [own, own], group=ours)
    for refused in (dist.all_reduce, lambda x, group: dist.broadcast(x, 0, group=group)):
        with pytest.raises(RuntimeError, match="which has gaps in memory"):
            refused(torch.ones(4)[::2], group=ours)
    assert torch.equal(scattered, own)
    assert swapped.tolist() == [0.0, 1.0]
    return total.tolist(), outputs[0].tolist(), part.tolist(), sent.tolist()


def test_group_when_ranks_cannot_share_memory_then_gloo_makes_all_calls():
    answers = on_ranks(2, fall_back)
    assert answers == [([4.0] * 3, [0.0, 0.0, 1.0, 1.0], [2.0 * rank] * 2, [1.0, 1.0]) for rank in range(2)]


# -- asynchronous calls


def overlap(group):
    """Let rank 1 come only after rank 0's calls have returned; a blocking backend would wait for ever."""
    ours, store = shm_group(), dist.distributed_c10d._get_default_store()
    tensors = [torch.full((size,), float(group.rank)) for size in (10, 100_000, 1)]
    if group.rank == 1:
        store.wait(["go"], TIMEOUT)
    works = [dist.all_reduce(tensor, group=ours, async_op=True) for tensor in tensors]
    were_over = [work.is_completed() for work in works]
    if group.rank == 0:
        store.set("go", "now")
    futures = [works[1].get_future(), works[1].get_future()]
    works[2].wait(TIMEOUT)
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
    late = works[0].get_future().wait()[0]
    dist.all_reduce(tensors[0], group=ours)
    same = [futures[0].wait()[0] is tensors[1], works[1].result()[0] is tensors[1], late is tensors[0]]
    return were_over if group.rank == 0 else None, same, [float(tensor.sum()) for tensor in tensors]


def test_asynchronous_calls_then_they_return_at_once_and_run_in_order():
    answers = on_ranks(2, overlap)
    assert answers[0] == ([False, False, False], [True] * 3, [20.0, 100_000.0, 1.0])
    assert answers[1] == (None, [True] * 3, [20.0, 100_000.0, 1.0])


def fail_late(group):
    """Wait for a call that rank 1 never makes, in every way that there is."""
    ours = shm_group()
    if group.rank == 1:
        group.barrier()
        return
    work = dist.all_reduce(torch.ones(2), group=ours, async_op=True)
    with pytest.raises(
        PeerLost,
        match=r"a call was not over after 0\.1 s: other ranks have not made it \(Timed out: the timeout is over\)",
    ):
        work.wait(timedelta(seconds=0.1))
    ours._memory.interrupt()
    with pytest.raises(
        PeerLost, match=r"the group was destroyed while rank 0 waited in all_reduce.* \(connection closed by it\)"
    ):
        work.wait()
    with pytest.raises(RuntimeError, match="PeerLost: the group was destroyed"):
        work.get_future().wait()
    assert not work.is_success()
    assert isinstance(work.exception(), PeerLost)
    with pytest.raises(PeerLost, match="an earlier call of this group failed"):
        dist.barrier(group=ours)
    group.barrier()
    return


def test_work_when_its_call_fails_then_every_way_of_waiting_says_so():
    assert on_ranks(2, fail_late) == [None, None]


def disagree(group):
    ours = shm_group()
    with pytest.raises(RanksDisagree, match=r"rank \d called all_reduce\(sum\) of \d+ bytes float32 where rank \d"):
        dist.all_reduce(torch.ones(2 + group.rank), group=ours)


def test_calls_of_different_sizes_then_an_error_instead_of_an_abort():
    assert on_ranks(2, disagree) == [None, None]


def ask_too_much(group):
    ours = shm_group()
    with pytest.raises(ValueError, match="a tensor is on meta, but dure_shm moves CPU tensors only"):
        dist.all_reduce(torch.ones(2, device="meta"), group=ours)
    pid = os.fork()
    if pid == 0:
        try:
            dist.all_reduce(torch.ones(2), group=ours)
        except RuntimeError as error:
            os._exit(7 if "but a child forked from it made a call" in str(error) else 1)
        os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_calls_from_a_forked_child_or_with_other_devices_then_they_are_refused():
    assert on_ranks(2, ask_too_much) == [7, 7]


# -- groups


def use_subgroups(group):
    """Return the sums over the rows and columns of a mesh and over an odd group, and who is named when one is lost."""
    dist.new_group(backend="cpu:dure_shm")  # not used, and destroyed with the others
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    odd = dist.new_group([1, 3], backend="cpu:dure_shm", timeout=timedelta(seconds=0.2))
    sums = []
    for axis in ("row", "column"):
        number = torch.tensor(float(group.rank))
        dist.all_reduce(number, group=mesh.get_group(axis))
        sums.append(number.item())
    error = None
    if group.rank == 1:
        with pytest.raises(PeerLost, match=r"rank 3 did not come within 0\.2 s while rank 1") as caught:
            dist.all_reduce(torch.ones(1), group=odd)
        error = str(caught.value)
    return type(mesh.get_group("row")).__name__, sums, error is not None


def test_subgroups_then_each_has_its_own_memory_and_global_names():
    answers = on_ranks(4, use_subgroups, backend="cpu:dure_shm")
    assert [answer[0] for answer in answers] == ["SharedMemoryGroup"] * 4
    assert [answer[1] for answer in answers] == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]
    assert [answer[2] for answer in answers] == [False, True, False, False]


def end_early(group):
    """Destroy a group while a call that nobody can finish is under way."""
    ours = shm_group()
    group_module._GRACE_SECONDS = 0.1
    work = dist.all_reduce(torch.ones(1), group=ours, async_op=True) if group.rank == 0 else None
    dist.destroy_process_group(ours)
    assert work is None or isinstance(work.exception(), PeerLost)
    abandoned = shm_group()
    abandoned.abort()
    return [entry.name for entry in os.scandir("/dev/shm")]


def test_destroy_when_a_call_is_under_way_then_it_fails_and_the_thread_ends():
    before = os.listdir("/dev/shm")
    assert on_ranks(2, end_early) == [before, before]


def test_group_of_this_process_then_it_is_like_any_other():
    store = dist.HashStore()
    group = SharedMemoryGroup(dist.PrefixStore("alone", store), 0, 1, TIMEOUT, [])
    number = torch.ones(3)
    # in the words of older callers, without option objects
    group.allreduce(number, dist.ReduceOp.MAX, timedelta(seconds=1)).wait()
    group.broadcast(number, 0).wait()
    group.allgather([torch.empty(3)], number).wait()
    group.reduce_scatter(number, [torch.full((3,), 2.0)], dist.ReduceOp.AVG).wait()
    group.barrier(timeout=timedelta(seconds=1)).wait()
    group.reduce(number, 0).wait()  # by gloo
    assert group._get_sequence_number_for_group() == 6
    group.set_timeout(timedelta(seconds=2))
    assert number.tolist() == [2.0] * 3
    assert group.name() == "dure_shm"
    assert group.get_group_store() is not None
    group.shutdown()


# -- DDP and FSDP2, as they are


def model_and_data(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 5))
    draw = torch.Generator().manual_seed(1)
    return model.to(dtype), torch.randn(12, 6, 20, generator=draw, dtype=dtype)


def train_ddp(group):
    """Train by gloo and by shared memory and return the largest difference between the weights."""
    weights = []
    for one in (None, shm_group()):
        model, data = model_and_data(torch.float64)
        # buckets of one or two gradients: several are under way during one backward
        engine = DistributedDataParallel(model, process_group=one, bucket_cap_mb=8192 / 2**20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in data:
            engine(batch[group.rank :: group.world_size]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()]))
    return (weights[0] - weights[1]).abs().max().item()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ddp_then_its_weights_are_those_by_gloo(num_ranks):
    # float64 rounds to 1e-16; three gradients may be added in another order, and 12 steps amplify what that leaves
    assert max(on_ranks(num_ranks, train_ddp)) < 1e-11


def train_with_hooks(group):
    """Return the weights after training with torch's own communication hooks, by gloo and by shared memory."""
    weights = []
    for one in (None, shm_group()):
        for state, hook in (
            (one, default_hooks.fp16_compress_hook),
            (powerSGD_hook.PowerSGDState(one, start_powerSGD_iter=3), powerSGD_hook.powerSGD_hook),
        ):
            model, data = model_and_data(torch.float32)
            engine = DistributedDataParallel(model, process_group=one)
            engine.register_comm_hook(state, hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in data:
                engine(batch[group.rank :: 2]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    return weights


def test_ddp_with_communication_hooks_then_its_weights_are_those_by_gloo():
    for half, low_rank, our_half, our_low_rank in on_ranks(2, train_with_hooks):
        # two summands have one order: the same bits
        assert torch.equal(half, our_half)
        assert torch.equal(low_rank, our_low_rank)


def overlap_ddp(group):
    """Return whether backward was over on rank 0, but for its last wait, before rank 1 had begun to communicate."""
    ours, store = shm_group(), dist.distributed_c10d._get_default_store()
    model, data = model_and_data(torch.float32)
    engine = DistributedDataParallel(model, process_group=ours, bucket_cap_mb=8192 / 2**20)
    engine(data[0]).sum().backward()  # the buckets are settled
    first = next(model.parameters())
    loss = engine(data[0]).sum()
    if group.rank == 0:
        # the last gradient of backward: every other bucket is under way by then
        hook = first.register_hook(lambda _: store.set("rank 0 has computed", "yes"))
    else:
        store.wait(["rank 0 has computed"], TIMEOUT)
    loss.backward()
    if group.rank == 0:
        hook.remove()
    return True


def test_ddp_then_backward_goes_on_while_gradients_are_under_way():
    assert on_ranks(2, overlap_ddp) == [True, True]


def train_fsdp(group):
    """Train a sharded model and return its whole weights."""
    model, data = model_and_data(torch.float32)
    mesh = init_device_mesh("cpu", (group.world_size,))
    model[2] = nn.Identity()  # the batch is divided: normalised per rank it would be another model
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in data:
        model(batch[group.rank :: group.world_size]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert type(mesh.get_group()) is SharedMemoryGroup
    return torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()]).detach()


def test_fsdp2_then_it_trains_as_one_process_does():
    (alone,) = on_ranks(1, train_fsdp, backend="cpu:dure_shm")
    for weights in on_ranks(2, train_fsdp, backend="cpu:dure_shm"):
        # float32, and Adam divides by small numbers
        torch.testing.assert_close(weights, alone, rtol=1e-4, atol=1e-5)


def use_dtensors(group):
    """Go through the functional collectives, which torch calls from C++, and through a batch of messages."""
    rank, world_size = group.rank, group.world_size
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(24.0).view(4, 6)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.full_tensor(), whole)
    assert torch.equal(rows.redistribute(placements=[Shard(1)]).full_tensor(), whole)
    parts = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
    assert torch.equal(parts.full_tensor(), whole * 3)
    assert torch.equal(parts.redistribute(placements=[Shard(0)]).to_local(), (whole * 3)[2 * rank : 2 * rank + 2])
    mean = _functional_collectives.all_reduce(whole * (rank + 1), "avg", mesh)
    assert torch.equal(_functional_collectives.wait_tensor(mean), whole * 1.5)
    incoming, other = torch.empty(1), 1 - rank
    messages = [dist.P2POp(dist.isend, torch.tensor([float(rank)]), other), dist.P2POp(dist.irecv, incoming, other)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return incoming.item()


def test_dtensors_and_functional_collectives_then_they_work_from_c_too():
    assert on_ranks(2, use_dtensors, backend="cpu:dure_shm") == [1.0, 0.0]


def come_back(group):
    """Destroy the default group and make another in the same process: nothing of the first may be left alive."""
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    old, threads = weakref.ref(dist.group.WORLD), threading.active_count()
    dist.destroy_process_group()
    gone = old() is None, threads - threading.active_count()
    dist.init_process_group("cpu:dure_shm", store=dist.HashStore(), rank=0, world_size=1)
    return gone


def test_destroy_then_the_group_and_its_thread_are_gone():
    assert on_ranks(2, come_back, backend="cpu:dure_shm") == [(True, 1)] * 2


# -- how a program gets at it


@pytest.mark.slow
def test_import_when_torch_comes_later_then_the_backend_is_there_and_torch_was_not_imported():
    code = """
        import sys
        import dure.comm
        import dure.comm.algorithms
        assert "torch" not in sys.modules
        import torch.distributed as dist
        dist.init_process_group("cpu:dure_shm", store=dist.HashStore(), rank=0, world_size=1)
        print(dist.get_backend(), type(dist.group.WORLD).__name__)
        dist.destroy_process_group()
    """
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert run.stdout == "cpu:dure_shm SharedMemoryGroup\n"


@pytest.mark.slow  # torchrun alone needs seconds
def test_torchrun_then_unmodified_code_uses_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "import dure.comm\n"
        "dist.init_process_group('cpu:dure_shm')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
        "number = torch.ones(1)\n"
        "dist.all_reduce(number)\n"
        # one write each: the ranks share the pipe, and print() writes its words one by one
        "os.write(1, f'{type(dist.group.WORLD).__name__} {number.item()} {dist.group.WORLD.why_gloo}\\n'.encode())\n"
        "dist.destroy_process_group()\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("SharedMemoryGroup 2.0") == 2
