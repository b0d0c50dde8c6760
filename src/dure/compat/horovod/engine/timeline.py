"""Timeline of the collectives as a Chrome trace: negotiation and execution of each tensor, written by rank 0."""

import json
import threading
import time
from pathlib import Path
from typing import Any

from dure.compat.horovod.engine.coordinator import Event


class Timeline:
    """File of a trace that is being recorded. It is valid JSON after `close`; viewers accept it before, too."""

    def __init__(self, path: str, *, marks_cycles: bool) -> None:
        """Begin a trace.

        Args:
            path: Path of the file, which is overwritten.
            marks_cycles: Whether each cycle of the background thread gets a mark.

        Raises:
            OSError: It cannot be written.
        """
        self._lock = threading.Lock()
        """Held while a thread writes: the script closes the file, the background thread writes."""
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  # until `close`
        self._marks_cycles = marks_cycles
        self._begin = time.monotonic()
        self._rows: dict[str, int] = {}
        self._open: list[tuple[str, int]] = []
        """Names and rows of the events that have begun and not ended."""
        self._negotiated: set[str] = set()
        """Names for which a negotiation is open."""
        epoch = {"name": "start_time_since_epoch_in_micros", "ph": "M", "args": {"start": int(time.time() * 1e6)}}
        self._file.write("[\n" + json.dumps(epoch | {"pid": 0}))

    def negotiation(self, event: Event) -> None:
        """Record the arrival of a rank's request."""
        name = f"NEGOTIATE_{event.kind.upper()}"
        row = self._row(event.name)
        if event.name not in self._negotiated:  # others may have asked before the recording began
            self._negotiated.add(event.name)
            self._write({"name": name, "ph": "B", "pid": row})
        self._write({"name": str(event.rank), "ph": "X", "dur": 0, "pid": row})
        if event.is_last:
            self._negotiated.discard(event.name)
            self._write({"name": name, "ph": "E", "pid": row})

    def begin(self, tensors: list[tuple[str, str, str]], kind: str, activity: str) -> None:
        """Record the start of an execution.

        Args:
            tensors: Name, types and shapes of each.
            kind: Kind of the collective.
            activity: What executes it.
        """
        for name, dtypes, shapes in tensors:
            row = self._row(name)
            self._write({"name": kind.upper(), "ph": "B", "pid": row, "args": {"dtype": dtypes, "shape": shapes}})
            self._write({"name": activity, "ph": "B", "pid": row})

    def end(self, names: list[str], kind: str, activity: str) -> None:
        """Record the end of an execution."""
        for name in names:
            row = self._row(name)
            self._write({"name": activity, "ph": "E", "pid": row})
            self._write({"name": kind.upper(), "ph": "E", "pid": row})

    def mark_cycle(self) -> None:
        """Record a cycle of the background thread."""
        if self._marks_cycles:
            self._write({"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0})

    def close(self) -> None:
        """End what is open, and complete the file; later events are left out."""
        now = int((time.monotonic() - self._begin) * 1e6)
        with self._lock:
            for name, row in reversed(self._open):
                event = {"name": name, "ph": "E", "pid": row, "tid": 0, "ts": now}
                self._file.write(",\n" + json.dumps(event))
            self._file.write("\n]\n")
            self._file.close()

    def _row(self, name: str) -> int:
        if name not in self._rows:
            row = self._rows[name] = len(self._rows) + 1
            self._write({"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}})
            self._write({"name": "process_sort_index", "ph": "M", "pid": row, "args": {"sort_index": row}})
        return self._rows[name]

    def _write(self, event: dict[str, Any]) -> None:
        event.setdefault("ts", int((time.monotonic() - self._begin) * 1e6))
        event.setdefault("tid", 0)
        with self._lock:
            if not self._file.closed:
                place = event["name"], event["pid"]
                if event["ph"] == "B":
                    self._open.append(place)
                elif event["ph"] == "E" and place in self._open:
                    self._open.remove(place)
                self._file.write(",\n" + json.dumps(event))
                self._file.flush()
