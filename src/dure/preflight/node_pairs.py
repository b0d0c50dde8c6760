"""Trial connections between nodes: a listener on each, and a connection to it from every other.

Both ends of each connection are authenticated by the run's secret before anything is used (`launch/nodes/channel.py`).
Then short messages measure the difference of the two clocks, and a long one shows whether large packets arrive.
"""

import errno
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace

from dure.checked import Count, Number, Rank, Text, Time, record_from_json
from dure.documents import DocumentInvalid
from dure.launch.nodes.channel import Address, Channel, ChannelClosed, ChannelListener, HandshakeRefused, connect
from dure.launch.nodes.peers import Nodes
from dure.preflight.node_records import record_of_node

PATIENCE_SECONDS = 5.0
"""Timeout of each attempt; they run concurrently."""
_NUM_PINGS = 8
_LONG_MESSAGE = 48_000
"""Characters that are sent and returned: dozens of packets of any size, and below the limit of a message."""
_LOOK_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Trial of one link between two nodes, from the one that opens the connection."""

    source: Rank
    target: Rank
    address: Text
    """Address of the target."""
    cause: Text | None = None
    """Cause of the failure: `refused`, `silent`, `no route`, `forbidden`, `stranger`, `stalled`, `closed` or `other`;
    None if the connection was made."""
    said: Text = ""
    """System's message for the cause."""
    round_trip_seconds: Number | None = None
    ahead_seconds: Number | None = None
    """Seconds by which the target's clock is ahead of the source's, to within half of the round trip."""


@dataclass(frozen=True, kw_only=True)
class Ping:
    """Request for the time on the other node."""

    text: Text = ""
    """Text to return: a long one shows whether large packets arrive."""


@dataclass(frozen=True, kw_only=True)
class Pong:
    """Reply to a ping."""

    time: Time
    """Time by the clock of the replying node."""
    text: Text = ""
    """Text of the ping."""


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Address at which a node listens for the others' trial connections."""

    address: Text
    port: Count | None = None
    """Port; None if it cannot listen."""
    said: Text = ""
    """System's message for the reason why it cannot."""


def try_pairs(nodes: Nodes, secret: bytes, *, clock: Callable[[], float] = time.time) -> list[Attempt]:
    """Try every link; every node calls this, and all get all results.

    Args:
        nodes: All nodes.
        secret: Secret of the run.
        clock: Clock of this node.

    Raises:
        DureError: A node was lost meanwhile.
    """
    address, listener = nodes.own_address, None
    try:
        listener = ChannelListener(*_resolved(address, 0), secret)
        here = Listening(address=address, port=int(listener.address[1]))
    except OSError as error:
        here = Listening(address=address, said=error.strerror or str(error))
    listening = [record_of_node(Listening, record, rank) for rank, record in enumerate(nodes.gather(asdict(here)))]
    if listener is None:
        return _shared(nodes, _tried(nodes.me.node_rank, listening, secret, clock))
    with closing(listener):
        is_done = threading.Event()
        answerer = threading.Thread(target=_answer, args=(listener, is_done, clock), name="preflight door")
        answerer.start()
        try:
            return _shared(nodes, _tried(nodes.me.node_rank, listening, secret, clock))
        finally:
            is_done.set()
            answerer.join()


def _shared(nodes: Nodes, mine: Sequence[Attempt]) -> list[Attempt]:
    """Exchange the results: a node sends them after all its trials, so afterwards no listener is needed any more."""
    found: list[Attempt] = []
    for rank in range(len(nodes.members)):
        # one node at a time, because the texts of all would not fit into one message
        results = nodes.gather([asdict(attempt) for attempt in mine] if rank == nodes.me.node_rank else None)[rank]
        found += [record_of_node(Attempt, attempt, rank) for attempt in results]
    return found


def _resolved(address: str, port: int) -> tuple[int, Address]:
    family, _, _, _, resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return family, resolved


