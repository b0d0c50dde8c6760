"""Where the launchers of one run on several hosts find each other and agree on what they start."""

import errno
import hashlib
import ipaddress
import json
import platform
import select
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dure.errors import DureError, EnvironmentLacks, Misuse, SpecInvalid
from dure.launch.channel import Address, Channel, ChannelClosed, Door, HandshakeRefused, knock
from dure.launch.nodes import Member, Nodes, refusal_of, refused_error
from dure.launch.secret import read_secret

PROTOCOL = 1
DEFAULT_PORT = 29400
"""torchrun's, for its own rendezvous."""
DEFAULT_TIMEOUT_SECONDS = 600.0
_LOOK_SECONDS = 0.2
_KNOCK_SECONDS = 5.0
_MOST_REFUSALS = 3
"""A door full of strangers may send an honest node away; more often it does not know the secret."""
_LONGEST_VALUE = 200


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """What a user says of several nodes."""

    num_nodes: int
    node_rank: int
    rendezvous: str
    """`host:port` of node 0."""
    secret_file: Path | None = None
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    allow_public_address: bool = False


def node_settings(
    *,
    nnodes: int,
    node_rank: int | None,
    rendezvous: str | None,
    secret_file: Path | None,
    timeout_seconds: float,
    allow_public_address: bool,
) -> NodeSettings | None:
    """Return what was said of several nodes, or None for a run on one.

    Raises:
        SpecInvalid: All that cannot be.
    """
    faults = []
    if nnodes < 1:
        faults.append(f"nnodes is {nnodes} but must be a whole number above 0")
    if timeout_seconds <= 0:
        faults.append(f"rendezvous_timeout is {timeout_seconds:g} but must be a number above 0")
    if nnodes == 1 and (node_rank or rendezvous is not None):
        faults.append("node_rank and rendezvous are for a run on several nodes: give --nnodes too, or leave them out")
    if nnodes > 1 and (node_rank is None or not 0 <= node_rank < nnodes):
        said = "not given" if node_rank is None else str(node_rank)
        faults.append(f"node_rank is {said} but must be 0 to {nnodes - 1}, another on each of the {nnodes} nodes")
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
        node_rank=node_rank,
        rendezvous=rendezvous,
        secret_file=secret_file,
        timeout_seconds=timeout_seconds,
        allow_public_address=allow_public_address,
    )


def split_address(text: str) -> tuple[str, int]:
    """Read `host`, `host:port` or `[IPv6]:port`.

    Raises:
        ValueError: It is none of these; says why.
    """
    if text.startswith("["):
        host, closing, rest = text[1:].partition("]")
        if not closing or (rest and not rest.startswith(":")):
            raise ValueError("that is no address")
        port = rest[1:] or str(DEFAULT_PORT)
    elif text.count(":") > 1:
        host, port = text, str(DEFAULT_PORT)
    else:
        host, _, port = text.partition(":")
        port = port or str(DEFAULT_PORT)
    if not host or any(letter.isspace() or letter == "/" for letter in host):
        raise ValueError("that is no address")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{port!r} is no port")
    return host, int(port)


def join(settings: NodeSettings, facts: Mapping[str, Any], num_ranks: int, *, compares_versions: bool = True) -> Nodes:
    """Meet the other nodes, and return all of them once all are there and agree.

    Args:
        settings: Who this node is, and where they meet.
        facts: What must be the same on all nodes, by its name in words.
        num_ranks: Ranks that this node starts.
        compares_versions: Whether versions of software are among these facts.

    Raises:
        Misuse: Nodes disagree, or this one may not meet the others so.
        EnvironmentLacks: A node did not come, or the address is not to be had here.
    """
    host, _port = split_address(settings.rendezvous)
    family, address = _resolved(settings)
    secret = read_secret(settings.secret_file, host=host, may_make=settings.node_rank == 0)
    me = Member(node_rank=settings.node_rank, host=socket.gethostname(), address="", num_ranks=num_ranks)
    mine = {"kind": "join", "num_nodes": settings.num_nodes, **asdict(me)}
    mine["facts"] = _all_facts(facts, with_versions=compares_versions)
    if settings.node_rank == 0:
        return _receive(settings, family, address, secret, me, mine)
    return _come(settings, family, address, secret, mine)


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
    # what was called comes first: where that differs, versions are not the news
    return {name: _short(value) for name, value in {**facts, **versions, **facts}.items()}


