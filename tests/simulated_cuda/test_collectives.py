"""Collectives between simulated devices: NCCL's rules, and gloo's freedom."""

import os
import signal
import socket
import time
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
SHORT = timedelta(seconds=2)
"""Timeout of a group with a rank that fails, for which the other one waits."""


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
def test_gloo_sends_no_memory_of_devices(folder: Path) -> None:
    def body(rank: int) -> None:
        x = torch.ones(2, device="cuda")
        for call in (dist.send, dist.recv):
            with pytest.raises(RuntimeError, match="Bad address"):
                call(x, 1 - rank)

    assert on_two_ranks("gloo", body) == ["None"] * 2


@on_devices(2)
def test_nccl_refuses_what_it_cannot_compute(folder: Path) -> None:
    def body(rank: int) -> None:
        x = torch.ones(4, 2, device="cuda")
        with pytest.raises(ValueError, match="must be contiguous"):
            dist.all_reduce(x.t())
        with pytest.raises(ValueError, match="with NCCL"):
            dist.all_reduce(x.int(), op=dist.ReduceOp.BOR)
        with pytest.raises(TypeError, match="data type is not supported"):
            dist.all_reduce(x.short())
        dist.all_reduce(torch.ones(2, 3, 4, 4, device="cuda").to(memory_format=torch.channels_last))

    assert on_two_ranks("nccl", body) == ["None"] * 2


@on_devices(2)
def test_results_of_nccl_are_seen_by_those_who_waited(folder: Path) -> None:
    def body(rank: int) -> str:
        x, other = torch.ones(2, device="cuda"), torch.full((2,), float(rank), device="cuda")
        work = dist.all_reduce(x, async_op=True)
        messages = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, other.clone(), 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
        )
        torch.cuda.synchronize()
        dist.barrier()
        before = x.tolist(), other.tolist()
        for one in (work, *messages):
            one.wait()
        return f"{before} {x.tolist()} {other.tolist()}"

    assert on_two_ranks("nccl", body) == [
        f"([1.0, 1.0], [{rank}.0, {rank}.0]) [2.0, 2.0] [{1 - rank}.0, {1 - rank}.0]" for rank in range(2)
    ]


@on_devices(2)
def test_rank_waits_for_one_that_is_lost_until_the_timeout(folder: Path) -> None:
    def body(rank: int) -> None:
        dist.all_reduce(torch.ones(1, device="cuda"))
        group = dist.new_group(timeout=SHORT)
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
        if rank == 1:
            os._exit(0)
        begun = time.monotonic()
        signal.signal(signal.SIGABRT, lambda *_: os.write(told[1], b"%f" % (time.monotonic() - begun)) and os._exit(0))
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)

    told = os.pipe()
    on_two_ranks("nccl", body)
    assert float(os.read(told[0], 100)) > 0.9 * SHORT.total_seconds()


@on_devices(2)
def test_calls_in_another_order_on_one_communicator_are_named(folder: Path) -> None:
    def body(rank: int) -> None:
        x, y = torch.ones(2, device="cuda"), torch.ones(3, device="cuda")
        group = dist.new_group(timeout=SHORT)
        for tensor in (x, y) if rank == 0 else (y, x):
            dist.all_reduce(tensor, group=group)

    said = on_two_ranks("nccl", body)
    assert any("NCCL would wait for ever: as its collective 1, rank" in text for text in said), said


@on_devices(2)
def test_calls_in_another_order_on_two_communicators_are_named(folder: Path) -> None:
    def body(rank: int) -> None:
        groups = [dist.new_group([0, 1], timeout=SHORT) for _ in range(2)]
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
