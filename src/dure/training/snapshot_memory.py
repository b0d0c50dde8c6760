"""A rank's snapshots in memory that outlives it: two places, written by turns, so that one is always whole.

A third place, where it is asked for, lets the newest one stay that is known to be right, however far others are ahead.

The memory is an unnamed file that the supervisor holds. A rank puts there what it would write of a checkpoint, and
marks it as whole afterwards; if it is killed in between, the other place still is. Ranks of a synchronous strategy are
at most one step apart, so that of two places each one is of a step that all have.
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

from dure import torchcompat
from dure.strategies.pieces import Piece
from dure.training.checkpoint_share import PARTS, Share
from dure.training.device_copies import DeviceCopies, can_copy_beside
from dure.training.safetensors_file import DTYPE_NAMES, DTYPES
from dure.training.snapshot import Position

_ENTRY = struct.Struct("<14q")
NUM_PLACES = 2
"""Which is enough to go on from the newest."""
MOST_PLACES = 3
"""With the newest that is known to be right."""
_HEADER_BYTES = 4096
_ALIGNMENT = 64
_PER_RANK = "per_rank"


class _Entry(NamedTuple):
    """Where a snapshot stands in the file, and what it is of."""

    is_whole: int
    samples_seen: int = 0
    step: int = 0
    epoch: int = 0
    begin: int = 0
    num_bytes: int = 0
    """What the place may take, from `begin`."""
    layout_bytes: int = 0
    state_begin: int = 0
    state_bytes: int = 0
    data_begin: int = 0
    round: int = 0
    world_size: int = 0
    rank: int = 0
    kind: int = 0

    @property
    def position(self) -> Position:
        return Position(samples_seen=self.samples_seen, step=self.step, epoch=self.epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A whole snapshot of one rank, and which rank of which ranks it was then: that may change from round to round."""

    position: Position
    round: int
    world_size: int
    rank: int
    kind: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """As which rank of which ranks somebody writes."""

    round: int = 0
    world_size: int = 1
    rank: int = 0


PIECES, WHOLE = 1, 2
"""Kinds of shares: one that is of use only with those of all other ranks, and one that holds all that is not of one
rank alone. Bits of one number."""


class ShareLayout:
    """Places of a share's tensors in a snapshot: usually the same from step to step."""

    def __init__(self, share: Share, *, is_spread: bool = False) -> None:
        """Lay out a share.

        Args:
            share: What is written.
            is_spread: Whether other ranks have what this one has not, beside pieces.
        """
        has_pieces = any(isinstance(value, Piece) for part in share.parts.values() for value in part.values())
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
        """Return whether another one has the same names, kinds and places."""
        return self.text == other.text

    def _place_all(self, tensors: Mapping[str, Tensor | Piece]) -> dict[str, Any]:
        return {name: self._place(value) for name, value in tensors.items()}

    def _place(self, value: Tensor | Piece) -> dict[str, Any]:
        tensor = value.tensor if isinstance(value, Piece) else value
        begin = _aligned(self.num_bytes)
        self.begins.append(begin)
        self.kinds.append((tensor.dtype, tensor.shape))
        self.num_bytes = begin + tensor.numel() * tensor.element_size()
        placed: dict[str, Any] = {"dtype": DTYPE_NAMES[tensor.dtype], "sizes": list(tensor.shape), "begin": begin}
        if isinstance(value, Piece):
            placed |= {"offsets": list(value.offsets), "shape": list(value.shape)}
        return placed


