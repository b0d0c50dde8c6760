"""Other launchers of a multi-node run in progress: their messages, their presence, and their ends.

One node leads, node 0 unless it was lost, and is the centre of a star: it passes on messages of one node to all others.
A run has rounds: all ranks of the present nodes start together and end together. Nothing here waits for an unresponsive
node for longer than `silence_seconds`.
"""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from dure.documents import DocumentInvalid
from dure.errors import DureError, WorkerFailed
from dure.failures.verdict import WorkerEnd
from dure.launch.nodes import messages
from dure.launch.nodes.admission import JoinListener
from dure.launch.nodes.channel import Channel, ChannelClosed
from dure.launch.nodes.connections import Links
from dure.launch.nodes.leader_lease import Lease
from dure.launch.nodes.member import Member, StoppedByPeer
from dure.launch.nodes.membership import Membership
from dure.launch.nodes.messages import Message, decode, end_from_json, end_to_json, refusal_of, refused_error
from dure.launch.nodes.round_state import RoundNews
from dure.process.round_orders import RoundPlan

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 15.0
"""Seconds of silence after which a node counts as lost, in a run that needs all."""
LOST_SECONDS = 13.0
"""The same in a run that continues without it: the whole must be over within 15 s."""
LEADER_LOST_SECONDS = 10.5
"""Seconds of silence of the leader after which a node's ranks are ended: before the others continue without them.

If a cut blocks one direction only, that node receives one more beat than the leader, and the leader one less: the two
limits are more than two beats apart.
"""
_PREPARATION_SECONDS = 600.0
"""Limit in seconds before the ranks run: a launcher that is importing sends nothing for a while."""


