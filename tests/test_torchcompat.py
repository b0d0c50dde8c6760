"""Every interface in torchcompat, on whatever torch this is: the test to run on a new version."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dure import torchcompat

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


def test_late_parts_when_imported_first_then_ddp_lets_go_of_its_group() -> None:
    out = run_python(
        "import gc, socket, psutil, torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "from torch import nn\n"
        "from dure import torchcompat\n"
        "torchcompat.import_late_parts()\n"
        "store = torchcompat.store_on_socket(socket.create_server(('127.0.0.1', 0)), timedelta(seconds=20))\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "torchcompat.wrap_ddp(nn.Linear(2, 2))\n"
        "dist.destroy_process_group()\n"
        "del store\n"
        "gc.collect()\n"
        "print(psutil.Process().net_connections('tcp'))"
    )
    assert out == "[]\n"


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


@pytest.mark.usefixtures("solo_group")
@pytest.mark.parametrize("broadcast_buffers", [None, True, False])
def test_ddp_when_wrapped_then_nothing_warns_and_buffers_follow_the_argument(broadcast_buffers: bool | None) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    wrapped = torchcompat.wrap_ddp(model, bucket_bytes=1000, broadcast_buffers=broadcast_buffers)
    wrapped(torch.rand(4, 3)).sum().backward()
    assert wrapped.broadcast_buffers is (broadcast_buffers is not False)
    assert wrapped.bucket_bytes_cap == 1000


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