class SnapshotWriter:
    """Writes a rank's snapshots."""

    def __init__(
        self,
        descriptor: int,
        kept: Position | None = None,
        num_places: int = NUM_PLACES,
        origin: Origin | None = None,
    ) -> None:
        """Take over the memory of an earlier round.

        Args:
            descriptor: Of the memory.
            kept: The position from which this round goes on: its snapshot is written over last. Any other one is
                forgotten: another rank may not have it.
            num_places: Snapshots that there may be; the earlier rounds had as many.
            origin: Which rank this is, where it may be another one in the next round.
        """
        self._descriptor = descriptor
        self._origin = origin or Origin()
        self._copies = DeviceCopies()
        self._copied: int | None = None
        """The place whose tensors are being copied from accelerators."""
        self._is_pinned: bool | None = None
        """Whether the memory is pinned; None if that was not tried."""
        if os.fstat(descriptor).st_size < _HEADER_BYTES:
            os.ftruncate(descriptor, _HEADER_BYTES)
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._entries = [_entry(self._memory, place) for place in range(num_places)]
        self._whole: dict[int, int] = {}
        """Samples seen by the whole snapshots, by their places."""
        for place, entry in enumerate(self._entries):
            if entry.is_whole and entry.position == kept:
                self._whole[place] = entry.samples_seen
            else:
                self._mark(place, is_whole=0)
        self._laid_out: list[ShareLayout | None] = [None] * num_places
        self._targets: list[list[Tensor]] = [[] for _ in range(num_places)]

    def write(
        self,
        layout: ShareLayout,
        tensors: list[Tensor],
        state: bytes,
        position: Position,
        trusted_samples: int | None = None,
        steady: Sequence[bool] | None = None,
    ) -> None:
        """Copy a share's tensors as they are now, over the older of the two snapshots.

        Args:
            layout: Of the share; passing the same object again is what makes this fast.
            tensors: In the order of the layout.
            state: `Share.state`: everything that is no tensor.
            position: Where in the run this is.
            trusted_samples: The newest snapshot that is no further stays, if there is a place for it beside the newest.
            steady: Which of the tensors change only after `complete`, so that they are copied meanwhile if they are on
                an accelerator. None: all is copied when this returns.
        """
        self.complete()
        place = self._place(trusted_samples)
        entry = self._entries[place]
        self._whole.pop(place, None)
        self._mark(place, is_whole=0)
        if self._laid_out[place] is not layout or entry.state_begin + len(state) > entry.data_begin:
            self._lay_out(place, layout, 2 * len(state))
            entry = self._entries[place]
        self._copy(place, tensors, steady)
        self._memory[entry.state_begin : entry.state_begin + len(state)] = state
        self._entries[place] = entry._replace(
            is_whole=0,
            samples_seen=position.samples_seen,
            step=position.step,
            epoch=position.epoch,
            state_bytes=len(state),
            round=self._origin.round,
            world_size=self._origin.world_size,
            rank=self._origin.rank,
            kind=layout.kind,
        )
        self._put(place)
        self._copied = place
        if steady is None or self._copies.is_complete:
            self.complete()

    def complete(self) -> bool:
        """Let the snapshot be whole that is being written; return whether its tensors stayed as they were.

        If they did not, it is none.
        """
        place, self._copied = self._copied, None
        if place is None:
            return True
        is_same = self._copies.complete()
        if is_same:
            self._mark(place, is_whole=1)
            self._whole[place] = self._entries[place].samples_seen
        return is_same

    @property
    def is_complete(self) -> bool:
        """Whether the tensors may change."""
        return self._copied is None

    def _copy(self, place: int, tensors: list[Tensor], steady: Sequence[bool] | None) -> None:
        targets = self._targets[place]
        away = [number for number, tensor in enumerate(tensors) if can_copy_beside(tensor)]
        if away:
            self._pin()
            flags = [False if steady is None else steady[number] for number in away]
            self._copies.begin([targets[number] for number in away], [tensors[number] for number in away], flags)
            here = sorted({*range(len(tensors))} - {*away})
            targets, tensors = [targets[number] for number in here], [tensors[number] for number in here]
        with torch.no_grad():
            torchcompat.copy_all(targets, tensors)

    def _place(self, trusted_samples: int | None) -> int:
        """Choose what to write over: what is not whole, or the oldest that need not stay."""
        by_age = sorted(range(len(self._entries)), key=lambda place: self._whole.get(place, -1))
        trusted = [p for p in by_age if p in self._whole and self._whole[p] <= (trusted_samples or 0)]
        kept = {*by_age[-1:], *trusted[-1:]}
        return next((place for place in by_age if place not in kept), by_age[0])

    def _lay_out(self, place: int, layout: ShareLayout, state_bytes: int) -> None:
        state_begin = _aligned(len(layout.text))
        data_begin = _aligned(state_begin + state_bytes)
        needed = data_begin + layout.num_bytes
        old = self._entries[place]
        begin, room = old.begin, old.num_bytes
        if room < needed:
            # a new place at the end: the other one must stay as it is
            begin, room = _aligned(os.fstat(self._descriptor).st_size), needed
            os.ftruncate(self._descriptor, begin + room)
            self._map_again()
        entry = _Entry(
            is_whole=0,
            begin=begin,
            num_bytes=room,
            layout_bytes=len(layout.text),
            state_begin=begin + state_begin,
            data_begin=begin + data_begin,
        )
        self._entries[place], self._laid_out[place] = entry, layout
        self._put(place)
        self._memory[begin : begin + len(layout.text)] = layout.text
        self._targets[place] = self._views(place)

    def _views(self, place: int) -> list[Tensor]:
        layout, begin = self._laid_out[place], self._entries[place].data_begin
        if layout is None:
            return []
        return [
            _view(self._memory, begin + at, dtype, shape)
            for at, (dtype, shape) in zip(layout.begins, layout.kinds, strict=True)
        ]

    def _map_again(self) -> None:
        if self._is_pinned:
            torchcompat.unpin_host_memory(self._address())
        self._is_pinned = None
        self._memory = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
        self._targets = [self._views(place) for place in range(len(self._targets))]

    def _pin(self) -> None:
        """Lock the memory, once: copies into other memory would hold the host up."""
        if self._is_pinned is None:
            self._is_pinned = torchcompat.pin_host_memory(self._address(), len(self._memory))

    def _address(self) -> int:
        return _view(self._memory, 0, torch.uint8, [1]).data_ptr()

    def _put(self, place: int) -> None:
        self._memory[place * _ENTRY.size : (place + 1) * _ENTRY.size] = _ENTRY.pack(*self._entries[place])

    def _mark(self, place: int, *, is_whole: int) -> None:
        struct.pack_into("<q", self._memory, place * _ENTRY.size, is_whole)


