"""Every interface in torchcompat, on whatever torch this is: the test to run on a new version."""

import importlib
import io
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed import fsdp
from torch.numa import binding as numa

from dure import torchcompat
from dure.comm.groups import ProcessGroup
from dure.errors import EnvironmentLacks
from tests.comm.gloo_ranks import on_ranks

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        yield made


@pytest.fixture
def solo_group(listener: socket.socket) -> Iterator[None]:
    torchcompat.import_late_parts()
    store = torchcompat.store_on_socket(listener, TIMEOUT)
    dist.init_process_group("gloo", store=dist.PrefixStore("test", store), rank=0, world_size=1, timeout=TIMEOUT)
    yield
    dist.destroy_process_group()


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.slow
def test_late_parts_when_imported_first_then_ddp_lets_go_of_its_group() -> None:
    out = run_python(
        "import gc, socket, psutil, torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "from torch import nn\n"
        "from dure import torchcompat\n"
        "torchcompat.import_late_parts()\n"
        "store = torchcompat.store_on_socket(socket.create_server(('127.0.0.1', 0)), timedelta(seconds=20))\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "nn.parallel.DistributedDataParallel(nn.Linear(2, 2))\n"
        "dist.destroy_process_group()\n"
        "del store\n"
        "gc.collect()\n"
        "print(psutil.Process().net_connections('tcp'))"
    )
    assert out == "[]\n"


def test_found_overflows_when_there_are_no_gradients_then_one_number_can_be_agreed_on() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.unscale_(optimizer)
    assert torchcompat.found_overflows(scaler, optimizer) == []
    (found,) = torchcompat.found_overflows(scaler, optimizer, torch.device("cpu"))
    found += 1  # another rank's gradient overflowed
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    assert scaler.get_scale() == before / 2


def test_found_overflows_when_changed_then_the_step_is_skipped() -> None:
    scaler = torch.amp.GradScaler("cpu")
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    (found,) = torchcompat.found_overflows(scaler, optimizer)
    assert found.item() == 0
    found += 1
    scaler.step(optimizer)
    assert parameter.tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_abort_then_no_process_group_is_left() -> None:
    code = (
        "import torch.distributed as dist\n"
        "from dure import torchcompat\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.new_group()\n"
        "torchcompat.abort_process_groups()\n"
        "print(dist.is_initialized())\n"
    )
    assert run_python(code) == "False\n"


def test_group_timeout_when_it_was_set_then_that_is_it(solo_group: None) -> None:
    assert torchcompat.group_timeout_seconds() == TIMEOUT.total_seconds()
    assert torchcompat.group_timeout_seconds(dist.new_group(timeout=timedelta(seconds=3))) == 3.0


def test_sequence_number_when_there_is_no_group_then_is_unknown() -> None:
    assert torchcompat.SequenceNumber().now() == -1


def test_sequence_number_when_groups_come_and_go_then_is_that_of_the_last_collective() -> None:
    sequence = torchcompat.SequenceNumber()
    for backend in ("gloo", "cpu:gloo"):  # of which torch itself asks only the first
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        assert sequence.now() == 0
        dist.barrier()
        dist.all_reduce(torch.ones(1))
        assert sequence.now() == 2
        dist.destroy_process_group()
        assert sequence.now() == -1


def test_give_gloo_when_a_group_of_python_overrides_a_call_then_gloo_makes_all_others() -> None:
    class Group(dist.ProcessGroup):
        def barrier(self, opts=None):
            return "mine"

    group, number, options = Group(0, 1), torch.ones(2), torchcompat.AllgatherOptions()
    plain = torchcompat.give_gloo(group, dist.HashStore(), 0, 1, TIMEOUT)
    assert group.barrier() == "mine"
    plain.barrier().wait()
    group.allreduce([number]).wait()
    group.allgather([[gathered := torch.zeros(2)]], [number], options).wait()
    assert gathered.tolist() == [1.0, 1.0]
    assert options.timeout.total_seconds() < 0  # nothing said
    assert torchcompat.group_timeout_seconds(group) == TIMEOUT.total_seconds()