def _short(value: Any) -> Any:
    """Keep messages and sentences short: of what is long, its digest says whether it is the same."""
    text = json.dumps(value, default=str, sort_keys=True)
    if len(text) > _LONGEST_VALUE:
        return f"something with digest {hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return json.loads(text)


# --- addresses


def _resolved(settings: NodeSettings) -> tuple[int, Address]:
    """Look up the rendezvous address, and refuse one that everybody could reach."""
    host, port = split_address(settings.rendezvous)
    deadline = time.monotonic() + (0.0 if settings.node_rank == 0 else settings.timeout_seconds)
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            break
        except (socket.gaierror, UnicodeError) as error:  # names of pods appear some time after the pods
            if time.monotonic() >= deadline:
                raise Misuse(
                    f"the rendezvous host {host} is not known here ({getattr(error, 'strerror', error)}): give its "
                    "address, as 10.0.0.1:29400"
                ) from None
            time.sleep(_LOOK_SECONDS)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    numeric = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if numeric.is_unspecified:
        raise Misuse(
            f"the rendezvous {settings.rendezvous} names all interfaces: give the one address of node 0 at which the "
            "other nodes reach it"
        )
    if numeric.is_multicast:
        raise Misuse(f"the rendezvous {settings.rendezvous} is a multicast address: give node 0's own")
    if numeric.is_global and not settings.allow_public_address:
        raise Misuse(
            f"the rendezvous {settings.rendezvous} ({numeric}) is a public address, and gradients would travel "
            "unencrypted: use an address of a private network, or add --allow-public-address"
        )
    return family, address


def _own_addresses() -> list[str]:
    import psutil

    kinds = (socket.AF_INET, socket.AF_INET6)
    found = [
        one.address.partition("%")[0] for all_ in psutil.net_if_addrs().values() for one in all_ if one.family in kinds
    ]
    return [address for address in found if not ipaddress.ip_address(address).is_loopback]


# --- node 0


def _receive(
    settings: NodeSettings, family: int, address: Address, secret: bytes, me: Member, mine: Mapping[str, Any]
) -> Nodes:
    """Wait for all nodes; the door is closed when all are in, so that nobody else can knock during the run."""
    try:
        door = Door(family, address, secret)
    except OSError as error:
        raise _cannot_listen(settings, error) from None
    if ipaddress.ip_address(str(address[0])).is_loopback:
        _say(f"{settings.rendezvous} leads to {address[0]} here: only processes of this host can join")
    joined: dict[int, tuple[Member, Channel]] = {}
    unnamed: list[Channel] = []
    try:
        _wait_for_all(settings, door, joined, unnamed, mine)
        members = [
            replace(me, address=str(address[0])),
            *(joined[rank][0] for rank in sorted(joined)),
        ]
        for rank, (_member, channel) in joined.items():
            channel.send({"kind": "welcome", "members": [asdict(member) for member in members], "you": rank})
    except BaseException as error:
        reason = refusal_of(error)
        for channel in (*unnamed, *(channel for _, channel in joined.values())):
            with suppress(ChannelClosed):
                channel.send(reason)
            channel.close()
        raise
    finally:
        door.close()
    for channel in unnamed:  # it had proved itself and then said nothing
        channel.close()
    return Nodes(members[0], members, {rank: channel for rank, (_, channel) in joined.items()})


def _wait_for_all(
    settings: NodeSettings,
    door: Door,
    joined: dict[int, tuple[Member, Channel]],
    unnamed: list[Channel],
    mine: Mapping[str, Any],
) -> None:
    deadline = time.monotonic() + settings.timeout_seconds
    while len(joined) < settings.num_nodes - 1:
        if time.monotonic() > deadline:
            missing = [str(rank) for rank in range(1, settings.num_nodes) if rank not in joined]
            refused = f"; {door.num_refused} that came did not know the secret" if door.num_refused else ""
            raise EnvironmentLacks(
                f"node {', '.join(missing)} of {settings.num_nodes} did not come to {settings.rendezvous} within "
                f"{settings.timeout_seconds:g} s{refused}: start it there, or wait longer with --rendezvous-timeout"
            )
        unnamed += door.admit(_LOOK_SECONDS)
        for rank in [rank for rank, (_, channel) in joined.items() if _is_gone(channel)]:
            del joined[rank]  # its launcher was ended; it may come again
        for channel in unnamed[:]:
            try:
                messages = channel.receive()
            except ChannelClosed:
                channel.close()
                unnamed.remove(channel)
                continue
            if not messages:
                continue
            member = _checked(messages[0], mine, joined, channel)
            unnamed.remove(channel)
            joined[member.node_rank] = (member, channel)


