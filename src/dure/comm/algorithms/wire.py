"""Point-to-point messages with counted bytes, on which the all-reduce algorithms are built.

An algorithm says which elements go from which rank to which, independently of the transport. `Wire` sends its messages
between the ranks of a torch process group. `thread_wire` passes them between threads of one process, to demonstrate and
test what an algorithm sends.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dure.host.backends import sends_between_devices
from dure.host.devices import accelerator

_SHOWN_VALUES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A message that an algorithm sent."""

    phase: str
    """Name of the phase of the message."""
    step: int
    """Round within the phase, from 0; messages of one round may be in flight at once."""
    source: int
    destination: int
    start: int
    """Index of the first element in the tensor's storage, which is the index in the vector unless it is a view."""
    num_elements: int
    num_bytes: int
    values: tuple[float, ...]
    """First few values, for display."""

    @property
    def end(self) -> int:
        """Index after the last element."""
        return self.start + self.num_elements


class Transfer(ABC):
    """Messages in flight."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all messages are received, and sent tensors may be overwritten.

        Raises:
            RuntimeError: A peer was lost, or sent nothing within the group's timeout.
        """


class _Nothing(Transfer):
    def wait(self) -> None:
        """Do nothing: there is nothing to wait for."""


_NOTHING = _Nothing()

Peered = tuple[Tensor, int]
"""Tensor, and the rank that it is sent to or received from."""


class PointToPoint(ABC):
    """Point-to-point messages between ranks, with their bytes counted.

    Messages between two ranks arrive in the order in which they were started. A tensor without elements is not sent,
    not counted and not waited for, on both sides.
    """

    rank: int
    world_size: int
    hosts: tuple[int, ...]
    """Host number of each rank."""
    sent_bytes: int
    """Bytes of tensors that this rank has sent, without the overhead of the transport."""

    def start(self, outgoing: Sequence[Peered], incoming: Sequence[Peered]) -> Transfer:
        """Start several messages at once.

        Until the transfer was waited for, outgoing tensors must not change and incoming ones must not be read. On an
        accelerator the messages of one call are launched as one. Every rank must therefore start messages that belong
        together in one call, in the same order.

        Communication: the outgoing tensors' bytes, not blocking.

        Args:
            outgoing: Contiguous tensors, and the ranks they are sent to.
            incoming: Contiguous tensors to overwrite, and the ranks they are received from.
        """
        outgoing = [(tensor, peer) for tensor, peer in outgoing if tensor.numel()]
        incoming = [(tensor, peer) for tensor, peer in incoming if tensor.numel()]
        return self._start(outgoing, incoming) if outgoing or incoming else _NOTHING

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send a tensor. Communication: its bytes, blocking until the tensor may be overwritten."""
        self.start([(tensor, peer)], []).wait()

    def recv(self, tensor: Tensor, peer: int) -> None:
        """Overwrite a tensor with the one that `peer` sends. Communication: blocking."""
        self.start([], [(tensor, peer)]).wait()

    def exchange(self, outgoing: Tensor, to_peer: int, incoming: Tensor, from_peer: int) -> None:
        """Send one tensor while receiving another, so that a circle of ranks cannot deadlock.

        Communication: the bytes of `outgoing`, blocking.
        """
        self.start([(outgoing, to_peer)], [(incoming, from_peer)]).wait()

    def among(self, ranks: Sequence[int], label: str) -> "PointToPoint":
        """Return a wire of some of the ranks, including this one, renumbered from 0 in the given order.

        Args:
            ranks: Ranks of this wire, the same on each of them.
            label: Prefix of the names of their phases.
        """
        return _Among(self, ranks, label)

    @abstractmethod
    def mark(self, phase: str, step: int = 0) -> None:
        """Set the phase and step of messages started from now on."""

    @abstractmethod
    def scratch(self, like: Tensor, num_elements: int) -> Tensor:
        """Return uninitialised memory of the dtype and device of `like`, valid until the next call."""

    @abstractmethod
    def _start(self, outgoing: Sequence[Peered], incoming: Sequence[Peered]) -> Transfer:
        """Start messages that all have elements."""


class CountedWire(PointToPoint):
    """Counting, logging and scratch memory, common to all transports."""

    def __init__(self, rank: int, world_size: int, hosts: Sequence[int] | None, log: list[Message] | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.hosts = tuple(hosts) if hosts is not None else (0,) * world_size
        if len(self.hosts) != world_size:
            raise ValueError(
                f"hosts names {len(self.hosts)} ranks, but the group has {world_size}: give one host number per rank"
            )
        self.sent_bytes = 0
        self._log = log
        self._phase, self._step = "", 0
        self._scratch: dict[torch.device, Tensor] = {}

    def mark(self, phase: str, step: int = 0) -> None:
        """Set the phase and step of messages started from now on."""
        self._phase, self._step = phase, step

    def scratch(self, like: Tensor, num_elements: int) -> Tensor:
        """Return the same memory every time, because new pages cost more than a small reduction."""
        num_bytes = num_elements * like.element_size()
        room = self._scratch.get(like.device)
        if room is None or room.numel() < num_bytes:
            room = self._scratch[like.device] = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
        return room[:num_bytes].view(like.dtype)

    def _start(self, outgoing: Sequence[Peered], incoming: Sequence[Peered]) -> Transfer:
        for tensor, peer in outgoing:
            num_bytes = tensor.numel() * tensor.element_size()
            self.sent_bytes += num_bytes
            if self._log is not None:
                self._log.append(
                    Message(
                        phase=self._phase,
                        step=self._step,
                        source=self.rank,
                        destination=peer,
                        start=int(tensor.storage_offset()),
                        num_elements=tensor.numel(),
                        num_bytes=num_bytes,
                        values=tuple(tensor.flatten()[:_SHOWN_VALUES].tolist()),
                    )
                )
        return self._carry(outgoing, incoming)

    @abstractmethod
    def _carry(self, outgoing: Sequence[Peered], incoming: Sequence[Peered]) -> Transfer:
        """Pass the messages to the transport."""


class _Works(Transfer):
    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each message; on an accelerator the current stream waits."""
        works, self._works = self._works, ()  # a second wait on gloo would wait for another message
        for work in works:
            work.wait()


