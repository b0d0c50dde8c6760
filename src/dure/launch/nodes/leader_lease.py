"""Lease of the leader of a multi-node run, in the run's folder: it distinguishes a dead leader from a cut cable.

The leader writes a counter twice a second. A node that cannot reach it checks by its own clock whether the counter
still moves: clocks of hosts are never compared. If it does, that node was cut off, and waits. If it does not, the node
takes over by creating the file of the next term, which only one can. An old leader that comes back sees that file
before it starts ranks or completes a checkpoint.
"""

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dure.documents import read_json
from dure.own_files import open_own
from dure.records.leader_term import FOLDER, begin_term, newest_term

_LEASE = "lease.json"
_LEASE_BYTES = 1024
RENEW_SECONDS = 0.5
STALE_SECONDS = 2.0
"""Seconds without a change of the lease after which the run has no leader."""


@dataclass(frozen=True, kw_only=True)
class Leader:
    """Leader's entry in the lease."""

    term: int
    node_rank: int
    host: str
    address: str
    port: int
    counter: int
    round: int


class Lease:
    """One node's view of the lease."""

    def __init__(self, run: Path) -> None:
        """Open the lease in a run's folder; nothing is written yet."""
        self.folder = run / FOLDER
        self.term = 0
        """Term in which this node leads or follows."""
        self.is_deposed = False
        """True if this node led, and another does now."""
        self._mine: dict[str, Any] | None = None
        self._counter = 0
        self._next = 0.0
        self._seen: tuple[int, int] | None = None
        self._seen_at = 0.0

    # --- leading

    def claim(self, node_rank: int, address: str, port: int, *, after: int | None = None) -> bool:
        """Become the leader of the next term; return False if another was faster.

        Args:
            node_rank: Rank of this node.
            address: Address at which others reach it.
            port: Port at which it admits them.
            after: Term that ended; None for any, at the start of a run.
        """
        term = (newest_term(self.folder.parent) if after is None else after) + 1
        if not begin_term(self.folder.parent, term):
            return False
        self.term, self.is_deposed = term, False
        self._mine = {
            "epoch": term, "node_rank": node_rank, "host": socket.gethostname(), "address": address, "port": port,
        }  # fmt: skip
        self._next = 0.0
        return True

    def renew(self, round_number: int) -> None:
        """Renew the lease if it is due, and check whether this node still leads."""
        if self._mine is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + RENEW_SECONDS
        if self.is_taken():
            self.is_deposed, self._mine = True, None
            return
        self._counter += 1
        text = json.dumps({**self._mine, "counter": self._counter, "round": round_number})
        with suppress(OSError):  # a disk that is temporarily full or missing is no reason to end
            # in place: that needs no space, and readers ignore contents that they cannot parse
            descriptor = open_own(self.folder / _LEASE, os.O_WRONLY | os.O_CREAT)
            try:
                os.pwrite(descriptor, text.ljust(_LEASE_BYTES).encode(), 0)
            finally:
                os.close(descriptor)

    def is_taken(self) -> bool:
        """Return whether another node has begun a later term."""
        return newest_term(self.folder.parent) > self.term

    def give_up(self) -> None:
        """Remove the lease: the run is over."""
        if self._mine is not None and not self.is_taken():
            with suppress(OSError):
                (self.folder / _LEASE).unlink()
        self._mine = None

    # --- watching

    def read(self) -> Leader | None:
        """Return the current or last leader."""
        try:
            document = read_json(self.folder / _LEASE)
            numbers = {name: int(document[name]) for name in ("node_rank", "port", "counter", "round")}
            term = int(document["epoch"])
            return Leader(term=term, **numbers, host=str(document["host"]), address=str(document["address"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def can_be_read(self) -> bool:
        """Return whether this node sees the folder in which leaders write."""
        return newest_term(self.folder.parent) > 0

    def is_given_up(self) -> bool:
        """Return whether a leader has removed its lease; False if it merely cannot be read, which proves nothing."""
        try:
            os.stat(self.folder / _LEASE)
        except FileNotFoundError:
            return self.can_be_read()
        except OSError:
            pass
        return False

    def unchanged_seconds(self) -> float:
        """Return for how many seconds the lease has not changed, as observed by repeated calls."""
        found, now = self.read(), time.monotonic()
        if found is not None and (found.term, found.counter) != self._seen:
            self._seen, self._seen_at = (found.term, found.counter), now
        if not self._seen_at:
            self._seen_at = now
        return now - self._seen_at

    def look(self) -> None:
        """Adopt the current term as this node's."""
        self.term = max(self.term, newest_term(self.folder.parent))

    def restart_observation(self) -> None:
        """Restart the observation now."""
        self._seen, self._seen_at = None, 0.0


def live_leader(run: Path) -> Leader | None:
    """Return the leader of a run in progress; takes a moment if it had a leader before."""
    lease = Lease(run)
    before = lease.read()
    deadline = time.monotonic() + STALE_SECONDS
    while before is not None and time.monotonic() < deadline:
        now = lease.read()
        if now is not None and (now.term, now.counter) != (before.term, before.counter):
            return now
        time.sleep(0.05)
    return None
