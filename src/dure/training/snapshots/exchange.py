"""Exchange of snapshots between hosts: the ranks agree on one, and hosts that lack parts of it receive them.

Each host holds the snapshots of its own ranks. Its first rank also writes what rank 0 would, so that every host has all
state that ranks have in common. A share of pieces is useful only together with those of all other ranks. The ranks may
differ from those that wrote: a host was lost, came back, or is new.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dure.comm.groups import Group
from dure.process.context import Place
from dure.strategies.state.tensor_shard import Needs, TensorShard
from dure.training.checkpoints.rank_shard import PARTS, RankShard
from dure.training.checkpoints.reader import Checkpoint, checkpoint_of
from dure.training.checkpoints.state import Position
from dure.training.snapshots.memory import (
    PIECES,
    WHOLE,
    Held,
    Packed,
    SavedShare,
    held,
    packed_share,
    read_share,
    unpacked_share,
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A snapshot from which the run can continue."""

    position: Position
    round: int
    world_size: int
    """World size when it was written."""

    def is_of(self, one: Held) -> bool:
        """Return whether a rank's snapshot is part of this one."""
        return (one.position, one.round, one.world_size) == (self.position, self.round, self.world_size)


class Survey:
    """Snapshots held by all ranks of the group; the same list on every rank."""

    def __init__(self, group: Group, place: Place, own_descriptor: int) -> None:
        """Gather the lists of all ranks. Communication: one gathered JSON message of about 300 bytes per rank."""
        mine = [
            [
                one.position.samples_seen,
                one.position.step,
                one.position.epoch,
                one.round,
                one.world_size,
                one.rank,
                one.kind,
            ]
            for one in held(own_descriptor)
        ]
        gathered = group.all_gather_json([place.rank.node_rank, mine])
        self.nodes = [int(node) for node, _ in gathered]
        self.held = [[_held(*numbers) for numbers in all_] for _, all_ in gathered]

    def candidates(self) -> list[Found]:
        """Return the snapshots from which the run can continue, the newest first.

        Each rank that holds any snapshots must hold this one, so that all have completed its step. A rank is exempt if
        its snapshots are all of a later round: it joined when the others continued from this one.
        """
        every = {Found(position=h.position, round=h.round, world_size=h.world_size) for all_ in self.held for h in all_}
        sound = [found for found in every if self._is_sound(found)]
        return sorted(sound, key=lambda found: (found.round, found.position.samples_seen), reverse=True)

    def _is_sound(self, found: Found) -> bool:
        for all_ in self.held:
            if all_ and not any(map(found.is_of, all_)) and min(one.round for one in all_) <= found.round:
                return False
        parts = [one for all_ in self.held for one in all_ if found.is_of(one)]
        if any(one.kind & PIECES for one in parts):
            return {one.rank for one in parts} == set(range(found.world_size))
        return any(one.kind & WHOLE for one in parts)

    def has(self, found: Found, rank: int) -> list[Held]:
        """Return a rank's parts of a snapshot, if it has any."""
        return [one for one in self.held[rank] if found.is_of(one)]

    def is_everybodys(self, found: Found) -> bool:
        """Return whether it was written by exactly the present ranks."""
        return found.world_size == len(self.held) and all(
            any(one.rank == rank for one in self.has(found, rank)) for rank in range(len(self.held))
        )

    def to_send(self, found: Found) -> list[int]:
        """Return the ranks whose shares must be sent to all, because a host lacks something it needs of them."""
        holders = [(rank, one) for rank in range(len(self.held)) for one in self.has(found, rank)]
        if any(one.kind & PIECES for _, one in holders):
            by_old = {one.rank: rank for rank, one in reversed(holders)}
            return sorted(by_old.values()) if len(set(self.nodes)) > 1 else []
        with_whole = {self.nodes[rank] for rank, one in holders if one.kind & WHOLE}
        is_everywhere = with_whole == set(self.nodes)
        return [] if is_everywhere else [next(rank for rank, one in holders if one.kind & WHOLE)]


