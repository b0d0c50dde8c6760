"""Counts of the process-group calls of ranks that are being watched."""

import time
from collections.abc import Sequence

from dure.launch.hangs.watchdog import Watchdog
from dure.launch.worker.responder import COUNT
from dure.launch.worker.worker_process import Worker


class CallCounts:
    """Counts of the process-group calls that ranks have made, requested as often as it matters."""

    def __init__(self, watchdog: Watchdog, every_seconds: float) -> None:
        self._watchdog = watchdog
        self._every_seconds = every_seconds
        self._asked: dict[int, tuple[int, float]] = {}
        """Number and time, by rank, of the question that has no answer yet, or the last one, and when it was asked."""

    def go_on(self, workers: Sequence[Worker]) -> None:
        """Take what has been answered, and ask those who have had time to make another call."""
        now = time.monotonic()
        for worker in workers:
            number, asked_at = self._asked.get(worker.rank, (0, 0.0))
            answer = worker.questions.take(number)
            if answer is not None:
                self._watchdog.note_calls(worker.rank, answer["calls"])
                self._watchdog.mute.discard(worker.rank)
            if now - asked_at <= self._every_seconds:
                continue
            if worker.questions.is_free:
                self._asked[worker.rank] = worker.questions.ask(COUNT), now
            else:
                self._watchdog.mute.add(worker.rank)