class _ThroughHost(Transfer):
    """Messages received in host memory before they are copied to a device."""

    def __init__(self, transfer: Transfer, arrivals: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._transfer = transfer
        self._arrivals = arrivals

    def wait(self) -> None:
        """Wait for all messages, and copy each to its place."""
        self._transfer.wait()
        arrivals, self._arrivals = self._arrivals, ()
        for place, arrived in arrivals:
            place.copy_(arrived)


def sends_from_devices(process_group: dist.ProcessGroup | None = None) -> bool:
    """Return whether a group's `send` and `recv` accept tensors of this torch's accelerator."""
    kind = accelerator()
    return kind is not None and sends_between_devices(dist.get_backend_config(process_group), kind)


class Wire(CountedWire):
    """Ranks of one torch process group, over c10d `send` and `recv`.

    Peers are ranks within the group. Nothing else may send or receive in that group at the same time: code that
    communicates from its own thread needs its own group. Tensors of a device go through host memory unless the backend
    sends them (gloo does not).
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        hosts: Sequence[int] | None = None,
        log: list[Message] | None = None,
    ) -> None:
        """Use an existing group.

        Args:
            process_group: Group of the ranks; None for the default group.
            hosts: Host number of each rank, the same on all ranks; None if all are on one host.
            log: Receives a `Message` for each message that this rank sends.

        Raises:
            ValueError: There is no default group, this process is not in the group, or `hosts` does not match it.
        """
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ValueError("this process is not in the process group: make the wire on its members only")
        super().__init__(rank, dist.get_world_size(process_group), hosts, log)
        self._group = process_group
        self._reaches_devices = sends_from_devices(process_group)

    def _carry(self, outgoing: Sequence[Peered], incoming: Sequence[Peered]) -> Transfer:
        tensor, _ = (outgoing or incoming)[0]
        if tensor.device.type != "cpu":
            if not self._reaches_devices:
                landings = [(torch.empty(place.shape, dtype=place.dtype), peer) for place, peer in incoming]
                under_way = self._carry([(sent.cpu(), peer) for sent, peer in outgoing], landings)
                arrivals = [(place, host) for (place, _), (host, _) in zip(incoming, landings, strict=True)]
                return _ThroughHost(under_way, arrivals)
            # a device's backend runs messages in launch order: two ranks that both receive first would wait for ever
            return _Works(dist.batch_isend_irecv([*self._operations(outgoing, incoming)]))
        # receives first: gloo sends nothing before the receiver has posted its buffer
        works = [dist.irecv(tensor, group=self._group, group_src=peer) for tensor, peer in incoming]
        works += [dist.isend(tensor, group=self._group, group_dst=peer) for tensor, peer in outgoing]
        return _Works([work for work in works if work is not None])

    def _operations(self, outgoing: Sequence[Peered], incoming: Sequence[Peered]) -> list[dist.P2POp]:
        return [
            *(dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=peer) for tensor, peer in incoming),
            *(dist.P2POp(dist.isend, tensor, group=self._group, group_peer=peer) for tensor, peer in outgoing),
        ]


class _Among(PointToPoint):
    """Some ranks of a wire, renumbered. The underlying wire counts bytes and logs messages."""

    def __init__(self, wire: PointToPoint, ranks: Sequence[int], label: str) -> None:
        self._wire = wire
        self._ranks = tuple(ranks)
        self._label = label
        self.rank = self._ranks.index(wire.rank)
        self.world_size = len(self._ranks)
        self.hosts = tuple(wire.hosts[rank] for rank in self._ranks)

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        """Bytes that this rank has sent over the whole wire."""
        return self._wire.sent_bytes

    def mark(self, phase: str, step: int = 0) -> None:
        """Set the phase, with the label as its prefix, and the step."""
        self._wire.mark(f"{self._label}{phase}", step)

    def scratch(self, like: Tensor, num_elements: int) -> Tensor:
        """Return scratch memory of the underlying wire."""
        return self._wire.scratch(like, num_elements)

    def _start(self, outgoing: Sequence[Peered], incoming: Sequence[Peered]) -> Transfer:
        ranks = self._ranks
        return self._wire.start(
            [(tensor, ranks[peer]) for tensor, peer in outgoing], [(tensor, ranks[peer]) for tensor, peer in incoming]
        )
