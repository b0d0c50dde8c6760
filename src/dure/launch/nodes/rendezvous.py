"""Rendezvous of the launchers of one run: they connect and agree on what they start."""

import hashlib
import ipaddress
import json
import platform
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dure.documents import DocumentInvalid
from dure.errors import EnvironmentLacks, Misuse, SpecInvalid
from dure.launch.nodes.addresses import cannot_listen, resolved, split_address
from dure.launch.nodes.admission import JoinListener, checked, introduced
from dure.launch.nodes.channel import Address, Channel, ChannelClosed, ChannelListener, HandshakeRefused, connect
from dure.launch.nodes.member import Member
from dure.launch.nodes.messages import (
    Join,
    Later,
    Refused,
    Welcome,
    decode,
    encode,
    refusal_of,
    refused_error,
)
from dure.launch.nodes.peers import Nodes
from dure.launch.nodes.secret import read_secret
from dure.terminal import print_status

PROTOCOL = 4
DEFAULT_TIMEOUT_SECONDS = 600.0
LAST_CALL_SECONDS = 5.0
"""Seconds that the nodes wait for further ones before a run begins, once there are enough."""
_LOOK_SECONDS = 0.2
_CONNECT_SECONDS = 5.0
_MOST_REFUSALS = 3
"""Maximum number of refusals before a node gives up. A few may come from a listener that is full; more show that the
node does not know the secret.
"""
_LONGEST_VALUE = 200


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """Settings of a run on several nodes."""

    num_nodes: int
    node_rank: int
    rendezvous: str
    """Address of node 0, as `host:port`."""
    fewest_nodes: int | None = None
    """Minimum number of nodes; None for all."""
    secret_file: Path | None = None
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    allow_public_address: bool = False
    leader: tuple[str, int] | None = None
    """Address of the leader of a run in progress, if it is not the rendezvous."""

    @property
    def fewest(self) -> int:
        """Minimum number of nodes."""
        return self.fewest_nodes or self.num_nodes

    @property
    def words(self) -> str:
        """Return the number of nodes, as the user gives it."""
        return str(self.num_nodes) if self.fewest == self.num_nodes else f"{self.fewest}:{self.num_nodes}"


def node_settings(
    *,
    nnodes: int,
    node_rank: int | None,
    rendezvous: str | None,
    secret_file: Path | None,
    timeout_seconds: float,
    allow_public_address: bool,
    fewest: int | None = None,
) -> NodeSettings | None:
    """Return the settings for several nodes, or None for a run on one.

    Raises:
        SpecInvalid: Settings are invalid; lists all of them.
    """
    faults = []
    if nnodes < 1:
        faults.append(f"nnodes is {nnodes} but must be a whole number above 0")
    if fewest is not None and not 1 <= fewest <= nnodes:
        faults.append(f"nnodes is {fewest}:{nnodes} but must be the fewest and the most hosts, as 1:{max(nnodes, 2)}")
    if timeout_seconds <= 0:
        faults.append(f"rendezvous_timeout is {timeout_seconds:g} but must be a number above 0")
    if nnodes == 1 and (node_rank or rendezvous is not None):
        faults.append("node_rank and rendezvous are for a run on several nodes: give --nnodes too, or leave them out")
    if nnodes > 1 and (node_rank is None or not 0 <= node_rank < nnodes):
        given = "not given" if node_rank is None else str(node_rank)
        faults.append(f"node_rank is {given} but must be 0 to {nnodes - 1}, another on each of the {nnodes} nodes")
    if nnodes > 1 and rendezvous is None:
        faults.append("rendezvous is not given: all nodes need node 0's address, as --rendezvous 10.0.0.1:29400")
    elif rendezvous is not None:
        try:
            split_address(rendezvous)
        except ValueError as error:
            faults.append(f"rendezvous is {rendezvous!r} but {error}: write it as 10.0.0.1:29400")
    if faults:
        raise SpecInvalid(faults)
    if nnodes == 1 or node_rank is None or rendezvous is None:
        return None
    return NodeSettings(
        num_nodes=nnodes,
        fewest_nodes=fewest,
        node_rank=node_rank,
        rendezvous=rendezvous,
        secret_file=secret_file,
        timeout_seconds=timeout_seconds,
        allow_public_address=allow_public_address,
    )


