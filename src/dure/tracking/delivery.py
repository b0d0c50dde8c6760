"""Delivery of a run's points to one tracker, in a thread of its own, for as long as that takes."""

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

from dure.records.run_dir import RunDir
from dure.tracking.points import Points
from dure.tracking.tracker import Point, Subject, Tracker, make_tracker

_LEAST_SECONDS = {"tensorboard": 0.01, "mlflow": 0.1, "wandb": 0.1}
"""Least seconds between two steps that are handed over."""
_INTERVAL_SECONDS = 0.5
_MOST_RETRY_SECONDS = 10.0
_MOST_TEXT = 200


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """State of a delivery that outlives the process."""

    identity: str | None = None
    """Identity of the run at the tracker."""
    times: tuple[float, float] = (0.0, 0.0)
    """Times of the newest step and event that the tracker has."""


class Delivery:
    """Thread that hands points to a tracker again and again until it has them.

    The records on disk are the queue: whatever the tracker does, at most one block of them is in memory.
    """

    def __init__(
        self,
        name: str,
        subject: Subject,
        before: Delivered,
        *,
        global_batch_size: int,
        warn: Callable[[str], None],
        save: Callable[[], None],
    ) -> None:
        """Prepare the delivery.

        Args:
            name: Name of the tracker.
            subject: Run that is handed over.
            before: State of the delivery by an earlier process.
            global_batch_size: Samples of a step.
            warn: Function that prints a sentence.
            save: Function that saves the states of all deliveries.
        """
        self.name = name
        self.delivered = before
        self.fault: str | None = None
        """Reason for which the last attempt failed; None if it did not."""
        self._subject, self._warn, self._save = subject, warn, save
        self._points = Points(
            RunDir(subject.folder),
            least_seconds=_LEAST_SECONDS[name],
            since=before.times,
            global_batch_size=global_batch_size,
        )
        self._tracker: Tracker | None = None
        self._pending: list[Point] = []
        self._status: str | None = None
        self._is_woken = threading.Event()
        # a client that hangs is left behind when the process ends
        self._thread = threading.Thread(target=self._deliver, name=f"dure-{name}", daemon=True)

    def start(self) -> None:
        """Start to deliver."""
        self._thread.start()

    def end(self, status: str) -> None:
        """Let the thread end the run when all is delivered; it does not wait."""
        self._status = status
        self._is_woken.set()

    def wait(self, seconds: float) -> bool:
        """Wait until all is delivered and the run is ended; return whether it is."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def count_left(self) -> int:
        """Return the number of points that were not delivered, after a `wait` in vain."""
        return len(self._pending) + self._points.count_left()

    def to_json(self) -> dict[str, object]:
        """Return the state as plain JSON values."""
        return asdict(self.delivered)

    def _deliver(self) -> None:
        pause = _INTERVAL_SECONDS
        while True:
            is_over = self._status is not None
            try:
                if self._step(is_over=is_over):
                    if is_over:
                        return
                    self._pause(_INTERVAL_SECONDS)
                pause, self.fault = _INTERVAL_SECONDS, None
            except Exception as error:  # of a foreign client: a server that is down, a wrong key, a bug
                text = _first_cause(error)
                if self.fault is None:
                    self._warn(
                        f"{self.name} does not take what the run logs ({text}); training goes on, and it is tried again"
                    )
                self.fault = text
                self._pause(pause)
                pause = min(2 * pause, _MOST_RETRY_SECONDS)

    def _pause(self, seconds: float) -> None:
        if self._status is None:
            self._is_woken.wait(seconds)
        else:
            threading.Event().wait(min(seconds, 2 * _INTERVAL_SECONDS))

    def _step(self, *, is_over: bool) -> bool:
        """Hand over a block of points; return whether there was none left, and at the end of the run, end it."""
        self._pending = self._pending or self._points.read(is_last=is_over)
        if self._pending:
            tracker = self._begun()
            tracker.write(self._pending)
            self._pending = []
            self._deliver_state(self.delivered.identity)
            return False
        # a run that was refused before its first step appears nowhere
        if is_over and self._status != "left" and (self._tracker is not None or self.delivered.identity is not None):
            self._begun().end(str(self._status))
        return True

    def _begun(self) -> Tracker:
        if self._tracker is None:
            tracker = make_tracker(self.name)
            identity = tracker.begin(self._subject, self.delivered.identity)
            self._tracker = tracker
            # saved before a point is sent: otherwise a process that is killed now would leave a run without an owner
            self.delivered = Delivered(identity=identity, times=self.delivered.times)
            self._save()
        return self._tracker

    def _deliver_state(self, identity: str | None) -> None:
        self.delivered = Delivered(identity=identity, times=self._points.times)
        self._save()


def _first_cause(error: BaseException) -> str:
    """Return the error from which others followed: clients wrap a refused connection three times, each time longer."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= _MOST_TEXT else f'{text[:_MOST_TEXT]}…'}"
