"""Run that is watched: its records, read as they grow, and its state at the moment."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dure.documents import DocumentInvalid
from dure.errors import DureError
from dure.records.events import Event, Restarted, event_from_json
from dure.records.jsonl import parse_line
from dure.records.run_dir import EVENTS, RunDir, os_errors_as_sentences
from dure.records.run_list import RunOverview, overview
from dure.records.step_columns import rows_of_lines
from dure.records.step_record import PARTS
from dure.report.live.growing_file import GrowingFile
from dure.report.live.step_spans import StepSpans
from dure.report.page import RunRecords, last_start
from dure.report.run_series import COLUMNS

_BUDGET_SECONDS = 0.4
"""Seconds of one refreshing. Of a long run, several of them read the records that are there when watching begins."""
_MOST_EVENTS = 20_000
_ALIVE_SECONDS = 15.0
"""Seconds since its records have grown within which a run counts as running although its lock is not seen."""
_RATE_SECONDS = 10.0
"""Seconds over which the present throughput is measured."""
_FIELD = {name: index for index, name in enumerate(COLUMNS)}


@dataclass(frozen=True, kw_only=True)
class Moment:
    """State of a run at a moment."""

    records: RunRecords
    step: int | None
    """Number of the last step on record; None before the first."""
    samples_seen: int
    loss: float
    """Mean training loss of the last step; NaN if nothing was counted, or before the first."""
    samples_per_second: float
    """Training samples of all ranks per second, over the last steps; NaN if unknown."""
    last_record_time: float | None
    """Time of the last record in seconds since the epoch, by the clock of its rank; None before the first."""
    part_seconds: Mapping[int, Mapping[str, float]]
    """Mean seconds of each of `PARTS`, of `other` and of the whole step (`wall`), over the last steps of each rank."""
    sent_bytes: Mapping[int, float]
    """Bytes that each rank has sent for its steps so far, those of repeated steps included."""
    world_size: int | None
    num_restarts: int
    unread_fraction: float
    """Fraction of the records of steps that was not read yet."""
    seconds_quiet: float | None
    """Seconds since the records were last seen to grow; before that, since the last record; None before the first."""

    @property
    def status(self) -> str:
        """Status of the run, as in `RunOverview`."""
        return self.records.seen.status

    @property
    def is_over(self) -> bool:
        """Return whether the run does not go on and all its records were read."""
        return self.status != "running" and not self.unread_fraction


class LiveRun:
    """Reader of the records of a run that may still go on. One reader serves all that watch the run."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._spans = StepSpans()
        self._files: dict[int, GrowingFile] = {}
        self._events_file = GrowingFile(run.path / EVENTS)
        self._events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self._num_restarts = 0
        self._left_bytes: dict[int, int] = {}
        self._grew_at: float | None = None
        self._was_read = False
        """True once all records that were there when watching began have been read."""

    def refresh(self) -> Moment:
        """Read what the records have gained, in a bounded time, and return the state of the run.

        A file that cannot be read is named in the remarks; nothing in the records makes this raise an error.
        """
        remarks: list[str] = []
        deadline = time.monotonic() + _BUDGET_SECONDS
        with _remarked(remarks), os_errors_as_sentences(self.run.path, "read"), self.run.understood():
            ranks = self.run.recorded_ranks()  # if the folder is out of reach, what was read stays
            self._read_events(deadline)
            self._read_steps(ranks, deadline, remarks)
        self._spans.limit()
        seen = self._overview()
        num_torn = 0 if seen.status == "running" else sum(bool(file.rest_bytes) for file in self._files.values())
        return self._moment(seen, remarks, num_torn)

    def _read_events(self, deadline: float) -> None:
        gain = self._events_file.read()
        if gain.is_restarted:
            self._events.clear()
            self._num_restarts = 0
        while True:
            for line in gain.lines:
                record = parse_line(line)
                with contextlib.suppress(DocumentInvalid):
                    if record is not None:
                        event = event_from_json(record)
                        self._events.append(event)
                        self._num_restarts += isinstance(event, Restarted)
            if not gain.left_bytes or time.monotonic() > deadline:
                break
            gain = self._events_file.read()

    def _read_steps(self, ranks: list[int], deadline: float, remarks: list[str]) -> None:
        for rank in self._files.keys() - {*ranks}:
            del self._files[rank]
            self._left_bytes.pop(rank, None)
            self._spans.forget(rank)
        pending = ranks
        while pending:
            for rank in pending:
                path = self.run.records_path(rank)
                with _remarked(remarks), os_errors_as_sentences(path, "read"), self.run.understood():
                    self._left_bytes[rank] = 0
                    self._read_block(rank)
            # blocks in turns: a chart of a run that is read half has all ranks
            pending = [rank for rank in pending if self._left_bytes[rank]] if time.monotonic() < deadline else []
            if pending:
                self._spans.limit()
        self._was_read = self._was_read or not any(self._left_bytes.values())

    def _read_block(self, rank: int) -> None:
        file = self._files.setdefault(rank, GrowingFile(self.run.records_path(rank)))
        gain = file.read()
        if gain.is_restarted:
            self._spans.forget(rank)
        spans = self._spans.rank(rank)
        spans.num_left_out += gain.num_too_long
        if gain.lines:
            _, rows, num_left_out = rows_of_lines(gain.lines, COLUMNS)
            spans.num_left_out += num_left_out
            spans.add(rows)
            if self._was_read:
                self._grew_at = time.monotonic()
        self._left_bytes[rank] = gain.left_bytes

    def _overview(self) -> RunOverview:
        """Return the status of the run. The lock of a run on another host may not be seen here, but its records are."""
        seen = overview(self.run)
        is_alive = self._grew_at is not None and time.monotonic() - self._grew_at < _ALIVE_SECONDS
        if seen.status == "died" and is_alive and not any(self._left_bytes.values()):
            return RunOverview(**{**vars(seen), "status": "running"})
        return seen

    def _moment(self, seen: RunOverview, remarks: Sequence[str], num_torn: int) -> Moment:
        series = self._spans.series(num_left_out=num_torn)
        events = [*self._events]
        newest = max(self._spans.ranks.values(), key=lambda spans: spans.last_step, default=None)
        recent = np.empty((0, len(COLUMNS))) if newest is None else newest.recent
        last = dict(zip(COLUMNS, recent[-1].tolist(), strict=True)) if len(recent) else None
        start = last_start(events)
        last_time = None if series.times is None else series.times[1]
        return Moment(
            records=RunRecords(run=self.run, seen=seen, events=events, series=series, remarks=tuple(remarks)),
            step=None if last is None else int(last["step"]),
            samples_seen=0 if last is None else int(last["samples_seen"]),
            loss=last["loss_sum"] / last["loss_count"] if last is not None and last["loss_count"] else np.nan,
            samples_per_second=_rate(recent),
            last_record_time=last_time,
            part_seconds={rank: _parts(means) for rank, means in self._spans.recent_means().items()},
            sent_bytes={rank: spans.sent_bytes for rank, spans in sorted(self._spans.ranks.items())},
            world_size=seen.world_size if start is None else start.world_size,
            num_restarts=self._num_restarts,
            unread_fraction=self._unread_fraction(),
            seconds_quiet=self._seconds_quiet(last_time),
        )

    def _unread_fraction(self) -> float:
        left = sum(self._left_bytes.values())
        return left / (left + sum(file.offset for file in self._files.values())) if left else 0.0

    def _seconds_quiet(self, last_time: float | None) -> float | None:
        if self._grew_at is not None:
            return time.monotonic() - self._grew_at
        return None if last_time is None else max(0.0, time.time() - last_time)


@contextlib.contextmanager
def _remarked(remarks: list[str]) -> Iterator[None]:
    """Turn an error about a file into a remark."""
    try:
        yield
    except DureError as error:
        remarks.append(str(error))


def _parts(means: Mapping[str, float]) -> Mapping[str, float]:
    seconds = {part: means[f"{part}_seconds"] for part in PARTS}
    other = max(0.0, means["wall_seconds"] - sum(seconds.values()))
    return {**seconds, "other": other, "wall": means["wall_seconds"]}


def _rate(recent: np.ndarray) -> float:
    """Return the samples per second of a rank's last steps."""
    wall = recent[1:, _FIELD["wall_seconds"]]
    used = np.diff(recent[:, _FIELD["samples_seen"]])
    is_known = np.diff(recent[:, _FIELD["step"]]) == 1
    is_recent = np.cumsum(wall[::-1])[::-1] - wall < _RATE_SECONDS
    seconds = float(wall[is_known & is_recent].sum())
    return float(used[is_known & is_recent].sum()) / seconds if seconds > 0 else np.nan
