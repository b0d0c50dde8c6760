"""Points of a run from its records, thinned to what a tracker can take."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from dure.documents import DocumentInvalid
from dure.records.events import Evaluated, event_from_json
from dure.records.jsonl import parse_line
from dure.records.run_dir import EVENTS, RunDir
from dure.records.step_record import RATES, StepRecord, step_from_json
from dure.report.live.growing_file import GrowingFile
from dure.tracking.tracker import Point


class Points:
    """Reader of the points of a run whose records grow.

    Steps closer than `least_seconds` to the one before are left out, except the last one of the records.
    """

    def __init__(self, run: RunDir, *, least_seconds: float, since: Sequence[float], global_batch_size: int) -> None:
        """Begin with the records that are newer than those of `since`, a result of `times`."""
        self._steps, self._events = GrowingFile(run.records_path(0)), GrowingFile(run.path / EVENTS)
        self._least_seconds, self._global_batch_size = least_seconds, global_batch_size
        self._step_time, self._event_time = since
        self._before: StepRecord | None = None
        self._skipped: Point | None = None

    @property
    def times(self) -> tuple[float, float]:
        """Times of the newest step and event that were read."""
        return self._step_time, self._event_time

    def read(self, *, is_last: bool = False) -> list[Point]:
        """Return the next points, of a bounded part of the records; none if there are none yet.

        Args:
            is_last: Whether the run has ended: the last step is not left out then.

        Raises:
            OSError: The records cannot be read.
        """
        points = [*self._of_steps(), *self._of_events()]
        if is_last and not points and self._skipped is not None:
            points, self._skipped = [self._skipped], None
        return sorted(points, key=lambda point: point.time)

    def _of_steps(self) -> Iterator[Point]:
        for record in map(_step, self._steps.read().lines):
            if record is None:
                continue
            # after a resume the file is read again from its beginning
            if record.time > self._step_time:
                point = self._point(record)
                if record.time >= self._step_time + self._least_seconds:
                    self._step_time, self._skipped = record.time, None
                    yield point
                else:
                    self._skipped = point
            self._before = record

    def _point(self, record: StepRecord) -> Point:
        before = self._before
        is_next = before is not None and before.step + 1 == record.step
        used = record.samples_seen - before.samples_seen if before is not None and is_next else self._global_batch_size
        wall = record.wall_seconds or math.nan
        values = {
            "train/loss": record.loss_sum / record.loss_count if record.loss_count else math.nan,
            "train/epoch": record.epoch,
            "samples_seen": record.samples_seen,
            "perf/samples_per_second": used / wall,
            "perf/data_fraction": record.data_seconds / wall,
            "perf/sync_fraction": record.sync_seconds / wall,
        }
        rates = {name: rate for name, rate in (record.measured or {}).items() if name.partition(".")[0] == RATES}
        return Point(
            step=record.step, time=record.time, values=values | {f"train/{name}": rate for name, rate in rates.items()}
        )

    def _of_events(self) -> Iterator[Point]:
        for record in map(parse_line, self._events.read().lines):
            time = (record or {}).get("time")
            if record is None or not isinstance(time, int | float) or time <= self._event_time:
                continue
            self._event_time = time
            event = _event(record)
            if isinstance(event, Evaluated):
                values = {f"val/{name}": metric.value for name, metric in event.metrics.items()}
                yield Point(step=event.step, time=time, values={**values, "samples_seen": event.samples_seen})

    def count_left(self) -> int:
        """Read the rest of the points, and return their number."""
        number = 0
        while points := self.read():
            number += len(points)
        return number


def _step(line: bytes) -> StepRecord | None:
    record = parse_line(line)
    try:
        return None if record is None else step_from_json(record)
    except DocumentInvalid:
        return None


def _event(record: dict[str, Any]) -> Any:
    try:
        return event_from_json(record)
    except DocumentInvalid:
        return None
