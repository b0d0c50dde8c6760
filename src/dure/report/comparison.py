"""Comparison of short runs of one task that differ in their strategy or in the number of their processes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np

from dure.errors import RunInvalid
from dure.records.events import MemoryUsed
from dure.records.run_dir import RunDir, os_errors_as_sentences
from dure.records.step_columns import StepColumns, read_columns
from dure.records.step_record import PARTS
from dure.report.summary import declared_differences

VERSION = 1
_NUM_FIRST = 5
"""Steps at the start that are not timed: caches, allocators and buckets are set up in them."""
_LEAST_GAIN = 0.5
"""Speedup by a further device, in multiples of one device, below which it is not worth it."""
_END_FRACTION = 0.1
"""Fraction of the steps, at the end, over which a loss is averaged: that of a single batch varies."""
_COLUMNS = (
    "step",
    "samples_seen",
    "loss_sum",
    "loss_count",
    "wall_seconds",
    "sent_bytes",
    *(f"{p}_seconds" for p in PARTS),
)


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """Measurements of one run."""

    samples_per_second: float
    step_seconds: float
    """Mean seconds of a step."""
    part_seconds: Mapping[str, float]
    """Mean seconds of each of `PARTS` and of `other` in a step, over all ranks."""
    sent_bytes: float
    """Mean bytes that a rank sends for a step."""
    peak_bytes: int | None
    """Largest peak of a device's memory, or of a process on the CPU; None if it is not on record."""
    losses: tuple[tuple[float, float], ...]
    """Seconds of training so far and loss, after each step."""
    not_preserved: tuple[str, ...]
    samples: tuple[float, ...] = ()
    """Samples seen after each step."""
    rank_peak_bytes: Mapping[int, int] = field(default_factory=dict)
    """Largest peak of a device of each rank, as far as it is on record."""

    def loss_after(self, seconds: float) -> float:
        """Return the mean loss of the last steps within some seconds of training; NaN if there are none."""
        within = [loss for at, loss in self.losses if at <= seconds]
        return float(np.mean(within[-max(1, round(_END_FRACTION * len(within))) :])) if within else math.nan


@dataclass(frozen=True, kw_only=True)
class Result:
    """Measurements of one kind of run over all rounds."""

    samples_per_second: float
    """Median over the rounds."""
    slowest: float
    fastest: float
    speedup: float
    """Multiple of the samples per second of one process."""
    efficiency: float
    """Speedup divided by the number of devices."""
    part_seconds: Mapping[str, float]
    """Mean seconds of each part of a step."""
    exposed_fraction: float
    """Fraction of the time in which a rank waits for others, and computes nothing."""
    sent_bytes: float
    peak_bytes: int | None
    loss: float
    """Mean loss of the last steps, after as many samples as in every row."""
    loss_at_equal_time: float
    """Mean loss of the last steps within the time of the quickest kind."""
    not_preserved: tuple[str, ...]
    rank_peak_bytes: Mapping[int, int] = field(default_factory=dict)
    """Largest peak of each rank over the rounds, as far as it is on record."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of run in a comparison."""

    name: str
    num_devices: int
    result: Result | None = None
    fault: str | None = None
    """Reason why there is no result."""


def measure(run: RunDir) -> MeasuredRun:
    """Read the measurements of a completed run.

    Raises:
        RunInvalid: It has fewer steps than are needed, or its records cannot be read.
    """
    with os_errors_as_sentences(run.path, "read"), run.understood():
        columns = [read_columns(run.records_path(rank), _COLUMNS) for rank in run.recorded_ranks()]
        events = list(run.events())
    columns = [each for each in columns if each.steps.size > _NUM_FIRST]
    if not columns:
        raise RunInvalid(f"{run.path} has at most {_NUM_FIRST} steps, too few to be timed: use more samples")
    longest = max(columns, key=lambda each: float(each.values["wall_seconds"].sum()))
    wall, seen = longest.values["wall_seconds"], longest.values["samples_seen"]
    seconds = {part: float(np.mean([_timed(each, f"{part}_seconds").mean() for each in columns])) for part in PARTS}
    mean_wall = float(np.mean([_timed(each, "wall_seconds").mean() for each in columns]))
    losses = np.divide(
        longest.values["loss_sum"],
        longest.values["loss_count"],
        out=np.full(wall.size, np.nan),
        where=longest.values["loss_count"] > 0,
    )
    used = [event for event in events if isinstance(event, MemoryUsed)]
    peaks = {
        rank.rank: max(device.peak for device in rank.devices)
        for event in used[-1:]
        for rank in event.ranks
        if rank.devices
    }
    return MeasuredRun(
        samples_per_second=float((seen[-1] - seen[_NUM_FIRST - 1]) / wall[_NUM_FIRST:].sum()),
        step_seconds=mean_wall,
        part_seconds=seconds | {"other": max(0.0, mean_wall - sum(seconds.values()))},
        sent_bytes=float(np.mean([_timed(each, "sent_bytes").mean() for each in columns])),
        peak_bytes=max(peaks.values(), default=None),
        losses=tuple(zip(np.cumsum(wall).tolist(), losses.tolist(), strict=True)),
        not_preserved=tuple(declared_differences(events)),
        samples=tuple(seen.tolist()),
        rank_peak_bytes=peaks,
    )


