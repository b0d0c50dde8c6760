"""Writes step records as they happen, at a cost of microseconds."""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from dure.measure.records import StepRecord

_FLUSH_SECONDS = 1.0


class RecordWriter:
    """Appends `StepRecord` lines to a rank's file.

    Lines are buffered for a second at most, and written out before every checkpoint: records of samples that a
    checkpoint counts as seen are never missing.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1 << 16)
        self._last_flush = time.time()

    def write(self, record: StepRecord) -> None:
        """Append one line."""
        r = record
        samples = "" if r.samples is None else f', "samples": {json.dumps(r.samples)}'
        # written out by hand: json.dumps of a dict takes three times as long, and this runs every step
        self._file.write(
            f'{{"time": {r.time:.6f}, "step": {r.step}, "epoch": {r.epoch}, "samples_seen": {r.samples_seen}, '
            f'"loss_sum": {r.loss_sum!r}, "loss_count": {r.loss_count!r}, "data_seconds": {r.data_seconds:.7f}, '
            f'"forward_backward_seconds": {r.forward_backward_seconds:.7f}, "sync_seconds": {r.sync_seconds:.7f}, '
            f'"optimizer_seconds": {r.optimizer_seconds:.7f}, "wall_seconds": {r.wall_seconds:.7f}, '
            f'"sent_bytes": {r.sent_bytes}{samples}}}\n'
        )
        if record.time - self._last_flush > _FLUSH_SECONDS:
            self.flush()
            self._last_flush = record.time

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