def test_served_store_when_a_group_follows_another_then_it_finds_nothing_of_it(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = listener.getsockname()
    server = torchcompat.store_on_socket(listener, TIMEOUT)
    for module, name in (
        (sys.modules["torch.distributed.rendezvous"], "_create_c10d_store"),
        (c10d, "_update_default_pg"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # to be restored
    torchcompat.meet_at_served_store(host, port)
    found = []
    for _ in range(2):
        dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=0, world_size=1, timeout=TIMEOUT)
        found.append(c10d._get_default_store().add("key", 1))
        dist.destroy_process_group()
    assert found == [1, 1]
    assert server is not None


def test_store_when_served_on_a_socket_then_it_answers_at_that_address_only(listener: socket.socket) -> None:
    host, port = listener.getsockname()
    store = torchcompat.store_on_socket(listener, TIMEOUT)
    client = torchcompat.store_at(host, port, TIMEOUT)
    client.set("key", "value")
    assert store.get("key") == b"value"
    assert listener.fileno() == -1, "the store owns the descriptor"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=5)


@pytest.mark.usefixtures("solo_group")
def test_collectives_when_called_by_their_new_names_then_no_version_warns() -> None:
    gathered, scattered = torch.zeros(2), torch.zeros(2)
    torchcompat.all_gather_single(gathered, torch.tensor([1.0, 2.0]))
    torchcompat.reduce_scatter_single(scattered, torch.tensor([3.0, 4.0]))
    assert gathered.tolist() == [1, 2]
    assert scattered.tolist() == [3, 4]


@pytest.mark.slow
def test_divided_optimizer_when_its_package_is_imported_then_nothing_warns_and_the_part_steps() -> None:
    out = run_python(
        "import socket, torch, torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "from torch import nn\n"
        "from dure import torchcompat\n"
        "torchcompat.import_late_parts()\n"
        "store = torchcompat.store_on_socket(socket.create_server(('127.0.0.1', 0)), timedelta(seconds=20))\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "for in_one_message in (False, True):\n"
        "    parameter = nn.Parameter(torch.ones(3))\n"
        "    parameter.grad = torch.ones(3)\n"
        "    groups = [{'params': [parameter], 'lr': 0.5}]\n"
        "    whole = torchcompat.divide_optimizer(groups, torch.optim.SGD, in_one_message=in_one_message)\n"
        "    whole.param_groups[0]['lr'] = 0.25\n"
        "    whole.step()\n"
        "    print(parameter.tolist())\n"
        "    whole.rho = 0.5\n"
        "    whole.optim.scale, whole.rank = 2.0, 0\n"
        "    whole.state = {}\n"
        "    print(whole.optim.rho, whole.scale, hasattr(whole.optim, 'rank'), whole.optim.state is whole.state)\n"
        "    del whole.rho\n"
        "    print(hasattr(whole, 'rho'), hasattr(whole, 'nothing'))\n"
        "dist.destroy_process_group()\n"
    )
    assert out.splitlines() == ["[0.75, 0.75, 0.75]", "0.5 2.0 False True", "False False"] * 2


def test_module_bases_when_asked_then_they_take_in_every_kind() -> None:
    assert all(
        isinstance(kind(2), torchcompat.BatchNorm) for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm)
    )
    assert all(isinstance(kind(0.5), torchcompat.Dropout) for kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))


def test_multiply_when_dtypes_differ_then_each_tensor_is_multiplied_in_place() -> None:
    tensors = [torch.ones(2), torch.ones(1, dtype=torch.float64)]
    torchcompat.multiply_(tensors, 3.0)
    torchcompat.multiply_(tensors, torch.tensor(2.0))
    assert [tensor.tolist() for tensor in tensors] == [[6, 6], [6]]


def test_default_generator_when_on_cpu_then_torch_rand_draws_from_it() -> None:
    generator = torchcompat.default_generator(torch.device("cpu"))
    before = generator.get_state()
    drawn = torch.rand(3)
    generator.set_state(before)
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.gpu
def test_default_generator_when_on_cuda_then_it_is_the_devices() -> None:
    device = torch.device("cuda", 0)
    generator = torchcompat.default_generator(device)
    generator.manual_seed(3)
    drawn = torch.rand(3, device=device)
    generator.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3, device=device))


def test_binding_when_a_device_is_near_a_node_then_threads_run_on_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = os.sched_getaffinity(0)
    # torch asks for the command numactl, which it needs for other programs only
    monkeypatch.setattr(numa.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(numa, "_get_logical_cpus_to_bind_to", lambda **_: {max(cores)})
    try:
        torchcompat.bind_to_numa_node(0, "node")
        bound = [os.sched_getaffinity(int(thread.name)) for thread in Path("/proc/self/task").iterdir()]
    finally:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)
    assert bound == [{max(cores)}] * len(bound)