@dataclass(frozen=True, kw_only=True)
class SavedShare:
    """A rank's share of a snapshot, read back."""

    share: Share
    """Its tensors are views of the memory, valid until the next snapshot."""
    is_spread: bool = False


def held(descriptor: int) -> list[Held]:
    """Return the whole snapshots of a rank, at most three."""
    if os.fstat(descriptor).st_size < _HEADER_BYTES:
        return []
    with mmap.mmap(descriptor, _HEADER_BYTES) as memory:
        entries = [_entry(memory, place) for place in range(MOST_PLACES)]
    return [
        Held(position=e.position, round=e.round, world_size=e.world_size, rank=e.rank, kind=e.kind)
        for e in entries
        if e.is_whole
    ]


def positions(descriptor: int) -> list[Position]:
    """Return where the whole snapshots of a rank stand."""
    return [one.position for one in held(descriptor)]


def newest_common(descriptors: Sequence[int]) -> Position | None:
    """Return the newest position of which every rank has a whole snapshot."""
    common = set.intersection(*(set(positions(descriptor)) for descriptor in descriptors)) if descriptors else set()
    return max(common, key=lambda position: position.samples_seen, default=None)


def forget_after(descriptor: int, samples_seen: int) -> None:
    """Forget a rank's snapshots of later positions, so that no round goes on from them."""
    if os.fstat(descriptor).st_size < _HEADER_BYTES:
        return
    with mmap.mmap(descriptor, _HEADER_BYTES) as memory:
        for place in range(MOST_PLACES):
            if _entry(memory, place).samples_seen > samples_seen:
                struct.pack_into("<q", memory, place * _ENTRY.size, 0)


def read_share(descriptor: int, position: Position, round_number: int | None = None) -> SavedShare:
    """Read a rank's share of a snapshot that `positions` or `held` has named."""
    memory, entry = _found(descriptor, position, round_number)
    return _parsed(memory, entry, memory)


class Packed(NamedTuple):
    """A rank's share as bytes, for another host."""

    numbers: list[int]
    """By which it is read there."""
    head: bytes
    """All but the tensors."""
    data: bytes


def packed_share(descriptor: int, position: Position, round_number: int) -> Packed:
    """Return a rank's share of a snapshot that `held` has named, for another host."""
    memory, entry = _found(descriptor, position, round_number)
    with memory:
        head, data = (
            memory[begin:end] for begin, end in pairwise((entry.begin, entry.data_begin, entry.begin + entry.num_bytes))
        )
    return Packed([entry.layout_bytes, entry.state_begin - entry.begin, entry.state_bytes], head, data)


def unpacked_share(numbers: Sequence[int], head: bytes, data: bytearray | None) -> SavedShare:
    """Read what `packed_share` gave; the tensors are views of `data`, or of no memory as long as that is not there."""
    layout_bytes, state_begin, state_bytes = numbers
    entry = _Entry(is_whole=1, layout_bytes=layout_bytes, state_begin=state_begin, state_bytes=state_bytes)
    return _parsed(head, entry, data)


def _found(descriptor: int, position: Position, round_number: int | None) -> tuple[mmap.mmap, _Entry]:
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    entries = [_entry(memory, place) for place in range(MOST_PLACES)]
    entry = next(e for e in entries if e.is_whole and e.position == position and round_number in (None, e.round))
    return memory, entry


def _parsed(memory: "mmap.mmap | bytes", entry: _Entry, data: "mmap.mmap | bytearray | None") -> SavedShare:
    layout = json.loads(bytes(memory[entry.begin : entry.begin + entry.layout_bytes]))

    def tensor_of(placed: dict[str, Any]) -> Tensor | Piece:
        dtype, sizes = DTYPES[placed["dtype"]], placed["sizes"]
        if data is None:
            tensor = torch.empty(sizes, dtype=dtype, device="meta")
        else:
            tensor = _view(data, entry.data_begin + placed["begin"], dtype, sizes)
        if "offsets" not in placed:
            return tensor
        return Piece(tensor=tensor, offsets=tuple(placed["offsets"]), shape=tuple(placed["shape"]))

    read = {
        part: {name: tensor_of(placed) for name, placed in tensors.items()} for part, tensors in layout["parts"].items()
    }
    per_rank = {name: tensor for name, tensor in read[_PER_RANK].items() if isinstance(tensor, Tensor)}
    share = Share(
        rank=layout["rank"],
        parts={part: read[part] for part in PARTS},
        per_rank=per_rank,
        aliases=layout["aliases"],
        state=bytes(memory[entry.state_begin : entry.state_begin + entry.state_bytes]),
    )
    return SavedShare(share=share, is_spread=layout["is_spread"])


def _entry(memory: mmap.mmap, place: int) -> _Entry:
    return _Entry(*_ENTRY.unpack(memory[place * _ENTRY.size : (place + 1) * _ENTRY.size]))


def _view(memory: "mmap.mmap | bytearray", begin: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    count = prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).reshape(tuple(shape))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
