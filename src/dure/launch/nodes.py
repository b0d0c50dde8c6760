"""The other launchers of a run on several hosts, while it goes on: what they say, whether they are there, how it ends.

Node 0 is the middle of a star: what one node says and all must know, it passes on. Nothing here waits for a node that
does not answer longer than `SILENCE_SECONDS`.
"""

import json
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from dure.errors import FAILED, DureError, EnvironmentLacks, Interrupted, Misuse, WorkerFailed
from dure.frames import Frame
from dure.launch.channel import MESSAGE_LIMIT_BYTES, Channel, ChannelClosed
from dure.launch.verdict import WorkerEnd

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 15.0
"""Without a word for so long, a node counts as lost."""
_PREPARATION_SECONDS = 600.0
"""Before the ranks run, a launcher that imports says nothing for a while."""
_FLUSH_SECONDS = 5.0
_LONGEST_TEXT = 3000
"""Of a traceback that travels; the whole one is in its own node's log."""
_MOST_FRAMES = 32


@dataclass(frozen=True, kw_only=True)
class Member:
    """One node of a run."""

    node_rank: int
    host: str
    address: str
    """Its own, on the way to node 0; for node 0 the rendezvous'."""
    num_ranks: int
    clock_behind_seconds: float = 0.0
    """Behind node 0's clock."""

    def __str__(self) -> str:
        """Name it for people."""
        return f"node {self.node_rank} ({self.host}, {self.address})"