def _timed(columns: StepColumns, name: str) -> np.ndarray:
    values: np.ndarray = columns.values[name][_NUM_FIRST:]
    return values


def compare(
    measured: Mapping[tuple[str, int], Sequence[MeasuredRun]], faults: Mapping[tuple[str, int], str]
) -> list[Row]:
    """Return a row for each kind of run, in the order given.

    Args:
        measured: Runs of each kind, one for each round, by name and number of devices; the first kind is on one device.
        faults: Reasons why kinds could not be measured.
    """
    done = [run for runs in measured.values() for run in runs]
    quickest = min((run.losses[-1][0] for run in done), default=0.0)
    base = next((median(run.samples_per_second for run in runs) for runs in measured.values() if runs), None)
    rows = []
    for (name, num_devices), runs in measured.items():
        if not runs:
            fault = faults.get((name, num_devices), "it was not measured")
            rows.append(Row(name=name, num_devices=num_devices, fault=fault))
            continue
        rows.append(Row(name=name, num_devices=num_devices, result=_result(runs, num_devices, base or 0.0, quickest)))
    return rows


def _result(runs: Sequence[MeasuredRun], num_devices: int, base: float, quickest: float) -> Result:
    rates = [run.samples_per_second for run in runs]
    parts = {part: float(np.mean([run.part_seconds[part] for run in runs])) for part in (*PARTS, "other")}
    speedup = median(rates) / base if base else math.nan
    return Result(
        samples_per_second=median(rates),
        slowest=min(rates),
        fastest=max(rates),
        speedup=speedup,
        efficiency=speedup / num_devices,
        part_seconds=parts,
        exposed_fraction=parts["sync"] / max(sum(parts.values()), 1e-12),
        sent_bytes=float(np.mean([run.sent_bytes for run in runs])),
        peak_bytes=max((run.peak_bytes for run in runs if run.peak_bytes is not None), default=None),
        loss=float(np.mean([run.loss_after(math.inf) for run in runs])),
        loss_at_equal_time=float(np.mean([run.loss_after(quickest) for run in runs])),
        not_preserved=tuple(dict.fromkeys(text for run in runs for text in run.not_preserved)),
        rank_peak_bytes={
            rank: max(run.rank_peak_bytes.get(rank, 0) for run in runs)
            for rank in sorted({rank for run in runs for rank in run.rank_peak_bytes})
        },
    )


def where_to_stop(rows: Sequence[Row]) -> str:
    """Return a sentence on the number of devices from which another one adds less than half of what the first does.

    Args:
        rows: Rows of one strategy on more and more devices, the first on one.
    """
    known = [(row.num_devices, row.result) for row in rows if row.result is not None]
    if len(known) < 2:
        return "there is nothing to compare"
    first = num_devices, best = known[0]
    for number, result in known[1:]:
        gain = (result.speedup - best.speedup) / (number - num_devices)
        if gain < _LEAST_GAIN:
            return (
                f"stop at {num_devices}: from there to {number}, each further device adds {gain:.2f} of what one does; "
                f"what is lost goes to {_lost_to(first[1], result, number)}"
            )
        num_devices, best = number, result
    return f"{num_devices} devices are still worth it: try more"


_PART_NAMES = {
    "data": "waiting for data",
    "forward_backward": "forward and backward, which do not become as much shorter",
    "sync": "waiting for other ranks",
    "optimizer": "the optimiser, which every rank runs",
    "other": "the rest of a step",
}


def _lost_to(one: Result, many: Result, num_devices: int) -> str:
    """Return the name of the part whose time exceeds most what an even division of a step on one device would leave."""
    beyond = {part: many.part_seconds[part] - one.part_seconds[part] / num_devices for part in one.part_seconds}
    return _PART_NAMES[max(beyond, key=lambda part: beyond[part])]


def to_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Return rows as plain JSON values."""
    return {"version": VERSION, "rows": [asdict(row) for row in rows]}
