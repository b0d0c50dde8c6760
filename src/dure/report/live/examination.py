"""Diagnosis of a watched run, repeated in the background."""

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from dure.errors import DureError
from dure.records.finding import Finding
from dure.records.run_dir import RunDir

Diagnose = Callable[[RunDir], Sequence[Finding]]

_INTERVAL_SECONDS = 5.0
_MOST_FRACTION = 0.05
"""Fraction of the time that diagnoses take: each reads all records, so those of a long run follow at a distance."""
_END_SECONDS = 5.0


class Examination:
    """Thread that diagnoses a run again and again while it is open; no reader of its findings ever waits."""

    def __init__(self, run: RunDir, diagnose: Diagnose) -> None:
        self._run, self._diagnose = run, diagnose
        self._findings: Sequence[Finding] | None = None
        self._num_done = 0
        self._is_wanted, self._is_over = threading.Event(), threading.Event()
        # a diagnosis of a long run takes seconds, for which Ctrl-C does not wait
        self._thread = threading.Thread(target=self._examine, name="dure-examination", daemon=True)

    @property
    def findings(self) -> Sequence[Finding] | None:
        """Findings of the last diagnosis; None before the first."""
        return self._findings

    @property
    def num_done(self) -> int:
        """Number of diagnoses so far."""
        return self._num_done

    def hasten(self) -> None:
        """Begin the next diagnosis at once, because the run has ended."""
        self._is_wanted.set()

    def _examine(self) -> None:
        while not self._is_over.is_set():
            begin = time.monotonic()
            self._findings = self._found()
            self._num_done += 1
            took = time.monotonic() - begin
            self._is_wanted.wait(max(_INTERVAL_SECONDS, took / _MOST_FRACTION))
            self._is_wanted.clear()

    def _found(self) -> Sequence[Finding]:
        try:
            return self._diagnose(self._run)
        except DureError as error:
            return [Finding(id="unreadable", severity="error", what=str(error))]
        except Exception as error:  # a file may change or vanish while it is read
            what = f"the diagnosis failed and is repeated ({type(error).__name__}: {error})"
            return [Finding(id="not_examined", severity="note", what=what)]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._is_over.set()
        self._is_wanted.set()
        self._thread.join(_END_SECONDS if kind is None else 0.0)