def join(
    settings: NodeSettings | None, facts: Mapping[str, Any], num_ranks: int, *, compares_versions: bool = True
) -> Nodes:
    """Meet the other nodes, and return all of them once all are present and agree.

    Args:
        settings: Rank of this node, and the rendezvous; None if it is the only one.
        facts: Facts that must be the same on all nodes, by their names in messages.
        num_ranks: Ranks that this node starts.
        compares_versions: Whether versions of software are among these facts.

    Raises:
        Misuse: Nodes disagree, or this one may not meet the others in this way.
        EnvironmentLacks: A node did not join, or the address is not available here.
    """
    if settings is None:
        return Nodes.alone(num_ranks)
    host, _port = split_address(settings.rendezvous)
    patience = 0.0 if settings.node_rank == 0 else settings.timeout_seconds
    family, address = resolved(settings.rendezvous, patience, allow_public_address=settings.allow_public_address)
    secret = read_secret(settings.secret_file, host=host, may_make=settings.node_rank == 0)
    me = Member(node_rank=settings.node_rank, host=socket.gethostname(), address="", num_ranks=num_ranks)
    mine = about(settings, me, facts, with_versions=compares_versions)
    if settings.leader is not None:
        return _come(settings, family, settings.leader, secret, mine)
    if settings.node_rank == 0:
        return _receive(settings, family, address, secret, me, mine)
    return _come(settings, family, address, secret, mine)


def about(settings: NodeSettings, me: Member, facts: Mapping[str, Any], *, with_versions: bool = True) -> Join:
    """Return a node's join message."""
    return Join(
        num_nodes=settings.words,
        node_rank=me.node_rank,
        host=me.host,
        num_ranks=me.num_ranks,
        facts=_all_facts(facts, with_versions=with_versions),
    )