def test_binding_when_no_core_is_known_then_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(numa, "_get_logical_cpus_to_bind_to", lambda **_: set())
    with pytest.raises(EnvironmentLacks, match=r"numa_binding is node, and the cores near device 1 .*: leave it out"):
        torchcompat.bind_to_numa_node(1, "node")
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_torchvision_when_imported_through_dure_then_models_and_transforms_work() -> None:
    pytest.importorskip("PIL", reason="the vision extra is not installed")
    # a fresh interpreter: a process can declare operators once
    out = run_python(
        "from dure.torchcompat import import_torchvision, repair_torchvision\n"
        "vision = import_torchvision()\n"
        "import torch, torchvision.transforms.v2 as transforms\n"
        "print(vision.models.resnet18(num_classes=3)(torch.rand(2, 3, 32, 32)).shape)\n"
        "print(transforms.RandomHorizontalFlip(1.0)(torch.arange(2).view(1, 1, 2)).tolist())\n"
        "print(repair_torchvision())"
    )
    assert out.splitlines() == ["torch.Size([2, 3])", "[[[1, 0]]]", "False"]


def test_torchvision_when_not_installed_then_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setattr(torchcompat, "repair_torchvision", lambda: False)
    with pytest.raises(torchcompat.EnvironmentLacks, match=r"pip install 'dure\[vision\]'"):
        torchcompat.import_torchvision()


def test_run_backward_when_given_two_roots_then_gradients_are_autograds() -> None:
    weight, carrier = torch.ones(3, requires_grad=True), torch.zeros(2, requires_grad=True)
    for _ in range(2):
        torchcompat.run_backward((weight * 2.0).sum(), (carrier.view(-1), torch.tensor([3.0, 4.0])))
    assert [weight.grad.tolist(), carrier.grad.tolist()] == [[4.0, 4.0, 4.0], [6.0, 8.0]]


def test_found_overflows_when_a_gradient_is_not_finite_then_the_live_number_says_so() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(1))
    parameter.grad = torch.ones(2)
    scaler.unscale_(optimizer)
    (found,) = torchcompat.found_overflows(scaler, optimizer)
    assert found.item() == 0.0
    found += 1.0  # as another rank's would be added
    scaler.step(optimizer)
    assert parameter.tolist() == [1.0, 1.0]


def test_reduce_unused_too_when_torch_has_it_then_every_inner_module_is_told() -> None:
    class Old:
        pass

    class New:
        def set_reduce_scatter_unused_params(self, is_wanted: bool) -> None:
            self.is_wanted = is_wanted

    assert not torchcompat.reduce_unused_too(Old())
    new = New()
    assert torchcompat.reduce_unused_too(new)
    assert new.is_wanted
    has_it = hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params")
    assert has_it == (tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) > (2, 11))


def one_parameter() -> nn.Parameter:
    return THE_PARAMETER


def twice_the_parameter() -> torch.Tensor:
    return 2.0 * THE_PARAMETER


