"""Writes step records as they happen, at a cost of microseconds."""

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from dure.own_files import open_own
from dure.records.step_record import StepRecord

_FLUSH_SECONDS = 1.0


class RecordWriter:
    """Appends `StepRecord` lines to a rank's file.

    Records are held for a second at most, and written out before every checkpoint: records of samples that a
    checkpoint counts as seen are never missing. Between steps the processor's caches are full of the model: making
    many lines together takes a fifth of the time of making each at its step.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8")
        self._held: list[StepRecord] = []
        self._next_flush = time.time() + _FLUSH_SECONDS

    def write(self, record: StepRecord) -> None:
        """Append one record."""
        self._held.append(record)
        if record.time > self._next_flush:
            self.flush()

    def flush(self) -> None:
        """Hand what is held to the operating system."""
        self._file.write("".join(map(_line, self._held)))
        self._file.flush()
        self._held.clear()
        self._next_flush = time.time() + _FLUSH_SECONDS

    def close(self) -> None:
        """Flush and close."""
        try:
            self.flush()
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _line(r: StepRecord) -> str:
    # written out by hand: json.dumps of a dict takes three times as long
    samples = "" if r.samples is None else f', "samples": {json.dumps(r.samples)}'
    measured = "" if r.measured is None else f', "measured": {json.dumps(r.measured)}'
    return (
        f'{{"time": {r.time:.6f}, "step": {r.step}, "epoch": {r.epoch}, "samples_seen": {r.samples_seen}, '
        f'"loss_sum": {r.loss_sum!r}, "loss_count": {r.loss_count!r}, "data_seconds": {r.data_seconds:.7f}, '
        f'"forward_backward_seconds": {r.forward_backward_seconds:.7f}, "sync_seconds": {r.sync_seconds:.7f}, '
        f'"optimizer_seconds": {r.optimizer_seconds:.7f}, "wall_seconds": {r.wall_seconds:.7f}, '
        f'"sent_bytes": {r.sent_bytes}{samples}{measured}}}\n'
    )