def _all_facts(facts: Mapping[str, Any], *, with_versions: bool) -> dict[str, Any]:
    import importlib.metadata

    versions: dict[str, Any] = {"protocol": PROTOCOL}
    if with_versions:
        versions["Python version"] = ".".join(platform.python_version_tuple()[:2])
    for package in ("dure", "torch") if with_versions else ():
        try:
            versions[f"{package} version"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[f"{package} version"] = "unknown"
    # the command comes first: if that differs, versions are not the main difference
    return {name: _short(value) for name, value in {**facts, **versions, **facts}.items()}


def _short(value: Any) -> Any:
    """Shorten a value for messages: a long one is replaced by its digest, which suffices for comparison."""
    text = json.dumps(value, default=str, sort_keys=True)
    if len(text) > _LONGEST_VALUE:
        return f"something with digest {hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return json.loads(text)


# --- node 0


def _receive(settings: NodeSettings, family: int, address: Address, secret: bytes, me: Member, mine: Join) -> Nodes:
    """Wait for all nodes.

    If the run needs all, the listener is closed when all have joined, so that no other host can connect during the run.
    """
    try:
        reception = JoinListener(ChannelListener(family, address, secret), mine)
    except OSError as error:
        raise cannot_listen(settings.rendezvous, error) from None
    if ipaddress.ip_address(str(address[0])).is_loopback:
        print_status(f"{settings.rendezvous} leads to {address[0]} here: only processes of this host can join")
    joined: dict[int, tuple[Member, Channel]] = {}
    try:
        _wait_for_all(settings, reception, joined)
        members = [
            replace(me, address=str(address[0])),
            *(joined[rank][0] for rank in sorted(joined)),
        ]
        for channel in (channel for _, channel in joined.values()):
            channel.send(encode(Welcome(leader=0, members=tuple(members))))
    except BaseException as error:
        reason = encode(refusal_of(error))
        for channel in (*reception.unnamed, *(channel for _, channel in joined.values())):
            with suppress(ChannelClosed):
                channel.send(reason)
        reception.close()
        for _, channel in joined.values():
            channel.close()
        raise
    is_elastic = settings.fewest < settings.num_nodes
    if not is_elastic:
        reception.close()  # drops authenticated peers that have not identified themselves, too
    return Nodes(
        members[0],
        members,
        {rank: channel for rank, (_, channel) in joined.items()},
        fewest=settings.fewest,
        most=settings.num_nodes,
        reception=reception if is_elastic else None,
    )


def _wait_for_all(settings: NodeSettings, reception: JoinListener, joined: dict[int, tuple[Member, Channel]]) -> None:
    deadline = time.monotonic() + settings.timeout_seconds
    last_came = time.monotonic()
    while len(joined) < settings.num_nodes - 1:
        now = time.monotonic()
        is_enough = len(joined) + 1 >= settings.fewest and settings.fewest < settings.num_nodes
        if is_enough and now - last_came > LAST_CALL_SECONDS:
            return
        if now > deadline:
            missing = [str(rank) for rank in range(1, settings.num_nodes) if rank not in joined]
            num_refused = reception.listener.num_refused
            refused = f"; {num_refused} that came did not know the secret" if num_refused else ""
            raise EnvironmentLacks(
                f"node {', '.join(missing)} of {settings.num_nodes} did not come to {settings.rendezvous} within "
                f"{settings.timeout_seconds:g} s{refused}: start it there, or wait longer with --rendezvous-timeout"
            )
        named = reception.receive_introductions(_LOOK_SECONDS)
        for rank in [rank for rank, (_, channel) in joined.items() if _is_gone(channel)]:
            del joined[rank]  # its launcher was ended; it may join again
        for position, (channel, message) in enumerate(named):
            try:
                member = checked(introduced(message), reception.mine, channel)
                if member.node_rank in (0, *joined) or not 0 < member.node_rank < settings.num_nodes:
                    raise Misuse(
                        f"two nodes have node_rank {member.node_rank} (one is {member.host} at {member.address}): give "
                        f"each node another --node-rank, 0 to {settings.num_nodes - 1}"
                    )
            except Misuse:
                reception.unnamed += [one for one, _ in named[position:]]  # they are informed too
                raise
            joined[member.node_rank] = (member, channel)
            last_came = time.monotonic()


def _is_gone(channel: Channel) -> bool:
    try:
        channel.receive()
    except ChannelClosed:
        channel.close()
        return True
    return False


# --- the other nodes


def _come(settings: NodeSettings, family: int, address: Address, secret: bytes, mine: Join) -> Nodes:
    deadline = time.monotonic() + settings.timeout_seconds
    while True:
        channel = _connected(settings, family, address, secret, deadline)
        try:
            channel.send(encode(replace(mine, time=time.time())))
            welcome = _first_answer(settings, channel, deadline)
            if welcome is None:
                channel.close()
                if time.monotonic() > deadline:
                    raise EnvironmentLacks(
                        f"node {settings.node_rank} of the run is there already: give this one another --node-rank, or "
                        "end the other one"
                    )
                time.sleep(_LOOK_SECONDS)
                continue
            break
        except ChannelClosed as error:
            channel.close()
            raise EnvironmentLacks(
                f"node 0 went away while this node waited for the others ({error}): see what it says itself"
            ) from None
        except DocumentInvalid as error:
            channel.close()
            raise Misuse(
                f"node 0 speaks another protocol (its message {error}): install the same version of dure on all nodes"
            ) from None
        except BaseException as error:
            with suppress(ChannelClosed):
                channel.send(encode(refusal_of(error)))
            channel.close()
            raise
    nodes = Nodes(
        next(member for member in welcome.members if member.node_rank == settings.node_rank),
        welcome.members,
        {welcome.leader: channel},
        own_address=channel.own_address,
        fewest=settings.fewest,
        most=settings.num_nodes,
        leader=welcome.leader,
    )
    nodes.folder = welcome.folder
    return nodes


def _connected(settings: NodeSettings, family: int, address: Address, secret: bytes, deadline: float) -> Channel:
    refusals = 0
    while True:
        try:
            return connect(family, address, secret, timeout_seconds=_CONNECT_SECONDS)
        except HandshakeRefused as error:
            refusals += 1
            if refusals >= _MOST_REFUSALS:
                raise Misuse(
                    f"node 0 at {settings.rendezvous} has another secret than this node ({error}): copy node 0's "
                    "secret file here, or name the right one with --secret-file"
                ) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise EnvironmentLacks(
                    f"nothing answered at {settings.rendezvous} within {settings.timeout_seconds:g} s "
                    f"({error.strerror or error}): start node 0 there, and see that its port can be reached"
                ) from None
        time.sleep(_LOOK_SECONDS)


def _first_answer(settings: NodeSettings, channel: Channel, deadline: float) -> Welcome | None:
    """Return node 0's reply; None if this node has to try again."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        poll.poll(_LOOK_SECONDS * 1000)
        if (data := channel.receive_one()) is not None:  # further messages are handled once this node follows
            match decode(data):
                case Refused() as refused:
                    raise refused_error(refused)
                case Welcome() as welcome:
                    return welcome
                case Later():
                    return None
                case message:
                    raise DocumentInvalid(f"of kind {type(message).__name__} is no answer to a node that comes")
        # node 0 has its own timeout for this, and reports the missing nodes
        if time.monotonic() > deadline + settings.timeout_seconds:
            raise EnvironmentLacks(f"node 0 at {settings.rendezvous} says nothing: see what it is at")