def _tried(source: int, listening: Sequence[Listening], secret: bytes, clock: Callable[[], float]) -> list[Attempt]:
    """Connect to the listeners of all other nodes, concurrently."""
    found: dict[int, Attempt] = {}

    def try_one(target: int, there: Listening) -> None:
        attempt = Attempt(source=source, target=target, address=there.address)
        if there.port is None:
            found[target] = replace(attempt, cause="closed", said=there.said)
        else:
            found[target] = _attempted(attempt, there.port, secret, time.monotonic() + PATIENCE_SECONDS, clock)

    threads = [
        threading.Thread(target=try_one, args=(target, there), name=f"preflight to node {target}")
        for target, there in enumerate(listening)
        if target != source
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[target] for target in sorted(found)]


def _attempted(attempt: Attempt, port: int, secret: bytes, deadline: float, clock: Callable[[], float]) -> Attempt:
    try:
        family, address = _resolved(attempt.address, port)
        channel = connect(family, address, secret, timeout_seconds=max(0.1, deadline - time.monotonic()))
    except OSError as error:
        cause, reason = _cause(error)
        return replace(attempt, cause=cause, said=reason)
    with closing(channel):
        try:
            round_trip, ahead = _clocks(channel, deadline, clock)
            _asked(channel, Ping(text="x" * _LONG_MESSAGE), deadline)
        except TimeoutError:
            return replace(attempt, cause="stalled", said="timed out")
        except ChannelClosed as error:
            return replace(attempt, cause="stalled", said=str(error))
        except DocumentInvalid as error:
            return replace(attempt, cause="stalled", said=f"its answer {error}")
    return replace(attempt, round_trip_seconds=round_trip, ahead_seconds=ahead)


def _cause(error: OSError) -> tuple[str, str]:
    """Return the reason why a node does not reply."""
    reason = error.strerror or str(error)
    if isinstance(error, HandshakeRefused):
        return "stranger", reason
    if isinstance(error, ConnectionRefusedError):
        return "refused", reason
    if isinstance(error, TimeoutError):
        return "silent", "timed out"
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN):
        return "no route", reason
    if error.errno in (errno.EPERM, errno.EACCES):
        return "forbidden", reason
    return ("stranger" if isinstance(error, ChannelClosed) else "other"), reason


def _clocks(channel: Channel, deadline: float, clock: Callable[[], float]) -> tuple[float, float]:
    """Return the shortest round trip of several, and the other clock's lead measured in it (Cristian 1989)."""
    best = (float("inf"), 0.0)
    for _ in range(_NUM_PINGS):
        before = clock()
        theirs = _asked(channel, Ping(), deadline).time
        after = clock()
        best = min(best, (after - before, theirs - (before + after) / 2))
    return best


def _asked(channel: Channel, question: Ping, deadline: float) -> Pong:
    """Send a ping and return the reply.

    Raises:
        TimeoutError: It does not arrive in time.
        ChannelClosed: The other side is gone.
        DocumentInvalid: It is not a reply.
    """
    channel.send(asdict(question))
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while time.monotonic() < deadline:
        channel.flush()
        # unsent data waits for buffer space, for which this does not poll
        most = _LOOK_SECONDS if channel.has_unsent else max(0.0, deadline - time.monotonic())
        if poll.poll(most * 1000) and (message := channel.receive_one()) is not None:
            return record_from_json(Pong, message)
    raise TimeoutError


def _answer(listener: ChannelListener, is_done: threading.Event, clock: Callable[[], float]) -> None:
    """Admit peers that know the secret, and reply to them, until all nodes have tried all links."""
    guests: list[Channel] = []
    try:
        while not is_done.is_set():
            guests += listener.admit(0.0 if guests else _LOOK_SECONDS)
            poll = select.poll()
            for guest in guests:
                poll.register(guest, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(1)} if guests else set()
            guests = [guest for guest in guests if _answered(guest, guest.fileno() in ready, clock)]
    finally:
        for guest in guests:
            guest.close()


def _answered(guest: Channel, has_data: bool, clock: Callable[[], float]) -> bool:
    """Reply to a guest's requests; False if it has left."""
    with suppress(ValueError):  # it is no ping, or the reply would be too long
        try:
            guest.flush()
            for message in guest.receive() if has_data else ():
                guest.send(asdict(Pong(time=clock(), text=record_from_json(Ping, message).text)))
            return True
        except ChannelClosed:
            pass
    guest.close()
    return False