def collect(
    group: Group, place: Place, descriptors: Sequence[int], survey: Survey, found: Found, needs: Needs
) -> Checkpoint:
    """Return a snapshot as a checkpoint, after hosts have sent each other what is missing.

    A rank keeps what it needs of each share before the next one is sent.

    Args:
        group: Process group of all ranks.
        place: Context of this rank.
        descriptors: Descriptors of the snapshot memory, one for each rank of this host.
        survey: Snapshots held by the ranks.
        found: Snapshot to collect.
        needs: Parts of it that this rank loads.

    Communication: for each share sent, one gathered JSON message and two broadcasts of its bytes.
    """
    saved = {one.share.rank: one for one in _local(descriptors, found)}
    sent: dict[int, tuple[list[int], bytes, int]] = {}
    for source in survey.to_send(found):
        packed = Packed([], b"", b"")
        if group.rank == source:
            packed = packed_share(descriptors[place.rank.local_rank], found.position, found.round)
        numbers, *sizes = group.all_gather_json([packed.numbers, len(packed.head), len(packed.data)])[source]
        head = bytes(_broadcast(group, source, packed.head, sizes[0]))
        sent[source] = numbers, head, sizes[1]
        one = unpacked_share(numbers, head, None)
        saved.setdefault(one.share.rank, one)
    checkpoint = checkpoint_of(_shares(saved, found.world_size), found.position, group.rank)
    for source, (numbers, head, num_bytes) in sent.items():
        data = b""
        if group.rank == source:
            data = packed_share(descriptors[place.rank.local_rank], found.position, found.round).data
        received = _broadcast(group, source, data, num_bytes)
        checkpoint.take_in(unpacked_share(numbers, head, received).share, needs)
    if not survey.is_everybodys(found):
        # a rank had another number, or is new: state of a single rank is then not loaded by any, as in a resume with
        # another number of ranks
        checkpoint.manifest = checkpoint.manifest.model_copy(update={"world_size": 0})
    return checkpoint


def _broadcast(group: Group, source: int, data: bytes, num_bytes: int) -> bytearray:
    received = bytearray(data or num_bytes)
    group.broadcast_bytes(received, source)
    return received


def _local(descriptors: Sequence[int], found: Found) -> Iterator[SavedShare]:
    for descriptor in descriptors:
        if any(map(found.is_of, held(descriptor))):
            yield read_share(descriptor, found.position, found.round)


def _shares(saved: dict[int, SavedShare], world_size: int) -> list[RankShard]:
    """Return the shares of all ranks: state in common is in that of rank 0, and missing state is in none."""
    if any(one.is_spread for one in saved.values()):
        return [saved[rank].share for rank in range(world_size)]
    whole = next(one.share for _, one in sorted(saved.items()) if one.share.state)
    shares = []
    for rank in range(world_size):
        own = (
            saved[rank].share
            if rank in saved
            else RankShard(rank=rank, parts={part: {} for part in PARTS}, per_rank={})
        )
        source = whole if rank == 0 else own
        parts: dict[str, dict[str, Tensor | TensorShard]] = {}
        for part in PARTS:
            wholes = {name: v for name, v in source.parts[part].items() if isinstance(v, Tensor)} if rank == 0 else {}
            parts[part] = {**wholes, **{name: v for name, v in own.parts[part].items() if isinstance(v, TensorShard)}}
        shares.append(replace(own, parts=parts, aliases=source.aliases, state=whole.state if rank == 0 else b""))
    return shares


def _held(*numbers: Any) -> Held:
    samples_seen, step, epoch, round_number, world_size, rank, kind = map(int, numbers)
    position = Position(samples_seen=samples_seen, step=step, epoch=epoch)
    return Held(position=position, round=round_number, world_size=world_size, rank=rank, kind=kind)
