"""A rank's snapshots in memory that outlives it: two places, written alternately, so that one is always complete.

An optional third place keeps the newest snapshot known to be correct, however far the others are ahead.

The memory is an unnamed file that the supervisor holds. A rank writes there what it would write of a checkpoint, and
then marks it as complete; if it is killed before that, the other place is still complete. Ranks of a synchronous
strategy are at most one step apart. One of the two places is therefore of a step that all ranks have.
"""

import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dure.documents import parse_json
from dure.strategies.state.tensor_shard import TensorShard
from dure.training.checkpoints.rank_shard import PARTS, RankShard
from dure.training.checkpoints.safetensors_file import DTYPE_NAMES, DTYPES
from dure.training.checkpoints.staging import aligned
from dure.training.checkpoints.state import Position

ENTRY = struct.Struct("<14qQ")
NUM_PLACES = 2
"""Number of places sufficient to continue from the newest snapshot."""
MOST_PLACES = 3
"""Number of places that also keeps the newest snapshot known to be correct."""
HEADER_BYTES = 4096
_PER_RANK = "per_rank"


class Entry(NamedTuple):
    """Header of a snapshot: its place in the file, and its position in the run."""

    is_whole: int
    samples_seen: int = 0
    step: int = 0
    epoch: int = 0
    begin: int = 0
    num_bytes: int = 0
    """Bytes of the place, starting at `begin`."""
    layout_bytes: int = 0
    state_begin: int = 0
    state_bytes: int = 0
    data_begin: int = 0
    round: int = 0
    world_size: int = 0
    rank: int = 0
    kind: int = 0
    replica_digest: int = 0
    """Digest of the state that the rank held in common with others, of which it may not write any; 0 for none."""

    @property
    def position(self) -> Position:
        """Position of the snapshot in the run."""
        return Position(samples_seen=self.samples_seen, step=self.step, epoch=self.epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A complete snapshot of one rank, with rank and world size at that time, which may change from round to round."""

    position: Position
    round: int
    world_size: int
    rank: int
    kind: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Rank, world size and round of the writer."""

    round: int = 0
    world_size: int = 1
    rank: int = 0


PIECES, WHOLE = 1, 2
"""Bit flags for the kind of a share: useful only with those of all other ranks; or containing all state that is not of
a single rank."""


class ShareLayout:
    """Places of a share's tensors in a snapshot: usually the same from step to step."""

    def __init__(self, share: RankShard, *, is_spread: bool = False) -> None:
        """Lay out a share.

        Args:
            share: Share to write.
            is_spread: Whether other ranks have state that this rank lacks, apart from pieces.
        """
        has_pieces = any(isinstance(value, TensorShard) for part in share.parts.values() for value in part.values())
        is_whole = bool(share.state) and not is_spread
        self.kind = PIECES * (has_pieces or is_spread) + WHOLE * is_whole
        self.begins: list[int] = []
        self.kinds: list[tuple[torch.dtype, torch.Size]] = []
        self.num_bytes = 0
        parts = {part: self._place_all(tensors) for part, tensors in share.parts.items()}
        parts[_PER_RANK] = self._place_all(share.per_rank)
        layout = {
            "rank": share.rank,
            "is_spread": is_spread,
            "aliases": share.aliases,
            "parts": parts,
        }
        self.text = json.dumps(layout, ensure_ascii=False).encode()

    def is_like(self, other: "ShareLayout") -> bool:
        """Return whether another layout has the same names, dtypes, shapes and places."""
        return self.text == other.text

    def _place_all(self, tensors: Mapping[str, Tensor | TensorShard]) -> dict[str, Any]:
        return {name: self._place(value) for name, value in tensors.items()}

    def _place(self, value: Tensor | TensorShard) -> dict[str, Any]:
        tensor = value.tensor if isinstance(value, TensorShard) else value
        begin = aligned(self.num_bytes)
        self.begins.append(begin)
        self.kinds.append((tensor.dtype, tensor.shape))
        self.num_bytes = begin + tensor.numel() * tensor.element_size()
        placed: dict[str, Any] = {"dtype": DTYPE_NAMES[tensor.dtype], "sizes": list(tensor.shape), "begin": begin}
        if isinstance(value, TensorShard):
            placed |= {"offsets": list(value.offsets), "shape": list(value.shape)}
        return placed


@dataclass(frozen=True, kw_only=True)
class SavedShare:
    """A rank's share of a snapshot, read back."""

    share: RankShard
    """Share whose tensors are views of the memory, valid until the next snapshot."""
    is_spread: bool = False


def held(descriptor: int) -> list[Held]:
    """Return the complete snapshots of a rank, at most three."""
    if os.fstat(descriptor).st_size < HEADER_BYTES:
        return []
    with mmap.mmap(descriptor, HEADER_BYTES) as memory:
        entries = [entry_of(memory, place) for place in range(MOST_PLACES)]
    return [
        Held(position=e.position, round=e.round, world_size=e.world_size, rank=e.rank, kind=e.kind)
        for e in entries
        if e.is_whole
    ]


def positions(descriptor: int) -> list[Position]:
    """Return the positions of the complete snapshots of a rank."""
    return [one.position for one in held(descriptor)]


def newest_common(descriptors: Sequence[int]) -> Position | None:
    """Return the newest position at which every rank has a complete snapshot, or None."""
    common = set.intersection(*(set(positions(descriptor)) for descriptor in descriptors)) if descriptors else set()
    return max(common, key=lambda position: position.samples_seen, default=None)


def forget_after(descriptor: int, samples_seen: int) -> None:
    """Forget a rank's snapshots of later positions, so that no round continues from them."""
    if os.fstat(descriptor).st_size < HEADER_BYTES:
        return
    with mmap.mmap(descriptor, HEADER_BYTES) as memory:
        for place in range(MOST_PLACES):
            if entry_of(memory, place).samples_seen > samples_seen:
                struct.pack_into("<q", memory, place * ENTRY.size, 0)


def read_share(descriptor: int, position: Position, round_number: int | None = None) -> SavedShare:
    """Read a rank's share of a snapshot that `positions` or `held` returned."""
    memory, entry = _found(descriptor, position, round_number)
    return _parsed(memory, entry, memory)


def replica_digest(descriptor: int, position: Position, round_number: int | None = None) -> int:
    """Return the digest of a rank's replica at a snapshot that `held` may have returned; 0 for none."""
    if os.fstat(descriptor).st_size < HEADER_BYTES:
        return 0
    with mmap.mmap(descriptor, HEADER_BYTES) as memory:
        entries = [entry_of(memory, place) for place in range(MOST_PLACES)]
    found = (e for e in entries if e.is_whole and e.position == position and round_number in (None, e.round))
    return next((e.replica_digest for e in found), 0)


class Packed(NamedTuple):
    """A rank's share as bytes, for another host."""

    numbers: list[int]
    """Lengths and offset that locate the layout and the state in `head`."""
    head: bytes
    """Bytes of everything but the tensors."""
    data: bytes


def packed_share(descriptor: int, position: Position, round_number: int) -> Packed:
    """Return a rank's share of a snapshot that `held` returned, for another host."""
    memory, entry = _found(descriptor, position, round_number)
    with memory:
        head, data = (
            memory[begin:end] for begin, end in pairwise((entry.begin, entry.data_begin, entry.begin + entry.num_bytes))
        )
    return Packed([entry.layout_bytes, entry.state_begin - entry.begin, entry.state_bytes], head, data)


def unpacked_share(numbers: Sequence[int], head: bytes, data: bytearray | None) -> SavedShare:
    """Read the result of `packed_share`; the tensors are views of `data`, or meta tensors if that is None."""
    layout_bytes, state_begin, state_bytes = numbers
    entry = Entry(is_whole=1, layout_bytes=layout_bytes, state_begin=state_begin, state_bytes=state_bytes)
    return _parsed(head, entry, data)


def _found(descriptor: int, position: Position, round_number: int | None) -> tuple[mmap.mmap, Entry]:
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    entries = [entry_of(memory, place) for place in range(MOST_PLACES)]
    entry = next(e for e in entries if e.is_whole and e.position == position and round_number in (None, e.round))
    return memory, entry


def _parsed(memory: "mmap.mmap | bytes", entry: Entry, data: "mmap.mmap | bytearray | None") -> SavedShare:
    layout = parse_json(
        bytes(memory[entry.begin : entry.begin + entry.layout_bytes]), may_repeat_keys=True, most_depth=None
    )

    def tensor_of(placed: dict[str, Any]) -> Tensor | TensorShard:
        dtype, sizes = DTYPES[placed["dtype"]], placed["sizes"]
        if data is None:
            tensor = torch.empty(sizes, dtype=dtype, device="meta")
        else:
            tensor = view_of(data, entry.data_begin + placed["begin"], dtype, sizes)
        if "offsets" not in placed:
            return tensor
        return TensorShard(tensor=tensor, offsets=tuple(placed["offsets"]), shape=tuple(placed["shape"]))

    read = {
        part: {name: tensor_of(placed) for name, placed in tensors.items()} for part, tensors in layout["parts"].items()
    }
    per_rank = {name: tensor for name, tensor in read[_PER_RANK].items() if isinstance(tensor, Tensor)}
    share = RankShard(
        rank=layout["rank"],
        parts={part: read[part] for part in PARTS},
        per_rank=per_rank,
        aliases=layout["aliases"],
        state=bytes(memory[entry.state_begin : entry.state_begin + entry.state_bytes]),
    )
    return SavedShare(share=share, is_spread=layout["is_spread"])


def entry_of(memory: mmap.mmap, place: int) -> Entry:
    """Read the entry of a place."""
    return Entry(*ENTRY.unpack(memory[place * ENTRY.size : (place + 1) * ENTRY.size]))


def view_of(memory: "mmap.mmap | bytearray", begin: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return a view of memory as a tensor."""
    count = prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).reshape(tuple(shape))
