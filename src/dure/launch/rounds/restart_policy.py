"""Decision whether a run is restarted after a rank failed."""

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dure.failures.verdict import WorkerEnd, first_failure, in_brief
from dure.launch.hangs.diagnosis import HangVerdict
from dure.process.round_orders import Restart


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Limits on restarts of the ranks."""

    most: int = 0
    """Maximum number of restarts within the window; 0 for none."""
    window_seconds: float = 600.0
    """Window in seconds. Earlier restarts do not count: a run of weeks may have more failures than one of minutes."""
    after_any: bool = False
    """True if every failure permits a restart: those of a script that does not use dure cannot be classified."""


_CHANCE = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""Parts that vary between messages of the same failure: addresses, times, ports, process numbers."""


class Restarts:
    """Budget of restarts of one run. A failure that recurs at the same step is no coincidence, and ends the run."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self.count = 0
        self.refusal: str | None = None
        """Reason why there was no restart after the last failure, if it is not only the failure."""
        self._times: deque[float] = deque()
        self._last: tuple[int | None, int, str] | None = None

    def after(self, ends: Sequence[WorkerEnd], step_of: Callable[[int], int]) -> Restart | None:
        """Decide after ranks ended, the first of them by a failure; None if they will not be restarted.

        Args:
            ends: How each rank ended.
            step_of: Function from a rank to its step.
        """
        self.refusal = None
        was_asked_to_stop = any(end.stop_signal is not None for end in ends)
        if self.policy.most == 0 or was_asked_to_stop:
            return None
        first = first_failure(list(ends))
        if first is None:
            return None
        if first.failure is not None and (size := first.failure.microbatch_size):
            return self._with_smaller_microbatches(first, size, step_of(first.rank), len(ends))
        if first.failure is not None and first.failure.is_gpu_lost:
            self.refusal = "a GPU that is gone does not come back by itself, so the ranks were not started again"
            return None
        if not (self.policy.after_any or _may_help(first, step_of)):
            return None
        step, cause = step_of(first.rank), in_brief(first, len(ends))
        go_back_to = None if first.failure is None else first.failure.go_back_to
        # any rank may be the first to report a failure that all detected together
        rank, what = (None if go_back_to is not None else first.rank), cause
        if first.is_out_of_memory:
            rank, what = None, "out of memory"  # the kernel ends an arbitrary rank
        if self._has_come_again(rank, step, what):
            return None
        return self._granted(first.rank, step, cause, go_back_to)

    def count_restart(self, restart: Restart) -> None:
        """Count a restart decided by another node: this one may have to decide the next."""
        if restart.microbatch_sizes is None:
            self.count = restart.number
            self._times.append(time.monotonic())
            self._has_come_again(None if restart.go_back_to is not None else restart.rank, restart.step, restart.cause)

    def after_hang(self, hang: HangVerdict) -> Restart | None:
        """Decide after ranks were ended because they hung.

        A rank that is the culprit again at the same step ends the run. A hang without a culprit is attributed to the
        network, which may fail twice at the same place.

        Args:
            hang: Verdict on the hang.
        """
        self.refusal = None
        if self.policy.most == 0:
            return None
        rank = next(iter(hang.culprits), 0)
        step = next(state.step for state in hang.states if state.rank == rank)
        cause = "the ranks were ended because they hung"
        if hang.culprits and self._has_come_again(rank, step, cause):
            return None
        return self._granted(rank, step, cause)

    def _has_come_again(self, rank: int | None, step: int, cause: str) -> bool:
        """Return whether the previous failure has recurred, which is then the reason not to restart."""
        this = rank, step, _CHANCE.sub("#", cause)
        is_same, self._last = self._last == this, this
        if is_same:
            where = f"at step {step}" if step > 0 else "before the first step"
            self.refusal = f"the same failure came again {where} after a restart, so it was not tried once more"
        return is_same

    def _granted(self, rank: int, step: int, cause: str, go_back_to: int | None = None) -> Restart | None:
        now = time.monotonic()
        while self._times and now - self._times[0] > self.policy.window_seconds:
            self._times.popleft()
        if len(self._times) >= self.policy.most:
            self.refusal = (
                f"{len(self._times)} restarts within {self.policy.window_seconds:g} s are used up (--max-restarts)"
            )
            return None
        self._times.append(now)
        self.count += 1
        return Restart(number=self.count, rank=rank, step=step, cause=cause, go_back_to=go_back_to)

    def _with_smaller_microbatches(self, end: WorkerEnd, size: int, step: int, num_ranks: int) -> Restart | None:
        """Halve the microbatches of all ranks, down to one sample: each time it is another attempt, and a cheap one.

        This includes the first step, in which memory most often runs out.
        """
        if size == 1:
            return None
        half = -(-size // 2)
        cause = in_brief(end, num_ranks)
        return Restart(number=self.count, rank=end.rank, step=step, cause=cause, microbatch_sizes=(size, half))


def _may_help(end: WorkerEnd, step_of: Callable[[int], int]) -> bool:
    """Return whether a failure may be due to the machine or to chance; not if no step has succeeded."""
    failure = end.failure
    if failure is None:
        return end.exit_code < 0
    if failure.is_consequence or failure.go_back_to is not None:
        return True
    return not failure.is_ours and failure.origin != "dure" and step_of(end.rank) > 1
