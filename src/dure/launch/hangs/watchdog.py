"""Watchdog that detects that no step finishes, from the ranks' heartbeats in shared memory.

A script without optimiser steps has none. Its ranks are asked for the number of their process-group calls.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dure.process.heartbeat import Beat, Heartbeats, Pace

LEAST_SECONDS = 10.0
"""Lower bound of derived limits, in seconds: shorter waits, such as the start of a loader, are no hang."""
TIMES_MEDIAN = 10.0
TIMES_LONGEST = 3.0
"""Factor on the longest silence so far that ended by itself."""
UNKNOWN_SECONDS = 300.0
"""Limit in seconds while usual durations are unknown: the first step may compile, a checkpoint may be large."""
START_SECONDS = 60.0
"""Lower bound in seconds of any limit before a rank's first heartbeat, even a given one: the rank imports torch."""
TIMES_UNCERTAIN = 6.0
"""Factor on the limit of a rank that may only be slow."""
_FEWEST_KNOWN = 3
_MOST_KNOWN = 101
_GAP_SECONDS = 5.0
"""Seconds between two polls that show that the supervisor was stopped too: `Ctrl-Z`, then `fg`."""


@dataclass(frozen=True, kw_only=True)
class HangPolicy:
    """Limits on the silence of ranks, and the action after them."""

    hang_after: float | None = None
    """Seconds of silence that count as a hang, whatever a rank is doing; None to derive them from the run so far."""
    action: str = "restart"
    """`restart`, `stop` or `wait`."""

    counts_calls: bool = False
    """True if process-group calls also count as progress, because the steps of a script are unknown."""

    def acts(self, seconds: float, threshold: float, *, is_certain: bool) -> bool:
        """Return whether it is time to act. A rank that may only be slow gets more time."""
        return seconds > self.patience(threshold, is_certain=is_certain)

    def patience(self, threshold: float, *, is_certain: bool) -> float:
        """Return the seconds of silence after which to act."""
        if self.action == "wait":
            return float("inf")
        if self.hang_after is not None:
            return self.hang_after
        return threshold if is_certain else TIMES_UNCERTAIN * threshold

    def announcement(self, seconds: float, threshold: float, *, is_certain: bool) -> str | None:
        """Return a sentence about the action if nothing changes, and its time; None if it is done now or never."""
        patience = self.patience(threshold, is_certain=is_certain)
        if seconds > patience or patience == float("inf"):
            return None
        done = "all ranks are started again" if self.action == "restart" else "the run is ended"
        return f"it may only be slow: {done} after {patience:.0f} s of this (--hang-after sets a limit)"


@dataclass(kw_only=True)
class _Calls:
    """Process-group calls of one rank."""

    count: int = 0
    time: float = 0.0
    """Time on the watchdog's clock at which the last one was noticed."""
    longest_seconds: float = 0.0
    """Longest time between two calls."""


