"""Time limit of ranks for an orderly end after a stop signal."""

import time
from collections.abc import Sequence

from dure.failures.verdict import STOP_ENDS, WorkerEnd
from dure.launch.rounds.request import Launch
from dure.process.heartbeat import PHASES, Heartbeats

_SAVE_FRACTION = 1 / 2
"""Fraction of the grace time reserved for saving the memory of ranks that do not end."""
_SAVE_SECONDS = 10.0
"""Maximum seconds reserved for that."""
_PRINT_AFTER_SECONDS = 0.3
"""Seconds after which the reason for a slow stop is printed; most steps are over by then."""

_STARTING, _TRAINING, _EVALUATING, _SAVING, _LEAVING = PHASES
_WAITS_FOR = {
    _TRAINING: "step {step} and the next one to end",  # ranks agree on the stop in the next one
    _EVALUATING: "the evaluation to end",
    _SAVING: "the checkpoint to be written",
    _LEAVING: "the ranks to leave",
}


class StopLimit:
    """Deadline of the ranks of one round, counted from the first stop signal."""

    def __init__(self, launch: Launch, heartbeats: Heartbeats) -> None:
        self._launch = launch
        self._heartbeats = heartbeats
        self._began: float | None = None
        self._has_printed = False
        self._was_half_over = False

    def seconds_left(self, alive: Sequence[int]) -> float:
        """Return the seconds that ranks have left, counted from the first call.

        Ranks that write a checkpoint have the whole grace time. Others are ended a little earlier if restarted ranks
        can save their snapshots.

        Args:
            alive: Ranks that have not ended.
        """
        now = time.monotonic()
        if self._began is None:
            self._began = now
        launch, seconds = self._launch, self._launch.grace_seconds
        if launch.orders.stopped_by is not None:
            seconds = save_seconds(launch)
        elif launch.saves_snapshots and all(self._heartbeats.last(rank).phase != _SAVING for rank in alive):
            seconds -= save_seconds(launch)
        return self._began + seconds - now

    def extend(self, seconds: float) -> None:
        """Extend the deadline by time for which this process and its ranks were stopped."""
        if self._began is not None:
            self._began += seconds

    def is_half_over(self, seconds_left: float) -> bool:
        """Return, once, whether less time is left than has passed: time to probe the ranks.

        Args:
            seconds_left: Result of `seconds_left`.
        """
        if self._was_half_over or self._began is None or time.monotonic() - self._began < seconds_left:
            return False
        self._was_half_over = True
        return True

    def reason_once(self, alive: Sequence[int]) -> str | None:
        """Return, once, the reason for a stop that takes longer than most steps; otherwise None.

        Args:
            alive: Ranks that have not ended.
        """
        if self._has_printed or self._began is None or time.monotonic() - self._began < _PRINT_AFTER_SECONDS:
            return None
        self._has_printed = True
        beat = min((self._heartbeats.last(rank) for rank in alive), key=lambda beat: beat.time)
        waits_for = _WAITS_FOR.get(beat.phase, "the ranks to end") if beat.time else "the ranks to end"
        since = f" (begun {time.monotonic() - beat.time:.0f} s ago)" if beat.time else ""
        end = "and the last step in memory is saved" if self._launch.saves_snapshots else "as they are"
        return (
            f"stopping: waiting for {waits_for.format(step=beat.step)}{since}. A second Ctrl-C ends the ranks at once; "
            f"after {self._launch.grace_seconds:g} s (--grace-seconds) they are ended {end}"
        )


def save_seconds(launch: Launch) -> float:
    """Return the seconds of the grace time that are reserved for saving snapshots."""
    return min(_SAVE_SECONDS, launch.grace_seconds * _SAVE_FRACTION)


def has_left_snapshots(
    launch: Launch, ends: Sequence[WorkerEnd], received: Sequence[int], *, has_begun: bool = True
) -> bool:
    """Return whether ranks ended after one stop signal without a checkpoint, so that snapshots may be left to save.

    Ranks that diverged have nothing to save: their snapshots may be as wrong as their weights.

    Args:
        launch: Launch of the ranks.
        ends: How they ended.
        received: Received stop signals.
        has_begun: Whether a rank of this round has begun a step; before that ranks leave without a checkpoint.
    """
    is_first = launch.saves_snapshots and launch.orders.stopped_by is None and len(received) == 1
    has_saved = any(end.exit_code == 0 or (end.exit_code > 0 and end.exit_code in STOP_ENDS) for end in ends)
    have_diverged = any(end.failure is not None and end.failure.is_divergence for end in ends)
    return is_first and bool(ends) and not (has_saved and has_begun) and not have_diverged
