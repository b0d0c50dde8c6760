"""Collectives between simulated devices: NCCL's rules, and gloo's freedom."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.simulated_cuda.devices import on_devices

pytestmark = pytest.mark.simulated

TO_ROUNDING = 1e-12
PATIENCE = timedelta(seconds=20)


def on_two_ranks(backend: str, body: Callable[[int], object]) -> list[str]:
    """Call a function on two ranks, each with a device, and return what each came to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        pipes = [os.pipe() for _ in range(2)]
        for rank, (_, write) in enumerate(pipes):
            if os.fork() == 0:
                text = ""
                try:
                    store = dist.TCPStore(
                        "127.0.0.1", port, 2, is_master=rank == 0, timeout=PATIENCE,
                        master_listen_fd=listener.fileno() if rank == 0 else None,
                    )  # fmt: skip
                    torch.cuda.set_device(rank)
                    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=PATIENCE)
                    text = str(body(rank))
                    dist.barrier()
                except Exception as error:
                    text = f"{type(error).__name__}: {error}"
                os.write(write, text.encode())
                os._exit(0)
            os.close(write)
    said = []
    for read, _ in pipes:
        with os.fdopen(read) as told:
            said.append(told.read())
        os.wait()
    return said


@on_devices(2)
def test_nccl_takes_tensors_of_devices_only(folder: Path) -> None:
    def body(rank: int) -> str:
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(2))
        x = torch.full((2,), float(rank), device="cuda")
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        gathered = torch.empty(4, device="cuda")
        dist.all_gather_into_tensor(gathered, x + rank)
        return f"{dist.get_backend()} {x.tolist()} {gathered.tolist()}"

    assert on_two_ranks("nccl", body) == ["nccl [0.5, 0.5] [0.5, 0.5, 1.5, 1.5]"] * 2


@on_devices(2)
def test_gloo_takes_tensors_of_both(folder: Path) -> None:
    def body(rank: int) -> str:
        on_host, on_device = torch.full((2,), 1.0 + rank), torch.full((2,), 1.0 + rank, device="cuda")
        dist.all_reduce(on_host)
        dist.all_reduce(on_device)
        return f"{on_host.tolist()} {on_device.tolist()}"

    assert on_two_ranks("gloo", body) == ["[3.0, 3.0] [3.0, 3.0]"] * 2


@on_devices(2)
def test_calls_in_another_order_on_one_communicator_are_named(folder: Path) -> None:
    def body(rank: int) -> None:
        x, y = torch.ones(2, device="cuda"), torch.ones(3, device="cuda")
        for tensor in (x, y) if rank == 0 else (y, x):
            dist.all_reduce(tensor)

    said = on_two_ranks("nccl", body)
    assert any("NCCL would wait for ever: as its collective 1, rank" in text for text in said), said


@on_devices(2)
def test_calls_in_another_order_on_two_communicators_are_named(folder: Path) -> None:
    def body(rank: int) -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        works = [
            dist.all_reduce(torch.ones(2, device="cuda"), group=group, async_op=True)
            for group in (groups if rank == 0 else groups[::-1])
        ]
        for work in works:
            work.wait()

    said = on_two_ranks("nccl", body)
    assert any("allreduce of communicator" in text and "NCCL would wait for ever" in text for text in said), said


@on_devices(2)
def test_ddp_and_sync_batchnorm_compute_the_gradients_of_the_whole_batch(folder: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 1)).double()
    x = torch.randn(5, 2, 6, dtype=torch.float64)

    def body(rank: int) -> float:
        whole = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
        model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(plain.cuda()))
        (2 * model((x[:3] if rank == 0 else x[3:]).cuda()).square().sum()).backward()  # DDP averages
        return max(
            float((parameter.grad.cpu() - expected).abs().max())
            for parameter, expected in zip(model.parameters(), whole, strict=True)
        )

    assert all(float(text) < TO_ROUNDING for text in on_two_ranks("nccl", body))