class Watchdog:
    """Watchdog over the heartbeats of ranks; every poll costs some microseconds per rank."""

    def __init__(
        self, heartbeats: Heartbeats, hang_after: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.heartbeats = heartbeats
        self.hang_after = hang_after
        self.clock = clock
        self._began = self._last_look = clock()
        self._not_before = 0.0
        """Earliest time from which silence is counted, on the watchdog's clock."""
        self._seen: dict[int, int] = {}
        """Number of heartbeats at the last poll, by rank."""
        self._paces: dict[tuple[int, str], Pace] = {}
        self._known: dict[str, deque[tuple[float, float]]] = {}
        """Silences that ended, by phase, as pairs of seconds: the mean and the longest between two polls."""
        self._beats: dict[str, int] = {}
        """Number of silences seen so far, by phase."""
        self.last_threshold = UNKNOWN_SECONDS
        """Limit in seconds of the rank that has been silent for longest among those that exceed theirs."""
        self._calls: dict[int, _Calls] = {}
        self.mute: set[int] = set()
        """Ranks that do not reply. The others show their state by waiting for them or making progress."""
        self.is_known = True
        """True if that rank's limit is derived from its past, or was given."""
        self.is_begun = False
        """True once a rank has sent a heartbeat: until then all may wait while one downloads its data."""
        self._reported_seconds = 0.0
        """Seconds of silence up to which reports have been made."""
        self._unknown: tuple[float, Beat] | None = None
        """Longest silence in a phase of unknown length, in seconds, and the heartbeat before it."""
        self._noticed_seconds = 0.0
        """Seconds of such silence up to which notices have been given."""

    def silent_seconds(self, ranks: Sequence[int]) -> float | None:
        """Return for how long no step has finished once that exceeds the limit, and again each time it has doubled.

        None if all is well, or there is nothing new.

        Args:
            ranks: Living ranks.
        """
        now = self.clock()
        if now - self._last_look > _GAP_SECONDS:
            self.resume()
        self._last_look = now
        silent: list[tuple[float, float, bool]] = []
        self._unknown = None
        last_call = max((calls.time for calls in self._calls.values()), default=0.0)
        for rank in ranks:
            beat = self.heartbeats.last(rank)
            self.is_begun = self.is_begun or beat.count > 0
            if self._seen.get(rank) != beat.count:
                self._seen[rank] = beat.count
                self._learn(rank)
            calls = self._calls.get(rank, _Calls())
            last_news = max(beat.time or self._began, last_call if rank in self.mute else calls.time)
            seconds = now - max(last_news, self._not_before)
            has_begun = beat.count or (calls.count and self.hang_after is not None)  # a script may send no heartbeat
            self.last_threshold = self.threshold(beat.phase) if has_begun else self._threshold_of_start()
            self.is_known = self.hang_after is not None or self.last_threshold != UNKNOWN_SECONDS
            if not self.is_known and beat.count and (self._unknown is None or seconds > self._unknown[0]):
                self._unknown = seconds, beat
            if not self.is_known and calls.count:
                self.last_threshold = max(LEAST_SECONDS, TIMES_LONGEST * calls.longest_seconds)
            if seconds > self.last_threshold:
                silent.append((seconds, self.last_threshold, self.is_known))
        if not silent:
            self._reported_seconds = 0.0
            return None
        longest, self.last_threshold, self.is_known = max(silent)
        if longest <= self._reported_seconds:
            return None
        uncertain = TIMES_UNCERTAIN * self.last_threshold
        self._reported_seconds = min(2 * longest, uncertain) if longest < uncertain else 2 * longest
        return longest

    def notice(self) -> str | None:
        """Return a sentence on a silence in a phase of unknown length after ten seconds, and each time it has doubled.

        It is about the last poll; None if there is nothing new.
        """
        seconds, beat = self._unknown or (0.0, Beat(step=-1, time=0.0))
        if seconds <= LEAST_SECONDS:
            self._noticed_seconds = 0.0
            return None
        if seconds <= self._noticed_seconds or seconds > UNKNOWN_SECONDS:  # from then on there are verdicts
            return None
        self._noticed_seconds = 2 * seconds
        what = f"in step {beat.step}" if beat.phase == "training" else beat.phase
        return f"still {what}, for {seconds:.0f} s now; after {UNKNOWN_SECONDS:.0f} s it is examined as a hang"

    def resume(self) -> None:
        """Count silence from now on: the ranks were stopped for as long as the supervisor was."""
        self._not_before = self.clock()

    def report_again_soon(self, seconds: float) -> None:
        """Poll again soon: silence of this duration was no hang."""
        self._reported_seconds = min(seconds + LEAST_SECONDS, UNKNOWN_SECONDS)

    def note_calls(self, rank: int, count: int) -> None:
        """Record the number of process-group calls that a rank has made so far."""
        calls = self._calls.setdefault(rank, _Calls())
        if count <= calls.count:
            return
        now = self.clock()
        if calls.count:
            calls.longest_seconds = max(calls.longest_seconds, now - calls.time)
        calls.count, calls.time = count, now

    def threshold(self, phase: str) -> float:
        """Return the seconds of silence that are the limit."""
        if self.hang_after is not None:
            return self.hang_after
        known = self._known.get(phase, ())
        if self._beats.get(phase, 0) < _FEWEST_KNOWN:
            return UNKNOWN_SECONDS
        median = statistics.median(mean for mean, _ in known)
        return max(LEAST_SECONDS, TIMES_MEDIAN * median, TIMES_LONGEST * max(longest for _, longest in known))

    def _threshold_of_start(self) -> float:
        return UNKNOWN_SECONDS if self.hang_after is None else max(self.hang_after, START_SECONDS)

    def _learn(self, rank: int) -> None:
        for phase, pace in self.heartbeats.paces(rank).items():
            before = self._paces.get((rank, phase), Pace())
            self._paces[rank, phase] = pace
            number = pace.count - before.count
            if number > 0:
                mean = (pace.seconds - before.seconds) / number
                longest = pace.longest_seconds if pace.longest_seconds > before.longest_seconds else mean
                self._known.setdefault(phase, deque(maxlen=_MOST_KNOWN)).append((mean, longest))
                self._beats[phase] = self._beats.get(phase, 0) + number
