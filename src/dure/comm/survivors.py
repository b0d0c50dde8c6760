"""Group that continues without ranks that died: every exchange goes through one rank, so that all see the same.

In a collective each rank detects a death by itself, or not at all: one may have its result while another gets an error.
Here the leader gathers the messages of all members and replies to each. An exchange therefore succeeds on all members
or raises `GroupShrank` on all, and they can repeat it together. It is meant for few and small messages: sums of
evaluations and tables of checkpoints.
"""

import json
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from dure.comm.groups import MESSAGE_LIMIT_BYTES, Group
from dure.documents import parse_json
from dure.errors import GroupShrank
from dure.failures.report import is_peer_lost
from dure.torchcompat.tensors import bytes_of

TAG = 42
"""Tag of the messages here, which separates them from others between the same ranks."""
_LOST, _SIZE = -1, 0
"""Entries for a member in the leader's reply other than a number of bytes: the member is lost; its bytes are not
sent."""


class SurvivorsGroup(Group):
    """Live ranks of a group.

    `rank` and `world_size` count members only, and change when one is lost; the leader must not be lost.
    """

    def __init__(self, group: Group, *, leader: int, expendable: Collection[int]) -> None:
        """Start with all ranks of a process group.

        Args:
            group: All ranks, none of them dead. Only `close` leaves it.
            leader: Rank through which everything is sent.
            expendable: Ranks that may die.
        """
        self.everyone = group
        self.transport = group.transport
        self.members = list(range(group.world_size))
        """Live members by their rank in `everyone`, as known to all of them."""
        self._own = group.rank
        self._leader = leader
        self._expendable = frozenset(expendable)
        self._dead: set[int] = set()
        """Dead members already known to the leader; empty elsewhere."""
        self._renumber()

    def _renumber(self) -> None:
        self.rank = self.members.index(self._own)
        self.world_size = len(self.members)

    def bury(self, rank: int) -> None:
        """Inform the leader of a death that was detected elsewhere; the members learn of it in the next exchange."""
        self._dead.add(rank)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Return the messages of all members, in the order of members.

        Communication: two messages from each member to the leader, and two replies with all messages; blocking.

        Raises:
            GroupShrank: A member was lost; raised on all others, and `members` are then the live ones. The exchange can
                be repeated.
            RuntimeError: A member that is not expendable was lost.
        """
        received = self._gather(payload) if self._own == self._leader else self._report(payload)
        if len(received) < len(self.members):
            self.members = [member for member in self.members if member in received]
            self._renumber()
            raise GroupShrank(f"{len(self.members)} ranks are left")
        return [received[member] for member in self.members]

    def _report(self, payload: bytes) -> dict[int, bytes]:
        _send(payload, self._leader)
        sizes = torch.zeros(self.everyone.world_size, dtype=torch.int64)
        dist.recv(sizes, self._leader, tag=TAG)
        answer = torch.empty(int(sizes.clamp(min=0).sum()), dtype=torch.uint8)
        if answer.numel():
            dist.recv(answer, self._leader, tag=TAG)
        received, start, data = dict[int, bytes](), 0, answer.numpy().tobytes()
        for member, size in enumerate(sizes.tolist()):
            if size != _LOST:
                received[member] = data[start : start + size]
                start += size
        return received

    def _gather(self, payload: bytes) -> dict[int, bytes]:
        received: dict[int, bytes] = {}
        for member in self.members:
            if member == self._own:
                received[member] = payload
            elif member not in self._dead:
                try:
                    received[member] = _receive(member)
                except RuntimeError as error:
                    self._let_go(member, error)
        is_whole = len(received) == len(self.members)
        sizes = torch.full((self.everyone.world_size,), _LOST, dtype=torch.int64)
        for member, data in received.items():
            sizes[member] = len(data) if is_whole else _SIZE
        answer = _as_tensor(b"".join(received.values()) if is_whole else b"")
        for member in [member for member in received if member != self._own]:
            try:
                dist.send(sizes, member, tag=TAG)
                if answer.numel():
                    dist.send(answer, member, tag=TAG)
            except RuntimeError as error:
                self._let_go(member, error)  # the others have its message already, and learn of its end next time
        return received

    def _let_go(self, member: int, error: RuntimeError) -> None:
        if member not in self._expendable or not is_peer_lost(error):
            raise error
        self._dead.add(member)

    # methods of a group

    def agree(self, message: Any) -> list[Any]:
        """Return the JSON messages of all live members; repeat the exchange while members are lost.

        Communication: as in `exchange`.
        """
        while True:
            try:
                return self.all_gather_json(message)
            except GroupShrank:
                continue

    def all_gather_json(self, message: Any) -> list[Any]:
        """Return the JSON messages of all members. Communication: as in `exchange`."""
        data = json.dumps(message).encode()
        if len(data) > MESSAGE_LIMIT_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is over the limit of {MESSAGE_LIMIT_BYTES}")
        return [parse_json(payload, may_repeat_keys=True, most_depth=None) for payload in self.exchange(data)]

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Add up over the members, in their order. Communication: as in `exchange`, the tensor from each to each."""
        total = torch.zeros_like(tensor, device="cpu")
        for payload in self.exchange(_as_bytes(tensor)):
            total += torch.frombuffer(bytearray(payload), dtype=tensor.dtype).view(tensor.shape)
        tensor.copy_(total)

    def broadcast(self, tensors: list[torch.Tensor], source_rank: int = 0) -> None:
        """Overwrite the tensors with those of one member. Communication: one `exchange` with all of them."""
        is_source = self.rank == source_rank
        payload = self.exchange(b"".join(map(_as_bytes, tensors)) if is_source else b"")[source_rank]
        start = 0
        for tensor in tensors:
            end = start + tensor.numel() * tensor.element_size()
            if not is_source and end > start:
                values = torch.frombuffer(bytearray(payload[start:end]), dtype=tensor.dtype)
                tensor.detach().copy_(values.view(tensor.shape))
            start = end

    def barrier(self) -> None:
        """Wait for all members."""
        self.exchange(b"")

    def close(self) -> None:
        """Wait for the live members, then leave the underlying group without the dead."""
        self.agree(None)
        self.everyone.abandon()

    def abandon(self) -> None:
        """Leave at once."""
        self.everyone.abandon()


def _send(data: bytes, rank: int) -> None:
    dist.send(torch.tensor([len(data)], dtype=torch.int64), rank, tag=TAG)
    if data:
        dist.send(_as_tensor(data), rank, tag=TAG)


def _receive(rank: int) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank, tag=TAG)
    data = torch.empty(int(size), dtype=torch.uint8)
    if data.numel():
        dist.recv(data, rank, tag=TAG)
    return data.numpy().tobytes()


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes_of(tensor.cpu()).numpy().tobytes()
