"""Numbers of process-group calls of watched ranks."""

import time
from collections.abc import Sequence

from dure.launch.hangs.watchdog import Watchdog
from dure.launch.worker.responder import COUNT
from dure.launch.worker.worker_process import Worker


class CallCounts:
    """Numbers of process-group calls made by ranks, requested from them at intervals."""

    def __init__(self, watchdog: Watchdog, every_seconds: float) -> None:
        self._watchdog = watchdog
        self._every_seconds = every_seconds
        self._asked: dict[int, tuple[int, float]] = {}
        """Number and time of the last request, by rank, whether or not its reply has arrived."""

    def go_on(self, workers: Sequence[Worker]) -> None:
        """Collect replies, and send requests to ranks that have had time for another call."""
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
