"""Work before the first step that may take any time on some ranks: a download, pretrained weights, an index of data.

The timeout of a collective is short enough to detect a hang, and too short for a download. Ranks that are done
therefore wait at the store, for as long as the others show signs of life.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from dure.errors import PeerLost
from dure.terminal import few

_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.001, 0.25
_BEAT_SECONDS = 1.0
"""Seconds between two signs of life, and between two checks of those of others."""
_MISSED_BEATS = 5
"""Signs of life that a rank may miss before that is reported; native code that holds Python's lock sends none."""
FIRST_NOTICE_SECONDS = 10.0
"""Seconds after which a step is reported, and again whenever they have doubled."""


class Store(Protocol):
    """Methods of torch's stores used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


class Startup:
    """Steps of a start that all ranks perform together, one after another.

    Every rank increments a counter in the store as a sign of life while it works. Rank 0 reads the counters of the
    ranks that are not done, and ends the wait of all if one stops. The others read only rank 0's counter.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store | None,
        *,
        timeout_seconds: float,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare the steps; nothing is sent yet.

        Args:
            rank: Rank of this process.
            world_size: Number of ranks.
            store: Store of these ranks and this start alone; None for one rank.
            timeout_seconds: Maximum time without a sign of life.
            report: Receives a sentence on slow steps, on rank 0 and from another thread.
        """
        self._rank, self._world_size, self._store = rank, world_size, store
        self._timeout_seconds = timeout_seconds
        self._report = report if rank == 0 else None
        self._number = 0

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Run this rank's part of a step in a context, however long it takes, and wait for the others at its end.

        Args:
            what: Completion of "rank 0 is still", the same on all ranks.

        Raises:
            PeerLost: Another rank failed in the step, or shows no sign of life.
        """
        if self._store is None or self._world_size == 1:
            notices = _Notices(self._report, what, has_others=False)
            with _repeating(lambda: notices.update([self._rank])):
                yield
            return
        self._number += 1
        shared = _Step(self._store, self._number, what, self._rank, self._world_size, self._timeout_seconds)
        notices = _Notices(self._report, what)

        def beat() -> None:
            shared.beat()
            notices.update([self._rank])

        with _repeating(beat):
            try:
                yield
            except BaseException:
                with suppress(Exception):  # the store may be what failed
                    shared.fail(f"rank {self._rank} failed while it was {what}")
                raise
        shared.finish()
        shared.wait(notices)


class _Step:
    """A step as the ranks see it in the store."""

    def __init__(
        self, store: Store, number: int, what: str, rank: int, world_size: int, timeout_seconds: float
    ) -> None:
        self.rank = rank
        self._store, self._what, self._world_size = store, what, world_size
        self._timeout_seconds = timeout_seconds
        self._prefix = f"start/{number}"
        self._seen: dict[int, tuple[int, float]] = {}
        """Last known counter of each rank, and the time when it was new."""

    def beat(self) -> None:
        self._store.add(f"{self._prefix}/beats/{self.rank}", 1)

    def finish(self) -> None:
        self._mark_done()
        if self._store.add(f"{self._prefix}/num done", 1) == self._world_size:
            self._store.set(f"{self._prefix}/all done", "")

    def _mark_done(self) -> None:
        self._store.set(f"{self._prefix}/done/{self.rank}", "")

    def fail(self, reason: str) -> None:
        self._store.set(f"{self._prefix}/failure", reason)

    def wait(self, notices: "_Notices") -> None:
        """Wait for all ranks; rank 0 watches the others, and they watch rank 0.

        Each rank writes its key again from time to time, and rank 0 the key of all: a process that reaches the store
        can delete keys, and ranks that wait for a key would wait forever.
        """
        pause, next_look = _FIRST_POLL_SECONDS, time.monotonic() + _BEAT_SECONDS
        while not self._store.check([f"{self._prefix}/all done"]):
            if time.monotonic() >= next_look:
                self._look(notices)
                next_look = time.monotonic() + _BEAT_SECONDS
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)

    def _look(self, notices: "_Notices") -> None:
        self.beat()
        self._mark_done()
        late = [0] if self.rank else [rank for rank in range(self._world_size) if not self._is_done(rank)]
        seconds = {rank: self._silent_seconds(rank) for rank in late}
        silent = [rank for rank in late if seconds[rank] > self._timeout_seconds]
        if silent:
            self.fail(f"{_ranks(silent)} gave no sign of life for {self._timeout_seconds:g} s while {self._what}")
        if self._store.check([f"{self._prefix}/failure"]):
            raise PeerLost(self._store.get(f"{self._prefix}/failure").decode())
        if not late:
            self._store.set(f"{self._prefix}/all done", "")
        notices.update(late, [rank for rank in late if seconds[rank] > _MISSED_BEATS * _BEAT_SECONDS])

    def _is_done(self, rank: int) -> bool:
        return bool(self._store.check([f"{self._prefix}/done/{rank}"]))

    def _silent_seconds(self, rank: int) -> float:
        count, now = self._store.add(f"{self._prefix}/beats/{rank}", 0), time.monotonic()
        known, since = self._seen.get(rank, (-1, now))
        if count != known:
            self._seen[rank] = count, now
            return 0.0
        return now - since


class _Notices:
    """Reports of slow steps."""

    def __init__(self, report: Callable[[str], None] | None, what: str, *, has_others: bool = True) -> None:
        self._report, self._what, self._has_others = report, what, has_others
        self._begun = time.monotonic()
        self._next_seconds = FIRST_NOTICE_SECONDS

    def update(self, late: list[int], silent: Sequence[int] = ()) -> None:
        """Report, if due, which ranks are waited for.

        Args:
            late: Ranks that have not completed the step.
            silent: Ranks among them that show no sign of life.
        """
        seconds = time.monotonic() - self._begun
        if self._report is not None and late and seconds >= self._next_seconds:
            self._next_seconds = 2 * seconds
            text = f"still {self._what}, for {seconds:.0f} s now"
            if self._has_others:
                text = f"{_ranks(late)} {'is' if len(late) == 1 else 'are'} {text}"
                if silent:
                    verb = "shows" if len(silent) == 1 else "show"
                    text += f", and {_ranks([*silent])} {verb} no sign of life (stopped, or in native code)"
                text += "; the others wait"
            self._report(text)


@contextmanager
def _repeating(act: Callable[[], None]) -> Iterator[None]:
    """Call a function from another thread again and again."""
    stop = threading.Event()

    def repeat() -> None:
        with suppress(Exception):  # loss of the store is noticed when the step ends
            while not stop.wait(_BEAT_SECONDS):
                act()

    thread = threading.Thread(target=repeat, name="dure-startup", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {few(ranks, 8)}"
