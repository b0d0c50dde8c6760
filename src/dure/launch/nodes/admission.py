"""Admission of nodes: those with which a run begins, and those that join or rejoin it."""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from dure.documents import DocumentInvalid
from dure.errors import Misuse
from dure.launch.nodes.channel import Channel, ChannelClosed, ChannelListener
from dure.launch.nodes.leader_lease import Lease
from dure.launch.nodes.member import Member
from dure.launch.nodes.messages import Join, Later, Welcome, decode, encode, refusal_of
from dure.launch.nodes.round_state import RoundNews

_MOST_UNNAMED = 16
_UNNAMED_SECONDS = 10.0
"""Seconds that an authenticated peer has to identify itself."""


class Peers(Protocol):
    """Part of `Nodes` that a listener needs to admit a node."""

    round: int
    leader: int
    members: tuple[Member, ...]
    lease: Lease | None
    news: RoundNews
    ready: set[int]
    is_stopping: bool
    is_new_leader: bool

    @property
    def is_over(self) -> bool:
        """Return whether the run is over."""
        ...

    def is_known(self, rank: int) -> bool:
        """Return whether there is a node with that rank."""
        ...

    def add(self, rank: int, channel: Channel) -> None:
        """Add a node that has joined."""
        ...

    def yield_to(self, round_number: int) -> None:
        """Record that a joining node has continued for longer than this one."""
        ...

    def interrupt_round(self, why: str) -> None:
        """End the round, so that the next one begins with other nodes."""
        ...


class JoinListener:
    """Listener of a run for nodes, and authenticated peers that have not identified themselves."""

    def __init__(self, listener: ChannelListener, mine: Join) -> None:
        """Take over an open listener.

        Args:
            listener: Listener to which nodes connect.
            mine: This node's own join message, with which the others' must agree.
        """
        self.listener = listener
        self.mine = mine
        self.unnamed: list[Channel] = []
        self.folder: str | None = None
        """Folder of the run, once there is one."""
        self.waiting: dict[int, Member] = {}
        """Nodes that have joined during the run and are not yet part of a round."""

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors to wait on."""
        return [*self.listener.descriptors, *(channel.fileno() for channel in self.unnamed)]

    def receive_introductions(self, most_seconds: float) -> list[tuple[Channel, dict[str, Any]]]:
        """Return peers that have identified themselves, after at most `most_seconds`."""
        self.unnamed += self.listener.admit(most_seconds)
        named = []
        for channel in self.unnamed[:]:
            try:
                message = channel.receive_one()
                late = time.monotonic() - channel.last_received > _UNNAMED_SECONDS
                if message is None and not late and len(self.unnamed) <= _MOST_UNNAMED:
                    continue
                self.unnamed.remove(channel)
                if message is None:
                    channel.close()
                else:
                    named.append((channel, message))
            except ChannelClosed:
                channel.close()
                self.unnamed.remove(channel)
        return named

    def let_in(self, nodes: "Peers") -> None:
        """Admit nodes that join during the run; called repeatedly on the leader.

        A node takes part in the next round once it has imported what its ranks need; then this round is ended.
        """
        for rank in [rank for rank in self.waiting if not nodes.is_known(rank)]:
            del self.waiting[rank]
        for channel, message in self.receive_introductions(0.0):
            try:
                join = introduced(message)
                member = checked(join, self.mine, channel)
                if nodes.is_known(member.node_rank) or self.folder is None:
                    # an end that has not been noticed yet is more likely than a second node with that rank
                    channel.send(encode(Later()))
                    channel.close()
                    continue
                if nodes.is_new_leader and join.round > nodes.round:
                    nodes.yield_to(join.round)
                welcome = Welcome(
                    folder=self.folder,
                    term=0 if nodes.lease is None else nodes.lease.term,
                    leader=nodes.leader,
                    keeps_memory=join.round == nodes.round,
                    members=(*nodes.members, member),
                )
                channel.send(encode(welcome))
            except Misuse as error:
                with suppress(ChannelClosed):
                    channel.send(encode(refusal_of(error)))
                channel.close()
                continue
            except ChannelClosed:
                channel.close()
                continue
            self.waiting[member.node_rank] = member
            nodes.add(member.node_rank, channel)
        come = sorted(rank for rank in self.waiting if rank in nodes.ready)
        here = {member.node_rank for member in nodes.members}
        if come and nodes.news.interrupted_because is None and not (nodes.is_over or nodes.is_stopping):
            back = ", ".join(str(self.waiting[rank]) for rank in come)
            nodes.interrupt_round(
                f"{back} {'is' if len(come) == 1 else 'are'} there" + (" again" if here & set(come) else "")
            )

    def close(self) -> None:
        """Refuse all further nodes."""
        self.listener.close()
        for channel in self.unnamed:
            channel.close()
        self.unnamed.clear()


def introduced(data: Mapping[str, Any]) -> Join:
    """Return a node's join message.

    Raises:
        Misuse: It sent another message.
    """
    with suppress(DocumentInvalid):
        join = decode(data)
        if isinstance(join, Join):
            return join
    raise Misuse("a node speaks another protocol: install the same version of dure on all nodes")


def checked(theirs: Join, mine: Join, channel: Channel) -> Member:
    """Compare the run of a joining node with this node's.

    Raises:
        Misuse: They disagree; names the field and both values.
    """
    member = Member(
        node_rank=theirs.node_rank,
        host=theirs.host[:255],
        address=channel.peer_address,
        num_ranks=theirs.num_ranks,
        # exact up to the transmission time of the message
        clock_behind_seconds=time.time() - theirs.time,
    )
    who = f"node {member.node_rank} ({member.host})"
    wanted = {"nnodes": mine.num_nodes, **mine.facts}
    for name, value in {"nnodes": theirs.num_nodes, **theirs.facts}.items():
        if name not in wanted or wanted[name] != value:
            raise Misuse(
                f"nodes do not run the same: {name} is {wanted.get(name)} on node {mine.node_rank} and {value} on "
                f"{who}; start all nodes with the same settings, code and versions"
            )
    if missing := [name for name in wanted if name not in ("nnodes", *theirs.facts)]:
        raise Misuse(
            f"nodes do not run the same: {missing[0]} is {wanted[missing[0]]} on node {mine.node_rank} and not "
            f"given on {who}"
        )
    return member