class StoppedByPeer(BaseException):
    """Another node was asked to stop while this one had not started its ranks."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__("another node was asked to stop")


class Nodes:
    """All nodes of a run, as one of them sees them."""

    def __init__(
        self, me: Member, members: Sequence[Member], channels: dict[int, Channel], own_address: str | None = None
    ) -> None:
        self.me = me
        self.members = tuple(members)
        self.own_address = own_address or me.address
        self.world_size = sum(member.num_ranks for member in members)
        self.first_rank = sum(member.num_ranks for member in members[: me.node_rank])
        self.lost: str | None = None
        """The sentence about a node that went away."""
        self.refusal: DureError | None = None
        """Why another node does not go on."""
        self.endings: set[str] = set()
        """What others said of their first rank that ended: `failed`, `stopped` or `ended`."""
        self._channels = channels
        """Of node 0: to each other node; of the others: to node 0."""
        self._signals: list[tuple[int, int]] = []
        """Number, and the how many-th it was where it came."""
        self._told_signals = 0
        self._told_ending = False
        self._is_running = False
        self._gathered: dict[int, list[Any]] = {}
        self._answers: list[list[Any]] = []
        self._ends: dict[int, list[WorkerEnd]] = {member.node_rank: [] for member in members}
        self._done: set[int] = set()
        self._looks: list[tuple[int, Mapping[str, Any]]] = []
        self._is_over = False
        self._next_beat = 0.0

    @property
    def why_lost(self) -> str | None:
        """Return the sentence about a node that went away or did not go on."""
        return str(self.refusal) if self.lost is None and self.refusal is not None else self.lost

    @property
    def interface(self) -> str | None:
        """Return the network interface that has this node's address, as gloo and NCCL want it named."""
        import psutil

        for name, addresses in psutil.net_if_addrs().items():
            if any(one.address.partition("%")[0] == self.own_address for one in addresses):
                return str(name)
        return None

    def node_of(self, rank: int) -> Member:
        """Return the node that a rank runs on."""
        for member in self.members:
            if rank < member.num_ranks:
                return member
            rank -= member.num_ranks
        raise IndexError(rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Leave; the others are told if it is because this node does not go on."""
        if error is not None and not self._is_over and self.refusal is None:
            self._send_all(refusal_of(error))
        self.close()

    # --- what all say to all

    def gather(self, mine: Any) -> list[Any]:
        """Return what every node said, by node; all nodes must ask the same number of times.

        Raises:
            DureError: A node went away, or does not go on.
            StoppedByPeer: A node was asked to stop.
        """
        deadline = time.monotonic() + _PREPARATION_SECONDS
        if self.me.node_rank:
            self._send(0, {"kind": "gather", "value": mine})
        while True:
            if self.refusal is not None:
                raise self.refusal
            if self.lost is not None:
                raise WorkerFailed(self.lost)
            if self._signals:
                raise StoppedByPeer(self._signals[0][0])
            if self._answers:
                return self._answers.pop(0)
            if not self.me.node_rank and all(self._gathered.get(rank) for rank in self._channels):
                values = [mine, *(self._gathered[rank].pop(0) for rank in sorted(self._channels))]
                self._send_all({"kind": "gathered", "values": values})
                return values
            if time.monotonic() > deadline:
                raise WorkerFailed(f"nodes did not get ready within {_PREPARATION_SECONDS:g} s: see what each says")
            self._sleep(0.2)
            self.pump()

    def watch(self) -> None:
        """From here on every node has to say something each second."""
        self._is_running = True
        for channel in self._channels.values():
            channel.last_heard = time.monotonic()

    def begin_anew(self) -> None:
        """Go back to before ranks ran, when all have heard how they ended: they may gather again, and run others."""
        self._is_over = self._is_running = self._told_ending = False
        self.endings.clear()
        self._done.clear()
        self._ends = {member.node_rank: [] for member in self.members}

    # --- while ranks run

    @property
    def descriptors(self) -> list[int]:
        """What to wait on for a word of the others."""
        return [channel.fileno() for channel in self._channels.values()]

    def pump(self) -> None:
        """Hear what has come, say that this node is there, and note who is not."""
        for rank in list(self._channels):
            try:
                channel = self._channels[rank]
                channel.flush()
                for message in channel.receive():
                    self._hear(rank, message)
                silent = time.monotonic() - channel.last_heard
                if self._is_running and silent > SILENCE_SECONDS:
                    raise ChannelClosed(f"nothing was heard of it for {silent:.0f} s")
            except ChannelClosed as error:
                self._lose(rank, str(error))
            except (KeyError, TypeError, ValueError, IndexError):
                self._lose(rank, "it said what makes no sense")
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_SECONDS
            self._send_all({"kind": "beat"})

    def exchange_signals(self, received: list[int]) -> list[int]:
        """Tell the others of stop signals that this node got, and return those of theirs that are new here.

        One wish to stop may reach all launchers at once, from a cluster's scheduler: the first signal of each is one
        wish, and only the second that one of them gets is a second wish.

        Args:
            received: This node's so far; what is new is added.
        """
        for ordinal in range(self._told_signals + 1, len(received) + 1):
            self._send_all({"kind": "signal", "number": int(received[ordinal - 1]), "ordinal": ordinal})
        heard, self._signals = self._signals, []
        fresh = []
        for number, ordinal in heard:
            if ordinal > len(received):
                received.append(number)
                fresh.append(number)
        self._told_signals = len(received)  # whoever got it has told all
        return fresh

    def tell_ending(self, why: str) -> None:
        """Tell the others, once, that a rank of this node has ended: theirs have only some time left."""
        if not self._told_ending:
            self._told_ending = True
            self._send_all({"kind": "ending", "why": why})

    def take_looks(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Return what nodes said of looking at ranks that hang, each once, with the node; see `joint_look.py`."""
        taken, self._looks = self._looks, []
        return taken

    def send_to_first(self, message: dict[str, Any]) -> None:
        """Send to node 0; a message that is too long stays here."""
        with suppress(ValueError):
            self._send(0, message)

    def send_to_all(self, message: dict[str, Any]) -> None:
        """Send to all nodes that this one has a connection with."""
        with suppress(ValueError):
            self._send_all(message)

    # --- the end

    def finish(self, ends: Sequence[WorkerEnd], tick: Callable[[], bool]) -> list[WorkerEnd]:
        """Say how this node's ranks ended, and return how all of all nodes did.

        Args:
            ends: This node's.
            tick: Called while waiting for the others; False gives up.
        """
        self._ends[self.me.node_rank] = list(ends)
        if self.me.node_rank:
            for end in ends:
                self._send(0, {"kind": "end", "end": _end_to_json(end)})
            self._send(0, {"kind": "done"})
        while not self._is_over and tick():
            if self.me.node_rank == 0 and self._done >= self._channels.keys():
                self._tell_outcome()
                break
            if self.refusal is not None or (self.me.node_rank and self.lost is not None):
                break
            self._sleep(0.1)
            self.pump()
        return [end for rank in sorted(self._ends) for end in self._ends[rank]]

    def _tell_outcome(self) -> None:
        for other in self._channels:
            for rank, ends in self._ends.items():
                for end in ends if rank != other else ():
                    self._send(other, {"kind": "end", "node_rank": rank, "end": _end_to_json(end)})
        self._send_all({"kind": "over"})
        self._is_over = True

    def close(self) -> None:
        """Say what is still to be said, and leave."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while any(channel.has_unsent for channel in self._channels.values()) and time.monotonic() < deadline:
            for rank, channel in list(self._channels.items()):
                try:
                    channel.flush()
                except ChannelClosed:
                    del self._channels[rank]
            time.sleep(0.01)
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    # --- messages

    def _hear(self, rank: int, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "gather":
            self._gathered.setdefault(rank, []).append(message["value"])
        elif kind == "gathered":
            self._answers.append(list(message["values"]))
        elif kind == "signal":
            self._signals.append((int(message["number"]), int(message["ordinal"])))
            self._pass_on(rank, message)
        elif kind == "ending":
            self.endings.add(str(message["why"]))
            self._pass_on(rank, message)
        elif kind == "end":
            whose = rank if self.me.node_rank == 0 else int(message["node_rank"])
            behind = self.members[whose].clock_behind_seconds if self.me.node_rank == 0 else 0.0
            self._ends[whose].append(_end_from_json(message["end"], str(self.members[whose]), behind))
        elif kind == "done":
            self._done.add(rank)
        elif kind == "over":
            self._is_over = True
        elif kind == "lost":
            self.lost = self.lost or str(message["text"])
        elif kind in ("look", "state", "looked", "hang"):
            self._looks.append((rank, message))
        elif kind == "refused":
            self.refusal = self.refusal or refused_error(message)
            self._pass_on(rank, message)

    def _pass_on(self, rank: int, message: Mapping[str, Any]) -> None:
        if self.me.node_rank == 0:
            self._send_all(dict(message), but=rank)

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        if rank not in self._channels:
            return
        try:
            self._channels[rank].send(message)
        except ChannelClosed as error:
            self._lose(rank, str(error))

    def _send_all(self, message: dict[str, Any], but: int | None = None) -> None:
        for rank in [rank for rank in self._channels if rank != but]:
            self._send(rank, message)

    def _lose(self, rank: int, why: str) -> None:
        """Take note that a node is gone, and tell the others."""
        channel = self._channels.pop(rank, None)
        if channel is None:
            return
        channel.close()
        if self._is_over:
            return
        if self.lost is None and self.refusal is None:
            self.lost = (
                f"{self.members[rank]} is gone ({why}): its launcher was ended, its host went down, or the network "
                "between the nodes is cut"
            )
            self._send_all({"kind": "lost", "text": self.lost})

    def _sleep(self, most_seconds: float) -> None:
        poll = select.poll()
        for descriptor in self.descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll(most_seconds * 1000)


def refusal_of(error: BaseException) -> dict[str, Any]:
    """Return the message by which a node tells the others why it does not go on."""
    if isinstance(error, DureError):
        return {"kind": "refused", "message": str(error)[:_LONGEST_TEXT], "code": error.exit_code}
    what = "was stopped" if isinstance(error, KeyboardInterrupt) else f"ended by {type(error).__name__}"
    return {"kind": "refused", "message": f"the launcher on {socket.gethostname()} {what}", "code": FAILED}


def refused_error(message: Mapping[str, Any]) -> DureError:
    """Return what another node refused, as an error of this one."""
    text, code = str(message.get("message")), message.get("code")
    if code == Misuse.exit_code:
        return Misuse(text)
    if code == EnvironmentLacks.exit_code:
        return EnvironmentLacks(text)
    return WorkerFailed(text) if code == FAILED else Interrupted(text, int(code or FAILED))


def _end_to_json(end: WorkerEnd) -> dict[str, Any]:
    """Return it as a message of which the task decides how long its texts are, and the channel how long they may be."""
    told = {**asdict(end), "failure": _cut(end.failure, _LONGEST_TEXT), "crash": []}
    if len(json.dumps(told)) > MESSAGE_LIMIT_BYTES // 2:
        told["failure"] = _cut(end.failure, _LONGEST_TEXT // 10)
    return {**told, "crash": [asdict(frame) for frame in end.crash[:_MOST_FRAMES]]}


def _cut(value: Any, longest: int) -> Any:
    if isinstance(value, Mapping):
        return {name: _cut(part, longest) for name, part in value.items()}
    return value[:longest] if isinstance(value, str) else value


def _end_from_json(told: Mapping[str, Any], node: str, clock_behind_seconds: float) -> WorkerEnd:
    """Rebuild how a rank of another node ended, in this node's time."""
    failure = told["failure"]
    if failure is not None:
        failure = {**failure, "time": float(failure["time"]) + clock_behind_seconds}
    crash = tuple(Frame(**frame) for frame in told["crash"])
    time_ = float(told["time"]) + clock_behind_seconds
    return WorkerEnd(**{**told, "failure": failure, "crash": crash, "time": time_, "node": told["node"] or node})