def take_local(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


THE_PARAMETER = nn.Parameter(torch.ones(2))


def test_rpc_when_a_parameter_is_elsewhere_then_it_is_referred_to_and_stepped_there_without_a_word() -> None:
    def work(group: ProcessGroup) -> list[float]:
        torchcompat.import_distributed_optim()
        torchcompat.start_rpc(f"agent{group.rank}", group.rank, group.world_size, 20.0)
        group.barrier()
        if group.rank == 0:
            from torch.distributed import autograd, rpc

            reference = rpc.remote("agent1", one_parameter)
            optimizer = torchcompat.optimizer_of_references(take_local, [reference])
            with autograd.context() as context:
                value = rpc.remote("agent1", twice_the_parameter)
                autograd.backward(context, [value.to_here().sum()])
                optimizer.step(context)
            del optimizer, reference, value
        group.barrier()
        torchcompat.stop_rpc(20.0)
        return THE_PARAMETER.tolist()

    assert on_ranks(2, work) == [[1.0, 1.0], [-1.0, -1.0]]


def test_flight_record_then_names_calls_and_lines(solo_group: None) -> None:
    dist.all_reduce(torch.ones(3))
    deadline = time.monotonic() + 10  # on a busy machine it is noted after the call has come back
    while (last := torchcompat.flight_record()[-1])["is_pending"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (last["op"], last["sizes"], last["dtypes"], last["is_pending"]) == ("all_reduce", [[3]], ["Float"], False)
    assert [__file__, "test_flight_record_then_names_calls_and_lines"] in [
        [file, function] for file, _, function in last["frames"]
    ]


def test_flight_record_of_nccl_when_batched_messages_are_never_retired_then_only_the_last_is_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(op: str, retired: bool, group: str = "0", state: str = "scheduled") -> dict[str, object]:
        is_p2p = op in ("send", "recv")
        return {
            "process_group": (group, ""), "p2p_seq_id": 0, "collective_seq_id": 0, "is_p2p": is_p2p, "state": state,
            "profiling_name": f"nccl:{op}", "input_sizes": [], "input_dtypes": [], "time_created_ns": 0,
            "retired": retired, "frames": [],
        }  # fmt: skip

    entries = [
        entry("send", False), entry("recv", False), entry("all_reduce", True),  # ended, as what came after them did
        entry("send", False, "1"), entry("recv", False, "1"),
        entry("all_reduce", False), entry("send", False),
    ]  # fmt: skip
    module = importlib.import_module("torch._C._distributed_c10d")
    monkeypatch.setattr(torchcompat.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torchcompat.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(module, "_dump_nccl_trace", lambda: pickle.dumps({"entries": entries}), raising=False)
    assert [call["is_pending"] for call in torchcompat.flight_record()] == [
        False,
        False,
        False,
        False,
        True,
        True,
        True,
    ]


def test_flight_record_when_there_is_no_group_then_is_empty() -> None:
    assert torchcompat.flight_record() == []


def seen_while(call: Callable[[], object]) -> dict[str, Any] | None:
    """Say what another thread is in that makes a call, once it is in one."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    seen = None
    while seen is None and time.monotonic() < deadline:
        time.sleep(0.01)
        seen = torchcompat.call_under_way(sys._current_frames()[thread.ident])
    dist.send(torch.ones(1), 0)  # rank 0 may go on
    thread.join(10)
    return seen


@pytest.mark.parametrize(
    ("call", "answer", "expected"),
    [
        (
            lambda: dist.recv(torch.ones(2, 3), src=0, tag=5),
            lambda: dist.send(torch.ones(2, 3), 1, tag=5),
            {"op": "recv", "role": "src", "peer": 0, "tag": 5, "sizes": [[2, 3]]},
        ),
        (
            lambda: dist.broadcast(torch.ones(4), group_src=0),
            lambda: dist.broadcast(torch.ones(4), 0),
            {"op": "broadcast", "role": "src", "peer": 0, "tag": 0, "sizes": [[4]]},
        ),
        (dist.barrier, dist.barrier, {"op": "barrier", "role": None, "peer": None, "tag": 0, "sizes": []}),
    ],
)
def test_call_under_way_then_its_arguments_are_read_from_the_frames(call, answer, expected) -> None:
    def work(group: ProcessGroup) -> object:
        if group.rank == 1:
            return seen_while(call)
        dist.recv(torch.ones(1), 1)
        answer()
        return torchcompat.group_members()

    (members, seen) = on_ranks(2, work)
    assert members[seen.pop("group")] == [0, 1]
    assert seen == expected


def test_call_under_way_when_a_transfer_is_waited_for_then_is_that() -> None:
    def wait() -> None:
        work = dist.irecv(torch.ones(2), 0, tag=5)
        work.wait()

    def work(group: ProcessGroup) -> object:
        if group.rank == 1:
            return seen_while(wait)
        dist.recv(torch.ones(1), 1)
        return dist.send(torch.ones(2), 1, tag=5)

    seen = on_ranks(2, work)[1]
    assert (seen["op"], seen["role"]) == ("irecv", None)


def test_call_under_way_when_there_is_none_then_is_none() -> None:
    assert torchcompat.call_under_way(sys._getframe()) is None


def test_calls_made_then_counts_all_groups(solo_group: None) -> None:
    before = torchcompat.calls_made()
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3), group=dist.new_group([0]))
    assert torchcompat.calls_made() >= before + 2


def test_calls_made_when_there_is_no_group_then_is_not_known() -> None:
    assert torchcompat.calls_made() == -1
    assert torchcompat.group_members() == {}


def test_name_called_then_is_what_a_frame_waits_for() -> None:
    thread = threading.Thread(target=lambda: os.read(read, 1), daemon=True)
    read, write = os.pipe()
    thread.start()
    time.sleep(0.05)
    name = torchcompat.name_called(sys._current_frames()[thread.ident])
    os.write(write, b"x")
    thread.join()
    os.close(read)
    os.close(write)
    assert name == "read"


def test_plain_data_when_it_names_a_function_then_nothing_runs(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "made"),)

    with pytest.raises(pickle.UnpicklingError, match="is no plain data"):
        torchcompat._PlainData(io.BytesIO(pickle.dumps([Runs()]))).load()
    assert not (tmp_path / "made").exists()


MISFITS = {
    "raise RuntimeError('operator fake::nms does not exist')": True,
    "import torch\ntorch.no_such_thing_at_all": True,
    "from torch import no_such_thing_at_all": True,
    "raise RuntimeError('the file is missing')": False,
}


@pytest.mark.parametrize(("source", "is_misfit"), MISFITS.items())
def test_library_when_it_was_made_for_another_torch_then_a_sentence_says_so(source, is_misfit, tmp_path, monkeypatch):
    from dure.errors import EnvironmentLacks, TaskInvalid
    from dure.training.task.load_task import load_task_class

    library = tmp_path / "site-packages/fakevision"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text(source)
    (tmp_path / "misfit_task.py").write_text("import fakevision\n")
    monkeypatch.syspath_prepend(str(library.parent))
    kind, said = (EnvironmentLacks, "fakevision does not fit torch") if is_misfit else (TaskInvalid, "does not import")
    with pytest.raises(kind, match=said):
        load_task_class(f"{tmp_path}/misfit_task.py:Task")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3.0)[None][:, 0],
        torch.arange(3.0)[None].t(),
        torch.arange(6).bfloat16().reshape(2, 3)[:, 1],
        torch.tensor(7),
        torch.zeros(0, 3),
        torch.tensor([1 + 2j]).conj(),
    ],
    ids=["column of one row", "one row turned", "column", "number", "nothing", "conjugate"],
)
def test_bytes_of_any_strides_then_are_those_of_a_plain_copy(tensor: torch.Tensor) -> None:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    assert bytes(torchcompat.bytes_of(tensor).tolist()) == bytes(plain.untyped_storage().tolist())


def test_world_size_when_read_then_noted_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with torchcompat.reads_of_world_size() as reads:
        assert os.environ["HOME"]
        assert reads == []
        assert os.environ.get("WORLD_SIZE") == "2"
        assert os.getenv("LOCAL_WORLD_SIZE") is None
        with pytest.raises(ValueError, match="process group"):
            torch.distributed.get_world_size()
    assert os.environ["WORLD_SIZE"] == "2"
    assert [read.rpartition(":")[0] for read in reads] == [__file__, __file__]


# -- memory on devices whose tensors have another implementation, as those of kinds from outside (here: meta)


def test_give_data_when_the_implementation_is_another_then_the_parameter_stays_with_its_hooks():
    parameter = nn.Parameter(torch.ones(2))
    parameter.mark = "kept"
    seen = []
    parameter.register_hook(lambda gradient: seen.append(gradient.device.type))
    parameter.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad.device.type))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.empty(2, device="meta")
    torchcompat.give_data(parameter, torch.empty(2, device="meta"))
    assert (parameter.device.type, parameter.mark, parameter.is_leaf) == ("meta", "kept", True)
    parameter.sum().backward()
    torchcompat.give_data(parameter, torch.full((2,), 3.0))
    parameter.sum().backward()
    assert (parameter.tolist(), type(parameter)) == ([3.0, 3.0], nn.Parameter)
    assert seen == ["meta", "meta", "cpu", "cpu"]


def test_move_module_when_parameters_are_tied_then_they_stay_tied_and_the_same():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].weight = module[0].weight
    module[0].weight.grad = torch.ones(2, 2)
    before = [*module.parameters()]
    assert torchcompat.move_module(module, "meta") is module
    assert all(one is other for one, other in zip(module.parameters(), before, strict=True))
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}
    assert (module[1].weight is module[0].weight, module[0].weight.grad.device.type) == (True, "meta")


@pytest.mark.slow
def test_inductor_has_code_for_the_cpu_and_none_for_meta():
    assert torchcompat.has_inductor_for("cpu")
    assert not torchcompat.has_inductor_for("meta")


def test_generator_of_a_module_without_generators_has_the_states():
    states = {0: torch.zeros(5)}
    module = SimpleNamespace(
        get_rng_state=lambda device: states[device.index],
        set_rng_state=lambda state, device: states.update({device.index: state}),
    )
    generator = torchcompat._GeneratorOfModule(module, torch.device("cuda", 0))
    generator.set_state(torch.ones(5))
    assert generator.get_state().tolist() == [1.0] * 5
