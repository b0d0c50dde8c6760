"""Messages between two ranks at a time, counted: what the all-reduce algorithms are written over.

An algorithm says which elements go from whom to whom and knows nothing of how. `Wire` carries its messages over the
ranks of a torch process group; `thread_wire` carries them between threads of one process, to show and to test what an
algorithm sends.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_SHOWN_VALUES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message that an algorithm sent."""

    phase: str
    """Name of the phase that the message belongs to."""
    step: int
    """Round within the phase, from 0; messages of one round can be in flight at once."""
    source: int
    destination: int
    start: int
    """Index of the first element in the tensor's storage, which is the vector's own index unless it is a view."""
    num_elements: int
    num_bytes: int
    values: tuple[float, ...]
    """First few values, for a reader."""

    @property
    def end(self) -> int:
        """One past its last element."""
        return self.start + self.num_elements


class Transfer(ABC):
    """Messages under way."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all of them were received, and until what was sent may be overwritten.

        Raises:
            RuntimeError: A peer went away, or said nothing within the group's timeout.
        """


class _Nothing(Transfer):
    def wait(self) -> None:
        """Wait for nothing."""


_NOTHING = _Nothing()

Peered = tuple[Tensor, int]
"""A tensor and the rank that it goes to or comes from."""


class PointToPoint(ABC):
    """Point-to-point messages between ranks, with their bytes counted.

    Between two ranks messages arrive in the order in which they were started. A tensor without elements sends
    nothing, counts nothing and is not waited for, on both sides.
    """

    rank: int
    world_size: int
    hosts: tuple[int, ...]
    """The host of each rank, as a number."""
    sent_bytes: int
    """Bytes of tensors that this rank has sent, without what the transport adds."""

    def start(self, outgoing: Sequence[Peered], incoming: Sequence[Peered]) -> Transfer:
        """Start several messages at once.

        Until the transfer was waited for, what goes out must not change and what comes in must not be read. On an
        accelerator the messages of one call are launched as one, so every rank has to start those that belong
        together in one call, in the same order.

        Communication: the outgoing tensors' bytes, not blocking.

        Args:
            outgoing: Contiguous tensors and the ranks they go to.
            incoming: Contiguous tensors to be overwritten, and the ranks they come from.
        """
        outgoing = [(tensor, peer) for tensor, peer in outgoing if tensor.numel()]
        incoming = [(tensor, peer) for tensor, peer in incoming if tensor.numel()]
        return self._start(outgoing, incoming) if outgoing or incoming else _NOTHING

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send a tensor. Communication: its bytes, blocking until it may be overwritten."""
        self.start([(tensor, peer)], []).wait()

    def recv(self, tensor: Tensor, peer: int) -> None:
        """Overwrite a tensor with the one that `peer` sends. Communication: blocking."""
        self.start([], [(tensor, peer)]).wait()

    def exchange(self, outgoing: Tensor, to_peer: int, incoming: Tensor, from_peer: int) -> None:
        """Send one tensor while another is received, so that a circle of ranks cannot wait for each other.

        Communication: the bytes of `outgoing`, blocking.
        """
        self.start([(outgoing, to_peer)], [(incoming, from_peer)]).wait()

    def among(self, ranks: Sequence[int], label: str) -> "PointToPoint":
        """Return this wire as some of its ranks see it, renumbered from 0 in the given order. They include this one.

        Args:
            ranks: The same on each of them.
            label: Goes before the names of their phases.
        """
        return _Among(self, ranks, label)

    @abstractmethod
    def mark(self, phase: str, step: int = 0) -> None:
        """Say what the messages started from now on belong to."""

    @abstractmethod
    def scratch(self, like: Tensor, num_elements: int) -> Tensor:
        """Return uninitialised memory of the dtype and device of `like`, valid until the next call."""

    @abstractmethod
    def _start(self, outgoing: Sequence[Peered], incoming: Sequence[Peered]) -> Transfer:
        """Start messages that all have elements."""


class CountedWire(PointToPoint):
    """Counting, logging and scratch memory, the same for every transport."""

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
        """Say what the messages started from now on belong to."""
        self._phase, self._step = phase, step

    def scratch(self, like: Tensor, num_elements: int) -> Tensor:
        """Return the same memory every time: fresh pages cost more than a small reduction."""
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
        """Hand the messages to the transport."""


class _Works(Transfer):
    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each; on an accelerator it is the current stream that waits."""
        works, self._works = self._works, ()  # gloo would wait for another message if it was asked a second time
        for work in works:
            work.wait()


class _ThroughHost(Transfer):
    """Messages that were received in host memory on their way to a device."""

    def __init__(self, transfer: Transfer, arrivals: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._transfer = transfer
        self._arrivals = arrivals

    def wait(self) -> None:
        """Wait for all of them, and copy each to its place."""
        self._transfer.wait()
        arrivals, self._arrivals = self._arrivals, ()
        for place, arrived in arrivals:
            place.copy_(arrived)


def sends_from_devices(process_group: dist.ProcessGroup | None = None) -> bool:
    """Return whether a group's `send` and `recv` take tensors of an accelerator."""
    return "nccl" in dist.get_backend_config(process_group)


class Wire(CountedWire):
    """The ranks of one torch process group, over c10d `send` and `recv`.

    Peers are ranks inside the group. Nothing else may send or receive in that group at the same time: code
    that communicates from a thread of its own needs a group of its own. Tensors of a device go through host memory
    where the backend is not NCCL: gloo would take their addresses for addresses of the host.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        hosts: Sequence[int] | None = None,
        log: list[Message] | None = None,
    ) -> None:
        """Take a group that exists.

        Args:
            process_group: None takes the default group.
            hosts: One host number per rank, the same on all; None says that all are on one.
            log: Gets one `Message` for each that this rank sends.

        Raises:
            ValueError: There is no default group, this process is not in the group, or `hosts` does not fit it.
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
            # NCCL runs messages in the order of their launch: two ranks that both receive first would wait forever
            return _Works(dist.batch_isend_irecv([*self._operations(outgoing, incoming)]))
        # what comes in first: gloo sends nothing before the other side has said where it goes
        works = [dist.irecv(tensor, group=self._group, group_src=peer) for tensor, peer in incoming]
        works += [dist.isend(tensor, group=self._group, group_dst=peer) for tensor, peer in outgoing]
        return _Works([work for work in works if work is not None])

    def _operations(self, outgoing: Sequence[Peered], incoming: Sequence[Peered]) -> list[dist.P2POp]:
        return [
            *(dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=peer) for tensor, peer in incoming),
            *(dist.P2POp(dist.isend, tensor, group=self._group, group_peer=peer) for tensor, peer in outgoing),
        ]


class _Among(PointToPoint):
    """Some ranks of a wire, under numbers of their own. Bytes are counted, and messages logged, by the wire."""

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
        """Name the phase with the label before it."""
        self._wire.mark(f"{self._label}{phase}", step)

    def scratch(self, like: Tensor, num_elements: int) -> Tensor:
        """Return the wire's."""
        return self._wire.scratch(like, num_elements)

    def _start(self, outgoing: Sequence[Peered], incoming: Sequence[Peered]) -> Transfer:
        ranks = self._ranks
        return self._wire.start(
            [(tensor, ranks[peer]) for tensor, peer in outgoing], [(tensor, ranks[peer]) for tensor, peer in incoming]
        )
