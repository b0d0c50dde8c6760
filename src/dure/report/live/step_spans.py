"""Step records of a growing run in bounded memory, as sums over spans of successive steps."""

from collections.abc import Callable, Mapping

import numpy as np

from dure.records.step_record import PARTS
from dure.report.run_series import COLUMNS, MOST_POINTS, MOST_SPANS, RunSeries

NUM_RECENT = 256
"""Number of the last steps of each rank that are kept one by one."""
_MOST = 1e200
"""Limit of values, which a damaged record may exceed: no sum of them overflows."""
_FIELD = {name: index for index, name in enumerate(COLUMNS)}
_SUMS = (
    *("steps", "loss_sum", "loss_count", "wall_seconds", "sent_bytes", *(f"{part}_seconds" for part in PARTS)),
    *("timed_samples", "timed_seconds"),
)
"""Sums over the steps of a span. The last two are of the steps whose predecessor is recorded too."""
_LATEST = ("step", "samples_seen", "time")
"""Values of the last step of a span."""
_NAMES = (*_SUMS, *_LATEST)
_INDEX = {name: index for index, name in enumerate(_NAMES)}
_SUMMED = [_FIELD[name] for name in _SUMS[1:-2]]
_LAST = [_FIELD[name] for name in _LATEST]


class RankSpans:
    """Steps of one rank. Span `i` has the steps `i * width + 1` to `(i + 1) * width`."""

    def __init__(self, width: int = 1) -> None:
        self.ids = np.empty(0, dtype=np.int64)
        """Numbers of the spans with records, `(S,)`, ascending."""
        self.recent = np.empty((0, len(COLUMNS)))
        """Rows of the last steps, `(N, C)`."""
        self.first_time = np.nan
        self.sent_bytes = 0.0
        """Bytes sent in all steps, including those that were repeated later."""
        self.num_left_out = 0
        """Number of lines that are no step records."""
        self._width = width
        self._table = np.empty((0, len(_NAMES)))

    def of(self, name: str) -> np.ndarray:
        """Return a sum or a latest value of each span, `(S,)`."""
        found: np.ndarray = self._table[:, _INDEX[name]]
        return found

    @property
    def last_step(self) -> int:
        """Number of the last step; -1 before the first."""
        return int(self._table[-1, _INDEX["step"]]) if self.ids.size else -1

    def add(self, rows: np.ndarray) -> None:
        """Add records in the order in which they were written. Repeated steps take the place of the earlier ones.

        Args:
            rows: Values of `COLUMNS`, `(N, C)`.
        """
        rows = np.clip(rows, -_MOST, _MOST)
        steps = rows[:, 0]
        for segment in np.split(rows, np.flatnonzero(steps[1:] <= steps[:-1]) + 1):
            if segment.size:
                self._go_back_before(int(segment[0, 0]))
                self._append(segment)

    def coarsen(self, width: int) -> None:
        """Join neighbouring spans into wider ones.

        Args:
            width: Steps of a span, a multiple of what it was.
        """
        ids = self.ids // (width // self._width)
        self._width = width
        self.ids, self._table = _joined(ids, self._table)

    def _go_back_before(self, step: int) -> None:
        """Forget the steps from a number on. In a span that keeps some of its steps, all sums become smaller alike."""
        if step > self.last_step:
            return
        self.recent = self.recent[self.recent[:, 0] < step]
        number = (step - 1) // self._width
        num_kept = int(np.searchsorted(self.ids, number))
        partial = self._table[num_kept : num_kept + 1].copy()
        begin = number * self._width
        kept_steps = step - 1 - begin
        is_split = num_kept < self.ids.size and self.ids[num_kept] == number and kept_steps > 0
        self.ids, self._table = self.ids[: num_kept + is_split], self._table[:num_kept]
        if is_split:
            fraction = kept_steps / max(kept_steps, partial[0, _INDEX["step"]] - begin)
            partial[:, : len(_SUMS)] *= fraction
            before = self._table[-1:, len(_SUMS) :] if num_kept else partial[:, len(_SUMS) :] * 0
            partial[:, len(_SUMS) :] = before + (partial[:, len(_SUMS) :] - before) * fraction
            partial[:, _INDEX["step"]] = step - 1
            self._table = np.concatenate([self._table, partial])

    def _append(self, rows: np.ndarray) -> None:
        """Add steps that follow all others."""
        last_step, last_samples = (self.of("step")[-1], self.of("samples_seen")[-1]) if self.ids.size else (0.0, 0.0)
        steps = rows[:, 0]
        is_timed = np.diff(steps, prepend=last_step) == 1
        used = np.diff(rows[:, _FIELD["samples_seen"]], prepend=last_samples)
        wall = rows[:, _FIELD["wall_seconds"]]
        timed = np.stack([np.where(is_timed, used, 0.0), np.where(is_timed, wall, 0.0)], axis=1)
        table = np.concatenate([np.ones((len(rows), 1)), rows[:, _SUMMED], timed, rows[:, _LAST]], axis=1)
        ids = (steps.astype(np.int64) - 1) // self._width
        if np.isnan(self.first_time):
            self.first_time = float(rows[0, _FIELD["time"]])
        self.sent_bytes += float(rows[:, _FIELD["sent_bytes"]].sum())
        self.recent = np.concatenate([self.recent, rows[-NUM_RECENT:]])[-NUM_RECENT:]
        is_joined = bool(self.ids.size) and self.ids[-1] == ids[0]
        first, table_first = (self.ids[-1:], self._table[-1:]) if is_joined else (self.ids[:0], self._table[:0])
        ids, table = _joined(np.concatenate([first, ids]), np.concatenate([table_first, table]))
        end = self.ids.size - is_joined
        self.ids, self._table = np.concatenate([self.ids[:end], ids]), np.concatenate([self._table[:end], table])


