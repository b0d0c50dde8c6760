"""Collectives of this process from torch's flight recorder: when each was called, and what it sent."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from math import prod

from dure.torchcompat.calls import flight_record, group_members

_ITEM_BYTES = {"Double": 8, "Long": 8, "ComplexFloat": 8, "ComplexDouble": 16, "Half": 2, "BFloat16": 2, "Short": 2}
_OTHER_BYTES = {"Byte": 1, "Char": 1, "Bool": 1}
_WORD_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Collectives in the order of their calls; sends and receives are left out."""

    times: list[float] = field(default_factory=list)
    """Time of each call, seconds since the epoch."""
    ops: list[str] = field(default_factory=list)
    input_bytes: list[int] = field(default_factory=list)
    group_sizes: list[int] = field(default_factory=list)

    def sent_bytes(self, begin: float, end: float) -> int:
        """Return the bytes that a rank sends for the calls in an interval, if they are those of rings."""
        within = range(bisect_left(self.times, begin), bisect_right(self.times, end))
        return sum(_sent(self.ops[index], self.input_bytes[index], self.group_sizes[index]) for index in within)


def read_calls() -> Calls:
    """Read the collectives that the recorder still has."""
    found = sorted(
        (one for one in flight_record(with_frames=False) if not one["op"].startswith(("send", "recv"))),
        key=lambda one: float(one["time"]),
    )
    sizes = {name: len(ranks) for name, ranks in group_members().items()}
    return Calls(
        times=[float(one["time"]) for one in found],
        ops=[str(one["op"]) for one in found],
        input_bytes=[_num_bytes(one["sizes"], one["dtypes"]) for one in found],
        group_sizes=[sizes.get(str(one["group"]), 1) for one in found],
    )


def _num_bytes(sizes: list[list[int]], dtypes: list[str]) -> int:
    known = {**_ITEM_BYTES, **_OTHER_BYTES}
    return sum(
        prod(size) * (1 if dtype.startswith("Float8") else known.get(dtype, _WORD_BYTES))
        for size, dtype in zip(sizes, dtypes, strict=False)
    )


def _sent(op: str, num_bytes: int, group_size: int) -> int:
    if "reduce_scatter" in op:
        return num_bytes * (group_size - 1) // group_size
    if "gather" in op:
        return num_bytes * (group_size - 1)
    if "all_reduce" in op or "allreduce" in op:
        return 2 * num_bytes * (group_size - 1) // group_size
    return num_bytes
