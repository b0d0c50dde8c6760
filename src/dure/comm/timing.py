"""Timing of collectives on the ranks of a group, in the columns of nccl-tests.

Every measurement is verified as well: the inputs are integers whose reduced values are known, and `num_wrong` counts
the elements that differ.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dure.comm.algorithms.opening import open_all_reduce
from dure.comm.algorithms.wire import Wire
from dure.comm.choice import choose_algorithm, host_numbers
from dure.comm.groups import ProcessGroup
from dure.errors import SpecInvalid
from dure.process.jobs import BenchPlan
from dure.torchcompat.collectives import all_gather_single, reduce_scatter_single

LEAST_SECONDS = 0.05
"""Minimum seconds of all repeats of one size together."""
LEAST_REPEATS, MOST_REPEATS = 3, 2000
"""Minimum and maximum repeats, whatever time they take."""

BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda world_size: 2 * (world_size - 1) / world_size,
    "all_gather": lambda world_size: (world_size - 1) / world_size,
    "reduce_scatter": lambda world_size: (world_size - 1) / world_size,
    "broadcast": lambda world_size: 1.0,
    "send_recv": lambda world_size: 1.0,
}
"""Bus bandwidth over algorithm bandwidth (nccl-tests, PERFORMANCE.md): the optimal load of a link per byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRow:
    """One row of the table."""

    collective: str
    algorithm: str
    num_bytes: int
    """Bytes of the whole vector: the output of an all-gather, the input of a reduce-scatter, as in nccl-tests."""
    count: int
    """Number of elements of the vector."""
    dtype: str
    op: str
    """Reduction; `none` if nothing is reduced."""
    seconds: float
    """Seconds of one call, on the slowest rank."""
    bus_factor: float
    num_wrong: int
    repeats: int

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain values, with two bandwidths in bytes per second.

        `algorithm_bytes_per_second` is that of the whole vector, `bus_bytes_per_second` that of each link, which is
        comparable between collectives and numbers of ranks.
        """
        speed = self.num_bytes / self.seconds
        return {
            **asdict(self),
            "algorithm_bytes_per_second": speed,
            "bus_bytes_per_second": speed * self.bus_factor,
        }


class _Case(NamedTuple):
    call: Callable[[], None]
    reset: Callable[[], object]
    count_wrong: Callable[[], int]
    num_elements: int


def measure(group: ProcessGroup, device: torch.device, plan: BenchPlan) -> Iterator[BenchRow]:
    """Run all measurements of the plan; every rank gets every row.

    Communication: the measured collectives, and per row a few small all_reduce and gathered JSON messages.
    """
    dtype = getattr(torch, plan.dtype)
    hosts = host_numbers(group)
    for collective in plan.collectives:
        for algorithm in plan.algorithms if collective == "all_reduce" else ["backend"]:
            named = choose_algorithm(algorithm, device.type, hosts) if collective == "all_reduce" else algorithm
            reducer = open_all_reduce(named, hosts=hosts) if collective == "all_reduce" else None
            for num_bytes in plan.sizes:
                op = plan.op if collective in ("all_reduce", "reduce_scatter") else "none"
                case = _case(group, device, dtype, collective, num_bytes, op, reducer)
                seconds, repeats = _time(group, case, plan.warm_up)
                case.reset()
                case.call()
                wrong = torch.tensor([float(case.count_wrong())], dtype=torch.float64)
                group.all_reduce_sum(wrong)
                yield BenchRow(
                    collective=collective,
                    algorithm=named,
                    num_bytes=case.num_elements * dtype.itemsize,
                    count=case.num_elements,
                    dtype=plan.dtype,
                    op=op,
                    seconds=seconds,
                    bus_factor=BUS_FACTORS[collective](group.world_size),
                    num_wrong=int(wrong.item()),
                    repeats=repeats,
                )
            if reducer is not None:
                reducer.close()


def _time(group: ProcessGroup, case: _Case, warm_up: int) -> tuple[float, int]:
    """Return the seconds of one call on the slowest rank, and the number of repeats."""
    for _ in range(max(1, warm_up)):
        case.call()
    _finish()
    once = _slowest(group, _timed(group, case, 1))
    repeats = min(MOST_REPEATS, max(LEAST_REPEATS, math.ceil(LEAST_SECONDS / max(once, 1e-9))))
    return _slowest(group, _timed(group, case, repeats)) / repeats, repeats


def _timed(group: ProcessGroup, case: _Case, repeats: int) -> float:
    group.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        case.call()
    _finish()
    return time.perf_counter() - start


def _finish() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _slowest(group: ProcessGroup, seconds: float) -> float:
    # all ranks must repeat equally often, so they all use the same number
    return float(max(group.all_gather_json(seconds)))


def _case(
    group: ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    collective: str,
    num_bytes: int,
    op: str,
    reducer: object,
) -> _Case:
    """Build one measurement: its call, the reset of its input, and the check of its output."""
    world_size, rank = group.world_size, group.rank
    count = max(1, num_bytes // dtype.itemsize)
    if collective in ("all_gather", "reduce_scatter"):
        count = -(-count // world_size) * world_size
    of_rank = _pattern(count, dtype, device)
    mine = of_rank * (rank + 1)
    if collective == "all_reduce":
        vector = mine.clone()
        expected = _reduced(of_rank, world_size, op)
        reduce = reducer.all_reduce  # type: ignore[attr-defined]
        return _Case(
            lambda: reduce(vector, op), lambda: _copy(vector, mine), lambda: _num_wrong(vector, expected), count
        )
    if collective == "reduce_scatter":
        if op != "sum":
            raise SpecInvalid([f"op is {op} but reduce_scatter is measured with sum: leave --op out"])
        share = torch.empty(count // world_size, dtype=dtype, device=device)
        expected = _reduced(of_rank, world_size, "sum").chunk(world_size)[rank]
        return _Case(
            lambda: reduce_scatter_single(share, mine), share.zero_, lambda: _num_wrong(share, expected), count
        )
    if collective == "all_gather":
        part = mine.chunk(world_size)[rank].clone()
        output = torch.empty(count, dtype=dtype, device=device)
        expected = torch.cat([chunk * (r + 1) for r, chunk in enumerate(of_rank.chunk(world_size))])
        return _Case(lambda: all_gather_single(output, part), output.zero_, lambda: _num_wrong(output, expected), count)
    if collective == "broadcast":
        vector = mine.clone()
        return _Case(
            lambda: _wait(dist.broadcast(vector, 0)),
            lambda: _copy(vector, mine),
            lambda: _num_wrong(vector, of_rank),
            count,
        )
    incoming = torch.zeros_like(mine)
    sender, receiver = (rank - 1) % world_size, (rank + 1) % world_size
    expected = of_rank * (sender + 1)

    wire = Wire(group.process_group)
    return _Case(
        lambda: wire.exchange(mine, receiver, incoming, sender),
        incoming.zero_,
        lambda: _num_wrong(incoming, expected),
        count,
    )


def _wait(work: object) -> None:
    """Accept the result of a blocking collective, which is None."""


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _pattern(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return small integers that are exact in every dtype: 1, 2, 3, 4, 5, 1, ..."""
    return (torch.arange(count, device=device) % 5 + 1).to(dtype)


def _reduced(of_rank: Tensor, world_size: int, op: str) -> Tensor:
    if op == "max":
        return of_rank * world_size
    total = of_rank * (world_size * (world_size + 1) // 2)
    if op == "sum":
        return total
    return total / world_size if total.is_floating_point() else total.div(world_size, rounding_mode="trunc")


def _num_wrong(seen: Tensor, expected: Tensor) -> int:
    # a mean may differ by rounding, everything else is exact
    return int(
        (~torch.isclose(seen, expected, rtol=1e-2 if seen.dtype in (torch.float16, torch.bfloat16) else 1e-6)).sum()
    )


def sizes_between(least: int, most: int, factor: float) -> Sequence[int]:
    """Return sizes in bytes from `least` to `most`, each `factor` times the one before; `most` is included."""
    sizes = []
    size = float(least)
    while size < most * (1 - 1e-9):
        sizes.append(int(size))
        size *= factor
    return [*sizes, most]