class StepSpans:
    """Steps of all ranks, in spans that are the same for all: few enough for a chart, and wider as the run grows."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankSpans] = {}
        self.width = 1
        """Steps of a span, a power of two."""

    def rank(self, rank: int) -> RankSpans:
        """Return the steps of a rank, which may be a new one."""
        return self.ranks.setdefault(rank, RankSpans(self.width))

    def forget(self, rank: int) -> None:
        """Forget the steps of a rank."""
        self.ranks.pop(rank, None)
        if not self.ranks:
            self.width = 1

    def limit(self) -> None:
        """Widen the spans until there are few enough of them."""
        while self._ids().size > MOST_POINTS:
            self.width *= 2
            for rank in self.ranks.values():
                rank.coarsen(self.width)

    def _ids(self) -> np.ndarray:
        return np.unique(np.concatenate([np.empty(0, np.int64), *(rank.ids for rank in self.ranks.values())]))

    def series(self, *, num_left_out: int = 0) -> RunSeries:
        """Return the series of the run, as `run_series` returns them.

        Args:
            num_left_out: Number of left out lines in addition to those of the ranks.
        """
        recorded = {rank: spans for rank, spans in sorted(self.ranks.items()) if spans.ids.size}
        ids = self._ids()
        places = {rank: np.searchsorted(ids, spans.ids) for rank, spans in recorded.items()}

        def table(name: str) -> np.ndarray:
            found = np.zeros((len(recorded), ids.size))
            for row, (rank, spans) in enumerate(recorded.items()):
                found[row, places[rank]] = spans.of(name)
            return found

        counts = table("steps")
        totals = counts.sum(axis=1)
        longest = int(totals.argmax()) if recorded else 0
        samples = np.maximum.accumulate(table("samples_seen")[longest]) if recorded else np.empty(0)
        last = table("step").max(axis=0, initial=0).astype(np.int64)
        wall, sync = table("wall_seconds"), table("sync_seconds")
        seconds = {part: _ratio(table(f"{part}_seconds").sum(axis=1), totals) for part in PARTS}
        other = _ratio(wall.sum(axis=1), totals) - sum(seconds.values())
        span_steps, late = _lateness(last, counts, wall - sync)
        times = [(spans.first_time, spans.of("time").max()) for spans in recorded.values()]
        return RunSeries(
            ranks=tuple(recorded),
            num_steps=int(counts.max(axis=0, initial=0).sum()),
            steps_per_point=self.width,
            steps=last,
            samples_seen=samples,
            loss=_ratio(table("loss_sum").sum(axis=0), table("loss_count").sum(axis=0)),
            samples_per_second=_throughput(table, longest) if recorded else np.empty(0),
            part_seconds={**seconds, "other": np.maximum(other, 0.0)},
            span_steps=span_steps,
            late_seconds=late,
            sent_bytes=_ratio(table("sent_bytes").sum(axis=1), totals),
            times=(float(min(first for first, _ in times)), float(max(end for _, end in times))) if times else None,
            num_left_out=num_left_out + sum(spans.num_left_out for spans in self.ranks.values()),
        )

    def recent_means(self) -> Mapping[int, Mapping[str, float]]:
        """Return the mean of each of `COLUMNS` over the last steps of each rank."""
        return {
            rank: dict(zip(COLUMNS, spans.recent.mean(axis=0).tolist(), strict=True))
            for rank, spans in sorted(self.ranks.items())
            if len(spans.recent)
        }


def _throughput(table: Callable[[str], np.ndarray], row: int) -> np.ndarray:
    return _ratio(table("timed_samples")[row], table("timed_seconds")[row])


def _joined(ids: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return spans without two of a number: sums are added, and of latest values the last one is kept."""
    if not ids.size:
        return ids, table
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))
    ends = np.append(starts[1:], ids.size) - 1
    sums = np.add.reduceat(table[:, : len(_SUMS)], starts, axis=0)
    return ids[starts], np.concatenate([sums, table[ends, len(_SUMS) :]], axis=1)


def _ratio(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.divide(sums, counts, out=np.full(np.shape(counts), np.nan), where=counts > 0)
    return found


def _lateness(last: np.ndarray, counts: np.ndarray, busy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the last step of each span of the map of lateness, `(C,)`, and the lateness, `(R, C)`."""
    num_ranks, num_points = counts.shape
    if not counts.size:
        return last, np.empty((num_ranks, num_points))
    starts = np.arange(0, num_points, -(-num_points // MOST_SPANS))
    ends = np.append(starts[1:], num_points) - 1
    table = _ratio(np.add.reduceat(busy, starts, axis=1), np.add.reduceat(counts, starts, axis=1))
    late: np.ndarray = np.maximum(table - np.nanmin(table, axis=0), 0.0)
    return last[ends], late
