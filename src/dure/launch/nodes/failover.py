"""Failover of a node that cannot reach its run's leader: it rejoins, or takes the lead.

On both sides a cut cable looks like a lost node. The lease in the run's folder distinguishes them: while it is renewed,
the leader lives, and this node was cut off.
"""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dure.launch.nodes.admission import JoinListener
from dure.launch.nodes.channel import Address, Channel, ChannelClosed, ChannelListener, HandshakeRefused, connect
from dure.launch.nodes.leader_lease import STALE_SECONDS, Leader, Lease
from dure.launch.nodes.messages import Join, Message, Welcome, decode, encode
from dure.launch.nodes.peers import Nodes
from dure.launch.nodes.secret import read_secret

_LOOK_SECONDS = 0.1
_CONNECT_SECONDS = 2.0
"""Timeout in seconds of one attempt to reach the leader: three round trips, of 0.6 s each between distant hosts.

The lease is not watched meanwhile, so the reaction to an unresponsive leader's end is delayed by as much.
"""
_ANSWER_SECONDS = 5.0
_BETWEEN_SECONDS = 1.0
"""Delay in seconds between candidates for the lead, by node rank."""
_OTHERS_SECONDS = 4.0
"""Seconds that a new leader waits for the nodes that lost the same leader."""
NOBODY = -1
"""Node rank of an unknown leader."""
_GONE_SECONDS = 2.0
"""Seconds without a lease, in a readable folder, after which the leader has ended the run."""


@dataclass(frozen=True, kw_only=True)
class FailoverResult:
    """Result of a failover."""

    keeps_memory: bool
    """True if the snapshots in memory here are of the state from which the run continues."""
    expected: set[int]
    """Nodes that may rejoin, if this node leads now; otherwise empty."""
    patience_seconds: float = 0.0
    """Seconds for which this node waits for them."""


@dataclass(frozen=True, kw_only=True)
class LeaderFailover:
    """Return of a node to its run after it has lost the leader."""

    join: Join
    """Message with which this node joins."""
    folder: str
    """Folder of the run."""
    secret_file: Path | None
    port: int
    """Port at which this node admits others if it leads."""
    timeout_seconds: float
    how_ended: Callable[[], str | None]
    """Function that returns how the run ended, according to its record; None while it goes on."""
    on_wait: Callable[[str], None]
    """Callback for a sentence about the reason why this node waits."""
    on_lead: Callable[[], None]
    """Callback for when this node takes the lead."""

    def go(self, nodes: Nodes, is_stopped: Callable[[], bool]) -> FailoverResult | None:
        """Rejoin the run or lead it; the ranks here have ended. Returns None if it does not continue here.

        Args:
            nodes: All nodes, as known to this node.
            is_stopped: Whether this node was asked to stop meanwhile.
        """
        lease, why = nodes.lease, nodes.news.interrupted_because or "another node leads the run"
        assert lease is not None
        leader = next((str(member) for member in nodes.members if member.node_rank == nodes.leader), "the leader")
        old = [member.node_rank for member in nodes.members if member.node_rank != nodes.leader]
        place = old.index(nodes.me.node_rank) if nodes.me.node_rank in old else len(old)
        was_leader = lease.is_deposed
        nodes.drop_all()
        nodes.leader = NOBODY
        began, has_printed, is_second = time.monotonic(), False, False
        gone_since: float | None = None
        first: tuple[int, int] | None = None
        while time.monotonic() - began < self.timeout_seconds and not is_stopped():
            unchanged, found = lease.unchanged_seconds(), lease.read()
            if found is not None:
                first = first or (found.term, found.counter)
                is_alive = found.term > lease.term or (found.term, found.counter) != first
                if is_alive and unchanged < STALE_SECONDS:
                    if not was_leader and found.term == lease.term:
                        why = (
                            f"nothing is heard of {leader}, which still leads the run: the network between it and this "
                            "node is cut or too slow"
                        )
                    if not has_printed and time.monotonic() - began > 2 * STALE_SECONDS:
                        has_printed = True
                        self.on_wait(
                            f"{why}\n      the run goes on without this node, which tries to come back for "
                            f"{self.timeout_seconds:g} s (--rendezvous-timeout)"
                        )
                    if (way := self._come(nodes, lease, found)) is not None:
                        # the last work of an old leader's ranks may have been done while another led
                        return replace(way, keeps_memory=way.keeps_memory and not was_leader)
            gone_since = None if not lease.is_given_up() else gone_since or time.monotonic()
            is_gone = gone_since is not None and time.monotonic() - gone_since > _GONE_SECONDS
            is_free = found is not None and unchanged > STALE_SECONDS + place * _BETWEEN_SECONDS
            if (is_gone or is_free) and ((ended := self.how_ended()) is not None or is_gone):
                nodes.lost = f"{why}; meanwhile {ended or 'the run was ended before it had begun to train'}"
                return None
            if is_free and found is not None:
                # a term that was begun without any renewal is over as well
                last = None if is_second else max(lease.term, found.term)
                if (way := self._lead(nodes, lease, set(old), last)) is not None or nodes.lost:
                    return way
                is_second = True
            time.sleep(_LOOK_SECONDS)
        if is_stopped():
            return None
        hidden = "" if lease.can_be_read() else f", and {lease.folder.parent} cannot be read here either"
        nodes.lost = (
            f"{why}; the run could not be reached again within {self.timeout_seconds:g} s (--rendezvous-timeout)"
            f"{hidden}: start the same command once more when it can"
        )
        return None

    def _come(self, nodes: Nodes, lease: Lease, leader: Leader) -> FailoverResult | None:
        """Connect to the leader; None if it does not admit this node now."""
        try:
            family, address = _address(leader.address, leader.port)
            secret = read_secret(self.secret_file, host=leader.address, may_make=False)
            channel = connect(family, address, secret, timeout_seconds=_CONNECT_SECONDS)
        except (OSError, HandshakeRefused):
            return None
        try:
            channel.send(encode(replace(self.join, round=nodes.round, time=time.time())))
            welcome = _answer(channel)
            if not isinstance(welcome, Welcome) or welcome.folder != self.folder:
                channel.close()
                return None
        except ChannelClosed:
            channel.close()
            return None
        lease.term, lease.is_deposed = welcome.term, False
        nodes.follow(channel, welcome.leader)
        return FailoverResult(keeps_memory=welcome.keeps_memory, expected=set())

    def _lead(self, nodes: Nodes, lease: Lease, old: set[int], ended: int | None) -> FailoverResult | None:
        """Take the lead, if no other node was faster and this node can listen."""
        own = nodes.own_address
        if not lease.claim(nodes.me.node_rank, own, self.port, after=ended):
            lease.restart_observation()
            return None
        try:
            family, address = _address(own, self.port)
            secret = read_secret(self.secret_file, host=own, may_make=False)
            reception = JoinListener(ChannelListener(family, address, secret), self.join)
        except OSError as error:
            nodes.lost = f"this node cannot listen at {own}:{self.port} to lead the run ({error.strerror})"
            return None
        reception.folder = self.folder
        nodes.me = replace(nodes.me, address=own)
        nodes.lead(reception)
        lease.renew(nodes.round)
        self.on_lead()
        return FailoverResult(keeps_memory=True, expected=old, patience_seconds=_OTHERS_SECONDS)


def _address(host: str, port: int) -> tuple[int, Address]:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    return family, address


def _answer(channel: Channel) -> Message | None:
    deadline = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline:
        # further messages are handled once this node follows
        if (data := channel.receive_one()) is not None:
            with suppress(ValueError):
                return decode(data)
        time.sleep(0.01)
    return None
