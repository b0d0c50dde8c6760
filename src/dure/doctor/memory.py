"""Findings on the memory of ranks and devices."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median

from dure.records.events import DeviceMemory, Event, MemoryUsed, RankMemory, Training
from dure.records.finding import Finding
from dure.spec import RunSpec
from dure.units import format_bytes

_NEARLY_FULL = 0.92
"""Fraction of a memory from which the next larger batch or longer sample may not fit."""
_MOST_TIMES, _LEAST_BYTES = 1.3, 512 * 2**20
"""Multiple of the median, and bytes beyond it, from which one device holds more than the others: a process has a few
hundred megabytes of its own, which vary.
"""
_MOST_NAMED = 8


def memory_findings(spec: RunSpec, events: Sequence[Event]) -> Iterator[Finding]:
    """Yield what is wrong with the memory of the last attempt, as far as its ranks have recorded it."""
    used: MemoryUsed | None = None
    for event in events:
        used = None if isinstance(event, Training) else event if isinstance(event, MemoryUsed) else used
    if used is not None:
        yield from _nearly_full(spec, used.ranks)
        yield from _imbalance(spec, used.ranks)


def _nearly_full(spec: RunSpec, ranks: Sequence[RankMemory]) -> Iterator[Finding]:
    of_devices = [(f"rank {rank.rank}, {each.device}", each) for rank in ranks for each in rank.devices]
    full = [
        (name, each) for name, each in of_devices if each.device != "cpu" and _is_nearly_full(each.peak, each.total)
    ]
    hosts = [each for _, each in of_devices if each.device == "cpu"]
    if hosts and spec.nnodes in (None, "1", 1):
        together = sum(each.peak for each in hosts)
        if _is_nearly_full(together, hosts[0].total):
            full.append(("all ranks on the host", DeviceMemory(device="cpu", peak=together, total=hosts[0].total)))
    if full:
        yield Finding(
            id="near_out_of_memory",
            severity="warning",
            what="memory is nearly used up: a longer sample or another process may end the run",
            evidence=tuple(
                f"{name}: at most {format_bytes(each.peak)} of {format_bytes(each.total)} so far"
                for name, each in full[:_MOST_NAMED]
            ),
            files=("events.jsonl",),
            remedy="a smaller --microbatch-size (the result stays the same), --precision bf16, or a strategy that "
            "divides weights and optimiser state (fsdp, zero1)",
        )


def _is_nearly_full(peak: int, total: int) -> bool:
    return total > 0 and peak >= _NEARLY_FULL * total


def _imbalance(spec: RunSpec, ranks: Sequence[RankMemory]) -> Iterator[Finding]:
    """Yield a finding if one device of several has had much more in its memory than the others usually have."""
    peaks = [(each.peak, rank, each) for rank in ranks for each in rank.devices]
    if len(peaks) < 2:
        return
    most, rank, device = max(peaks, key=lambda found: found[0])
    usual = median(peak for peak, _, each in peaks if each is not device)
    if most < _MOST_TIMES * usual or most - usual < _LEAST_BYTES:
        return
    others = [each for each in ranks if each is not rank]
    held = {name: getattr(rank, name) for name in ("parameters", "gradients", "optimizer", "buffers")}
    usually = {name: median(getattr(each, name) for each in others) if others else 0 for name in held}
    more = max(held, key=lambda name: held[name] - usually[name])
    difference = held[more] - usually[more]
    if others and difference > (most - usual) / 2:
        cause = f"it holds {format_bytes(difference)} more {_NAMES[more]} than the others: the work is divided unevenly"
        remedy = "balance the division (--pipeline.cuts, --balanced-dp.device0-share), or use fsdp"
    elif not others:
        cause = "the first device of dp has the optimiser, the gathered outputs and the loss besides its samples"
        remedy = "--strategy ddp, a process for each device; or balanced_dp, which gives the first one fewer samples"
    else:
        cause = (
            "weights, gradients and optimiser state are as large on the others: it keeps something else, such as "
            "outputs, a cache, data that it alone reads, or checkpoints that were loaded to this device"
        )
        remedy = f"look at what rank {rank.rank} alone does; load files with map_location='cpu'"
    yield Finding(
        id="memory_imbalance",
        severity="note",
        what=f"rank {rank.rank} has had {format_bytes(most)} on {device.device}, and others usually "
        f"{format_bytes(usual)}",
        evidence=tuple(_lines(ranks)),
        files=("events.jsonl",),
        cause=cause,
        remedy=remedy,
    )


_NAMES = {
    "parameters": "of parameters",
    "gradients": "of gradients",
    "optimizer": "of optimiser state",
    "buffers": "of buffers",
}


def _lines(ranks: Sequence[RankMemory]) -> Iterator[str]:
    for each in ranks[:_MOST_NAMED]:
        peaks = ", ".join(
            f"{name} {format_bytes(max(found.peak for found in same))}"
            for name, same in groupby(each.devices, key=lambda found: found.device)
        )
        parts = ", ".join(f"{format_bytes(getattr(each, name))} {words}" for name, words in _NAMES.items())
        yield f"rank {each.rank}: peak on {peaks}; {parts}"