class Nodes(Membership, Links):
    """All nodes of a run, as known to one of them."""

    def __init__(
        self,
        me: Member,
        members: Sequence[Member],
        channels: dict[int, Channel],
        own_address: str | None = None,
        *,
        fewest: int | None = None,
        most: int | None = None,
        reception: JoinListener | None = None,
        leader: int = 0,
    ) -> None:
        """Take over the connections of nodes that have met.

        Args:
            me: This node.
            members: All nodes that are present, including this one.
            channels: On the leader: channels to the other nodes; on these: the one to the leader.
            own_address: Address on the route to the leader.
            fewest: Minimum number of nodes; the run is elastic if it is less than `most`.
            most: Maximum number of nodes.
            reception: Listener for nodes that join during the run, on the leader.
            leader: Node rank of the leader.
        """
        Membership.__init__(self, me, members, own_address=own_address, fewest=fewest, most=most, leader=leader)
        Links.__init__(self, channels)
        self.reception = reception
        self.lease: Lease | None = None
        """Lease by which nodes without a connection agree on the leader; None before there is a run folder."""
        self.round = -1
        """Number of the last round whose ranks were started here."""
        self.lost: str | None = None
        """Sentence about a lost node, if the run does not continue without it."""
        self.refusal: DureError | None = None
        """Reason why another node does not continue."""
        self.over: messages.Over | None = None
        """Final message of the leader; None while the run goes on."""
        self.is_under_way = False
        """True once the nodes have met in the run's folder; from then on, the run can continue without a node if enough
        are left.
        """
        self.has_lost_leader = False
        self.is_new_leader = self.is_outdated = False
        """`is_new_leader`: this node has taken the lead and begun no round. `is_outdated`: a node joined that has
        continued for longer.
        """
        self.folder: str | None = None
        """Folder of the run, if this node joined a run in progress."""
        self.silence_seconds: float | None = None
        """Seconds of silence after which a node is lost; None for `SILENCE_SECONDS`, or less if the run can continue
        without it.
        """
        self.next_round: messages.Round | None = None
        """Leader's message about the next round; None if there is none yet."""
        self.news = RoundNews()
        self._signals: list[tuple[int, int]] = []
        """Stop signals as pairs: the signal's number, and its ordinal on the node that received it."""
        self._num_sent_signals = 0
        self.is_stopping = False
        """True once a stop signal has arrived: ranks are not ended any more for joining nodes."""
        self._is_running = False
        self._gathered: dict[int, list[Any]] = {}
        self._answers: list[list[Any]] = []
        self.ready: set[int] = set()
        """Nodes that have imported what their ranks need."""
        self._next_beat = self._pumped_at = 0.0

    @classmethod
    def alone(cls, num_ranks: int) -> Self:
        """Return the one node of a run on one host, which leads and has no peers."""
        me = Member(node_rank=0, host=socket.gethostname(), address="127.0.0.1", num_ranks=num_ranks)
        return cls(me, [me], {})

    @property
    def is_over(self) -> bool:
        """Return whether the leader has announced the end."""
        return self.over is not None

    @property
    def why_lost(self) -> str | None:
        """Return the sentence about a node that is lost or does not continue."""
        return str(self.refusal) if self.lost is None and self.refusal is not None else self.lost

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Leave; the others are informed if it is because this node does not continue."""
        goes_on_without = self.is_elastic and self.is_under_way
        if error is not None and not self.is_over and self.refusal is None and not goes_on_without:
            self.send_to_all(refusal_of(error))
        self.close()

    # --- exchange among all nodes

    def gather(self, mine: Any) -> list[Any]:
        """Return the values of all nodes, by node; all nodes must call this the same number of times.

        Raises:
            DureError: A node is lost, or does not continue.
            StoppedByPeer: A node was asked to stop.
        """
        deadline = time.monotonic() + _PREPARATION_SECONDS
        if not self.is_leader:
            self.send(self.leader, messages.Gather(value=mine))
        while True:
            if self.refusal is not None:
                raise self.refusal
            if self.lost or self.news.interrupted_because or self.has_lost_leader:
                raise WorkerFailed(self.lost or self.news.interrupted_because or "the leader of the run is gone")
            if self._signals:
                raise StoppedByPeer(self._signals[0][0])
            if self._answers:
                return self._answers.pop(0)
            if self.is_leader and all(self._gathered.get(rank) for rank in self._channels):
                values = [mine, *(self._gathered[rank].pop(0) for rank in sorted(self._channels))]
                self.send_to_all(messages.Gathered(values=tuple(values)))
                return values
            if time.monotonic() > deadline:
                raise WorkerFailed(f"nodes did not get ready within {_PREPARATION_SECONDS:g} s: see what each says")
            self.sleep(0.2)
            self.pump()

    def watch(self) -> None:
        """Expect a message from every node each second from now on."""
        if not self._is_running:
            self._is_running = True
            for channel in self._channels.values():
                channel.last_received = time.monotonic()

    # --- rounds

    def open_round(self, port: int, plan: RoundPlan) -> None:
        """Announce the next round and its plan to all nodes, on the leader."""
        self.round += 1
        self.is_new_leader = self.is_outdated = False
        message = messages.Round(number=self.round, port=port, members=self.members, plan=plan)
        here = {member.node_rank for member in self.members}
        for rank in [rank for rank in self._channels if rank in here]:
            self.send(rank, message)
        self.news = RoundNews()
        self.watch()

    def enter_round(self) -> messages.Round:
        """Apply the leader's message about the next round."""
        message, self.next_round = self.next_round, None
        assert message is not None
        self.round = message.number
        self.watch()
        return message

    def interrupt_round(self, text: str) -> None:
        """End this round on all nodes, so that the next one begins with the nodes present then."""
        if self.news.interrupted_because is None:
            self.news.interrupted_because = text
            if self.is_leader:
                self.send_to_all(messages.Lost(text=text, is_fatal=False))

    def finish_round(
        self, ends: Sequence[WorkerEnd], steps: Mapping[int, int], tick: Callable[[], bool], *, has_snapshots: bool
    ) -> None:
        """Report how this node's ranks ended; the leader waits for all present nodes.

        Args:
            ends: Ends of this node's ranks.
            steps: Step of each of its ranks.
            tick: Called while waiting; False gives up.
            has_snapshots: Whether its ranks have left snapshots in memory.
        """
        self.news.ends_of[self.me.node_rank] = list(ends)
        self.news.steps.update(steps)
        if has_snapshots:
            self.news.with_snapshots.add(self.me.node_rank)
        if not self.is_leader:
            for end in ends:
                self.send(self.leader, messages.End(end=end_to_json(end)))
            self.send(self.leader, messages.Done(steps=steps, has_snapshots=has_snapshots))
            return
        while tick() and not self.news.done >= self._others_of_round() and self.refusal is None:
            self.sleep(0.1)
            self.pump()

    def _others_of_round(self) -> set[int]:
        """Return the node ranks of the other nodes that are still in this round.

        One that was lost and has joined again is not: it waits for the next round, and reports nothing of this one.
        """
        joined = set() if self.reception is None else self.reception.waiting.keys()
        return {member.node_rank for member in self.members} & self._channels.keys() - joined

    def send_outcome(self, refusal: str | None) -> None:
        """Send all nodes the ends of all ranks, and the end of the run; on the leader."""
        for other in list(self._channels):
            for rank, ends in self.news.ends_of.items():
                for end in ends if rank != other else ():
                    self.send(other, messages.End(node_rank=rank, end=end_to_json(end)))
        self.over = messages.Over(refusal=refusal)
        self.send_to_all(self.over)

    def reset(self) -> None:
        """Return to the state before ranks ran, once all know how they ended: they may gather again, and run others."""
        self.is_under_way = self._is_running = False
        self.next_round = self.over = None
        self.ready.clear()
        self.news = RoundNews()

    # --- while ranks run

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors to wait on for messages of the others."""
        own = super().descriptors
        return own if self.reception is None else [*own, *self.reception.descriptors]

    def pump(self) -> None:
        """Receive messages, send beats, detect lost nodes, and admit new ones."""
        now, before, self._pumped_at = time.monotonic(), self._pumped_at, time.monotonic()
        if self._is_running and before and now - before > self._patience():
            # this host was frozen: to the others it is lost, and their messages are outdated
            for rank in list(self._channels):
                self._lose(rank, f"this host stood still for {now - before:.0f} s")
        for rank in list(self._channels):
            try:
                channel = self._channels[rank]
                channel.flush()
                for message in channel.receive():
                    self._handle(rank, decode(message))
                silent = time.monotonic() - channel.last_received
                is_importing = self.is_leader and self.is_elastic and rank not in self.ready
                if self._is_running and silent > self._patience() and not is_importing:
                    raise ChannelClosed(f"nothing was heard of it for {silent:.0f} s")
            except ChannelClosed as error:
                self._lose(rank, str(error))
            except DocumentInvalid as error:
                self._lose(rank, f"its message {error}")
            except (KeyError, TypeError, ValueError, StopIteration):
                self._lose(rank, "it said what makes no sense")
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_SECONDS
            self.send_to_all(messages.Beat())
        if self.lease is not None and not self.is_leader and self.is_one_quiet:
            self.lease.unchanged_seconds()  # watched from now on, so that it is known sooner whether the leader lives
        if self.lease is not None and self.is_leader:
            self.lease.renew(self.round)
            if self.lease.is_deposed and self.news.interrupted_because is None:
                self.news.interrupted_because = "another node has taken the lead, for nothing was seen of this one"
        if self.reception is not None and self.is_leader:
            self.reception.let_in(self)

    def _patience(self) -> float:
        if self.silence_seconds is not None:
            return self.silence_seconds
        if not self.is_elastic:
            return SILENCE_SECONDS
        return LOST_SECONDS if self.is_leader else LEADER_LOST_SECONDS

    def exchange_signals(self, received: list[int]) -> list[int]:
        """Send the others the stop signals of this node, and return new ones of theirs.

        A cluster's scheduler may send one stop request to all launchers at once. So the first signal of each launcher
        is one request, and only the second signal at one of them is a second request.

        Args:
            received: Signals of this node so far; new ones are appended.
        """
        for ordinal in range(self._num_sent_signals + 1, len(received) + 1):
            self.send_to_all(messages.Signal(number=int(received[ordinal - 1]), ordinal=ordinal))
        arrived, self._signals = self._signals, []
        fresh = []
        for number, ordinal in arrived:
            if ordinal > len(received):
                received.append(number)
                fresh.append(number)
        self._num_sent_signals = len(received)  # the node that received it has sent it to all
        self.is_stopping = bool(received)
        return fresh

    def send_signal(self, number: int) -> None:
        """Inform the others of a stop signal to a rank of this node, but not to this launcher: the first request."""
        self.send_to_all(messages.Signal(number=int(number), ordinal=1))

    def send_ending(self, why: str) -> None:
        """Inform the others, once, that a rank of this node has ended: theirs have only limited time left."""
        if not self.news.has_sent_ending:
            self.news.has_sent_ending = True
            self.send_to_all(messages.Ending(why=why))

    def drop_all(self) -> None:
        """Close all connections, and stop listening."""
        super().drop_all()
        if self.reception is not None:
            self.reception.close()
            self.reception = None

    # --- nodes that join and leave

    def add(self, rank: int, channel: Channel) -> None:
        """Add a node that has joined, on the leader; it takes part in the next round once it is ready."""
        channel.last_received = time.monotonic()
        self._channels[rank] = channel

    def is_known(self, rank: int) -> bool:
        """Return whether there is a node with that rank."""
        return rank == self.me.node_rank or rank in self._channels

    def yield_to(self, round_number: int) -> None:
        """Record, as a new leader, that a joining node has continued for longer than this one."""
        self.round, self.is_outdated = round_number, True

    def follow(self, channel: Channel, leader: int) -> None:
        """Continue under a leader that has admitted this node."""
        channel.last_received = time.monotonic()
        self._channels[leader], self.leader, self.own_address = channel, leader, channel.own_address
        self.has_lost_leader, self.next_round = False, None
        self._pumped_at = 0.0  # this host was not frozen while it searched for the leader
        self.news = RoundNews()

    def lead(self, reception: JoinListener) -> None:
        """Continue as the leader, alone until others join."""
        self.drop_all()
        self.leader, self.reception, self.has_lost_leader, self.next_round = self.me.node_rank, reception, False, None
        self.ready.clear()
        self._pumped_at = 0.0
        self.is_new_leader = True
        self.take_in([self.me])
        self.news = RoundNews()

    # --- messages

    def _handle(self, rank: int, message: Message) -> None:
        match message:
            case messages.Gather():
                self._gathered.setdefault(rank, []).append(message.value)
            case messages.Gathered():
                self._answers.append(list(message.values))
            case messages.Ready():
                self.ready.add(rank)
            case messages.Round():
                self.take_in(message.members)
                self.news = RoundNews()
                self.next_round = message
            case messages.Signal():
                self._signals.append((message.number, message.ordinal))
                self._pass_on(rank, message)
            case messages.Ending():
                self.news.endings.add(message.why)
                self._pass_on(rank, message)
            case messages.End():
                whose = rank if self.is_leader or message.node_rank is None else message.node_rank
                behind = self.member(whose).clock_behind_seconds if self.is_leader else 0.0
                end = end_from_json(message.end, str(self.member(whose)), behind)
                self.news.ends_of.setdefault(whose, []).append(end)
            case messages.Done():
                self.news.steps.update(message.steps)
                self.news.done.add(rank)
                if message.has_snapshots:
                    self.news.with_snapshots.add(rank)
            case messages.Over():
                self.over = message
            case messages.Lost(is_fatal=True):
                self.lost = self.lost or message.text
            case messages.Lost():
                self.news.interrupted_because = self.news.interrupted_because or message.text
            case messages.Refused():
                self.refusal = self.refusal or refused_error(message)
                self._pass_on(rank, message)
            case (
                messages.Survey()
                | messages.SurveyRequest()
                | messages.State()
                | messages.Surveyed()
                | messages.Hang()
                | messages.NoHang()
            ):
                self.news.survey_messages.append((rank, message))

    def _pass_on(self, rank: int, message: Message) -> None:
        if self.is_leader:
            self.send_to_all(message, but=rank)

    def send_to_first(self, message: Message) -> None:
        """Send to the leader."""
        self.send(self.leader, message)

    def _lose(self, rank: int, why: str) -> None:
        """Record that a node is lost, and inform the others."""
        channel = self._channels.pop(rank, None)
        if channel is None:
            return
        channel.close()
        self.ready.discard(rank)
        is_member = any(member.node_rank == rank for member in self.members)
        if self.is_over or not is_member:
            return
        text = (
            f"{self.member(rank)} is gone ({why}): its launcher was ended, its host went down, or the network between "
            "the nodes is cut"
        )
        self.has_lost_leader = not self.is_leader
        if self.is_elastic and self.is_under_way:
            self.interrupt_round(text)
        elif self.lost is None and self.refusal is None:
            self.lost = text
            self.send_to_all(messages.Lost(text=text, is_fatal=True))