def _is_gone(channel: Channel) -> bool:
    try:
        channel.receive()
    except ChannelClosed:
        channel.close()
        return True
    return False


def _checked(
    theirs: Mapping[str, Any],
    mine: Mapping[str, Any],
    joined: Mapping[int, tuple[Member, Channel]],
    channel: Channel,
) -> Member:
    """Compare what a node is about to run with what this one is.

    Raises:
        Misuse: They disagree; names the field and both values.
    """
    try:
        member = Member(
            node_rank=int(theirs["node_rank"]),
            host=str(theirs["host"])[:255],
            address=channel.peer_address,
            num_ranks=int(theirs["num_ranks"]),
            # but for the time that the message took
            clock_behind_seconds=time.time() - float(theirs["time"]),
        )
        num_nodes, facts = int(theirs["num_nodes"]), dict(theirs["facts"])
    except (KeyError, TypeError, ValueError):
        raise Misuse("a node speaks another protocol: install the same version of dure on all nodes") from None
    who = f"node {member.node_rank} ({member.host})"
    wanted = {"nnodes": mine["num_nodes"], **mine["facts"]}
    for name, value in {"nnodes": num_nodes, **facts}.items():
        if name not in wanted or wanted[name] != value:
            raise Misuse(
                f"nodes do not run the same: {name} is {wanted.get(name)} on node 0 and {value} on {who}; start all "
                "nodes with the same settings, code and versions"
            )
    if missing := [name for name in wanted if name not in ("nnodes", *facts)]:
        raise Misuse(
            f"nodes do not run the same: {missing[0]} is {wanted[missing[0]]} on node 0 and not given on {who}"
        )
    if member.node_rank == 0 or member.node_rank in joined or not 0 < member.node_rank < num_nodes:
        raise Misuse(
            f"two nodes have node_rank {member.node_rank} (one is {member.host} at {member.address}): give each node "
            f"another --node-rank, 0 to {num_nodes - 1}"
        )
    return member


def _cannot_listen(settings: NodeSettings, error: OSError) -> DureError:
    host, port = split_address(settings.rendezvous)
    if error.errno == errno.EADDRNOTAVAIL:
        own = ", ".join(_own_addresses()) or "none but loopback"
        return Misuse(
            f"the rendezvous host {host} is not this host, which is node 0 (its addresses: {own}): start node 0 on "
            f"{host}, or give an address of this host on all nodes"
        )
    if error.errno == errno.EADDRINUSE:
        return Misuse(
            f"port {port} of {host} is taken by another process: give another one in --rendezvous, on all nodes"
        )
    return EnvironmentLacks(f"node 0 cannot listen on {settings.rendezvous} ({error.strerror}): give another port")


# --- the other nodes


def _come(settings: NodeSettings, family: int, address: Address, secret: bytes, mine: dict[str, Any]) -> Nodes:
    deadline = time.monotonic() + settings.timeout_seconds
    channel = _knocked(settings, family, address, secret, deadline)
    try:
        channel.send({**mine, "time": time.time()})
        welcome = _first_answer(settings, channel, deadline)
        members = [Member(**member) for member in welcome["members"]]
    except ChannelClosed as error:
        channel.close()
        raise EnvironmentLacks(
            f"node 0 went away while this node waited for the others ({error}): see what it says itself"
        ) from None
    except BaseException as error:
        with suppress(ChannelClosed):
            channel.send(refusal_of(error))
        channel.close()
        raise
    return Nodes(members[settings.node_rank], members, {0: channel}, own_address=channel.own_address)


def _knocked(settings: NodeSettings, family: int, address: Address, secret: bytes, deadline: float) -> Channel:
    refusals = 0
    while True:
        try:
            return knock(family, address, secret, timeout_seconds=_KNOCK_SECONDS)
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


def _first_answer(settings: NodeSettings, channel: Channel, deadline: float) -> dict[str, Any]:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for message in channel.receive() if poll.poll(_LOOK_SECONDS * 1000) else ():
            if message.get("kind") == "refused":
                raise refused_error(message)
            return message
        # node 0 has its own clock for this, and says who is missing
        if time.monotonic() > deadline + settings.timeout_seconds:
            raise EnvironmentLacks(f"node 0 at {settings.rendezvous} says nothing: see what it is at")


def _say(text: str) -> None:
    with suppress(OSError):
        print(f"dure: {text}", file=sys.stderr, flush=True)
