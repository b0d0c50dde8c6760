"""Step records of a run as short series for charts: however many steps there were, a few hundred points of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dure.records.run_dir import RunDir
from dure.records.step_columns import StepColumns, read_columns
from dure.records.step_record import BACKWARD, PARTS, split_parts

MOST_POINTS = 500
MOST_SPANS = 200
"""Maximum number of spans of steps in the map of lateness: each rank has a cell for each of them."""
COLUMNS = (
    *("step", "time", "samples_seen", "loss_sum", "loss_count", "wall_seconds", "sent_bytes"),
    *(f"{part}_seconds" for part in PARTS),
    BACKWARD,
)
"""Fields of a step record that series are made of."""


@dataclass(frozen=True, kw_only=True)
class RunSeries:
    """Series of a run, of the last record of each step on each rank. A point stands for a span of successive steps."""

    ranks: tuple[int, ...]
    """Ranks with records, `R` of them."""
    num_steps: int
    """Number of steps that some rank has recorded."""
    steps_per_point: int
    """Maximum number of steps that a point stands for."""
    steps: np.ndarray
    """Number of the last step of each point, `(P,)`."""
    samples_seen: np.ndarray
    """Samples that all ranks have used after each point, `(P,)`."""
    loss: np.ndarray
    """Mean training loss of each point, `(P,)`; NaN if nothing was counted."""
    samples_per_second: np.ndarray
    """Training samples of all ranks per second, without evaluations and checkpoints, `(P,)`; NaN if unknown."""
    part_seconds: Mapping[str, np.ndarray]
    """Mean seconds that each of `PARTS` and `other` takes in a step, by rank, `(R,)`; with `forward` and `backward` in
    place of both together if all ranks have measured them.
    """
    span_steps: np.ndarray
    """Number of the last step of each span of the map of lateness, `(C,)`."""
    late_seconds: np.ndarray
    """Mean seconds that a rank computes and waits for data, in a step of each span, beyond the rank that needs least,
    `(R, C)`; NaN where a rank has no record.
    """
    sent_bytes: np.ndarray
    """Mean bytes that each rank sends for a step, `(R,)`."""
    times: tuple[float, float] | None
    """Times of the first and last record, in seconds since the epoch; None without records."""
    num_left_out: int
    """Number of lines in the records that are not step records."""


def run_series(run: RunDir) -> RunSeries:
    """Read the series of a run from the step records of all ranks."""
    found = {rank: read_columns(run.records_path(rank), COLUMNS) for rank in run.recorded_ranks()}
    num_left_out = sum(columns.num_left_out for columns in found.values())
    recorded = {rank: columns for rank, columns in found.items() if columns.steps.size}
    columns = [*recorded.values()]
    steps = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *(each.steps for each in columns)]))
    points = _Spans(steps, MOST_POINTS)
    loss_sum, loss_count = (sum(points.sums(each, name) for each in columns) for name in ("loss_sum", "loss_count"))
    longest = max(columns, key=lambda each: each.steps.size, default=None)
    seconds = {part: np.array([_mean(each, f"{part}_seconds") for each in columns]) for part in PARTS}
    wall = np.array([_mean(each, "wall_seconds") for each in columns])
    other = np.maximum(wall - sum(seconds.values()), 0.0)
    backward = np.array([_mean(each, BACKWARD) for each in columns])  # NaN if a step lacks it
    if backward.size and np.isfinite(backward).all():
        seconds = split_parts(seconds, backward)
    spans = _Spans(steps, MOST_SPANS)
    times = [each.values["time"] for each in columns]
    return RunSeries(
        ranks=tuple(recorded),
        num_steps=steps.size,
        steps_per_point=max(1, -(-steps.size // max(1, points.num))),
        steps=points.last,
        samples_seen=np.empty(0) if longest is None else points.largest(longest, "samples_seen"),
        loss=_ratio(loss_sum, loss_count, points),
        samples_per_second=np.empty(0) if longest is None else _samples_per_second(longest, points),
        part_seconds=seconds | {"other": other},
        span_steps=spans.last,
        late_seconds=_late_seconds(columns, spans),
        sent_bytes=np.array([_mean(each, "sent_bytes") for each in columns]),
        times=(float(min(map(np.min, times))), float(max(map(np.max, times)))) if times else None,
        num_left_out=num_left_out,
    )


class _Spans:
    """Division of the recorded steps into spans of equally many."""

    def __init__(self, steps: np.ndarray, most: int) -> None:
        self._steps = steps
        self.num = min(most, steps.size)
        self._span = np.arange(steps.size) * self.num // max(1, steps.size)
        self.last = steps[np.flatnonzero(np.diff(self._span, append=self.num))]

    def of(self, columns: StepColumns) -> np.ndarray:
        """Return the number of the span of each record, `(S,)`."""
        return self._span[np.searchsorted(self._steps, columns.steps)]

    def sums(self, columns: StepColumns, name: str) -> np.ndarray:
        """Return the sum of a column in each span, `(P,)`."""
        found: np.ndarray = np.bincount(self.of(columns), columns.values[name], self.num)
        return found

    def largest(self, columns: StepColumns, name: str) -> np.ndarray:
        """Return the largest value so far of a column in each span, `(P,)`."""
        found = np.zeros(self.num)
        np.maximum.at(found, self.of(columns), columns.values[name])
        return np.maximum.accumulate(found)


def _mean(columns: StepColumns, name: str) -> float:
    return float(columns.values[name].mean())


def _ratio(sums: "np.ndarray | int", counts: "np.ndarray | int", spans: _Spans) -> np.ndarray:
    sums, counts = np.broadcast_to(sums, spans.num), np.broadcast_to(counts, spans.num)
    found: np.ndarray = np.divide(sums, counts, out=np.full(spans.num, np.nan), where=counts > 0)
    return found


def _samples_per_second(columns: StepColumns, spans: _Spans) -> np.ndarray:
    """Return the samples per second of each span, of the steps whose predecessor is recorded too, `(P,)`."""
    steps, seen = columns.steps, columns.values["samples_seen"]
    used = np.diff(seen, prepend=0.0)
    is_known = np.diff(steps, prepend=0) == 1
    index = spans.of(columns)
    samples = np.bincount(index, np.where(is_known, used, 0.0), spans.num)
    seconds = np.bincount(index, np.where(is_known, columns.values["wall_seconds"], 0.0), spans.num)
    return _ratio(samples, seconds, spans)


def _late_seconds(columns: Sequence[StepColumns], spans: _Spans) -> np.ndarray:
    rows = []
    for each in columns:
        num = np.bincount(spans.of(each), minlength=spans.num)
        busy = spans.sums(each, "wall_seconds") - spans.sums(each, "sync_seconds")
        rows.append(_ratio(busy, num, spans))
    if not rows:
        return np.empty((0, 0))
    table = np.stack(rows)
    late: np.ndarray = np.maximum(table - np.nanmin(table, axis=0), 0.0)
    return late
