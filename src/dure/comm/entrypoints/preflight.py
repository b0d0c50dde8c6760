"""Entry point of a rank of `dure preflight`: join the group, and try once each operation that a run relies on.

Each rank records the start and the end of every operation. If it gets stuck, its launcher reads there how far it came.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dure.comm.algorithms.wire import sends_from_devices
from dure.comm.groups import open_group
from dure.failures.report import describe_failure, write_failure
from dure.host.device_kinds import device_kind
from dure.process.context import Place
from dure.process.jobs import PreflightJob
from dure.torchcompat.imports import import_late_parts

_LARGE_BYTES = 4 * 2**20
_PERIOD = 251
"""Period of the test pattern. It is prime, so that no shift by a power of two looks correct. All sums are integers
below 2**24 up to 65,000 ranks, and so exact in float32."""
_ELEMENTS_SENT = 1024


class Progress:
    """Progress of one rank, as lines of JSON in a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Record the start and the end of a step."""
        self._write({"began": name, "time": time.time()})
        start = time.perf_counter()
        yield
        self._write({"done": name, "seconds": time.perf_counter() - start})

    def compare(self, name: str, got: torch.Tensor, right: torch.Tensor) -> None:
        """Record the number of wrong elements of a result, and the first of them."""
        is_wrong = got != right
        num_wrong = int(is_wrong.sum())
        if num_wrong:
            first = int(is_wrong.nonzero()[0])
            values = {"got": float(got[first]), "right": float(right[first])}
            self._write({"wrong": name, "num_wrong": num_wrong, "element": first, **values})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def main(job: PreflightJob, place: Place) -> int:
    """Try the collectives of the job's backend.

    Args:
        job: Job of this preflight.
        place: Context of this rank.
    """
    rank = place.rank.rank
    try:
        progress = Progress(Path(job.progress[place.rank.local_rank]))
        kind = job.device
        with progress.step("its device"):
            device = torch.device(kind)
            if device_kind(kind).has_several:
                device = torch.device(kind, place.rank.local_rank % job.num_devices)
                torch.accelerator.set_device_index(device)
            torch.set_num_threads(place.threads)
            torch.ones(1, device=device).sum().item()
        with progress.step("meeting the others"):
            group = open_group(
                place.rank, place.store, device=device, backend=job.backend, timeout_seconds=job.timeout_seconds
            )
        try_all(progress, rank, place.rank.world_size, device)
        with progress.step("leaving"):
            group.close()
    except BaseException as error:
        failure = describe_failure(error, rank, None)
        write_failure(failure, place.report_fd)
        return failure.exit_code
    return 0


def try_all(progress: Progress, rank: int, world_size: int, device: torch.device) -> None:
    """Reduce, broadcast from every rank, and send between all pairs of ranks; compare all results.

    Communication: two all_reduce (8 B, 4 MiB), `P` broadcasts and `P - 1` sends and receives of 4 KiB per rank.
    """
    ranks_sum = world_size * (world_size + 1) / 2
    base = torch.arange(_LARGE_BYTES // 4) % _PERIOD
    large = base * world_size + world_size * (world_size - 1) // 2
    for name, mine, right in (
        ("all_reduce of 8 B", torch.tensor([rank + 1.0, 0.0]), torch.tensor([ranks_sum, 0.0])),
        ("all_reduce of 4 MiB", (base + rank).float(), large.float()),
    ):
        with progress.step(name):
            mine = mine.to(device)
            dist.all_reduce(mine)
            progress.compare(name, mine.cpu(), right)
    for source in range(world_size):
        name = f"broadcast from rank {source}"
        with progress.step(name):
            tensor = (_pattern(source, source) if rank == source else torch.zeros(_ELEMENTS_SENT)).to(device)
            dist.broadcast(tensor, source)
            progress.compare(name, tensor.cpu(), _pattern(source, source))
    sends_from = device if sends_from_devices() else torch.device("cpu")
    for partner in partners(rank, world_size):
        first, second = sorted((rank, partner))
        name = f"send and receive between rank {first} and rank {second}"
        with progress.step(name):
            sent, got = _pattern(rank, partner).to(sends_from), torch.zeros(_ELEMENTS_SENT, device=sends_from)
            if rank == first:
                dist.send(sent, partner)
                dist.recv(got, partner)
            else:
                dist.recv(got, partner)
                dist.send(sent, partner)
            progress.compare(name, got.cpu(), _pattern(partner, rank))


def _pattern(source: int, target: int) -> torch.Tensor:
    return ((torch.arange(_ELEMENTS_SENT) + 7 * source + 13 * target) % _PERIOD).float()


def partners(rank: int, world_size: int) -> Iterator[int]:
    """Yield the partners of a rank in order, so that all pairs of ranks meet without a deadlock.

    This is the circle method of tournaments: in each round every rank has one partner, or pauses if their number is
    odd.
    """
    size = world_size + world_size % 2
    for number in range(size - 1):
        if rank == size - 1:
            # the last rank is fixed; its partner is the rank that would meet itself
            partner = number * size // 2 % (size - 1)
        else:
            partner = (number - rank) % (size - 1)
            partner = size - 1 if partner == rank else partner
        if partner < world_size:
            yield partner


def before_fork(job: PreflightJob) -> None:
    """Import, in the process that forks the ranks, what all of them need."""
    import_late_parts()
