"""Writer of a rank's snapshots, in the layout of `memory`."""

import ctypes
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dure.host.device_kinds import device_kind
from dure.torchcompat.devices import pin_host_memory, unpin_host_memory
from dure.torchcompat.tensors import copy_all
from dure.training.checkpoints.staging import aligned
from dure.training.checkpoints.state import Position
from dure.training.snapshots.device_copies import DeviceCopies, can_copy_beside
from dure.training.snapshots.memory import (
    ENTRY,
    HEADER_BYTES,
    NUM_PLACES,
    Entry,
    Origin,
    ShareLayout,
    entry_of,
    view_of,
)

_SMALL_BYTES = 2**18
"""Size below which a copy by torch costs more than the copying itself."""


@dataclass(kw_only=True)
class _Copies:
    """Prepared copies of tensors to their places."""

    tensors: list[Tensor] = field(default_factory=list)
    """Tensors for which the copies were prepared."""
    addresses: list[int] = field(default_factory=list)
    """Addresses of all places."""
    moves: list[tuple[int, int, int]] = field(default_factory=list)
    """Target address, source address and bytes of each small tensor on the host."""
    targets: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    """Tensors copied by torch."""
    away_targets: list[Tensor] = field(default_factory=list)
    away: list[Tensor] = field(default_factory=list)
    """Tensors on accelerators."""
    away_numbers: list[int] = field(default_factory=list)
    """Indices of these tensors in the layout."""

    def add(self, target: Tensor, source: Tensor, number: int) -> None:
        """Choose how a tensor is copied."""
        if can_copy_beside(source):
            self.away_targets.append(target)
            self.away.append(source)
            self.away_numbers.append(number)
        elif source.nbytes < _SMALL_BYTES and is_plain_memory(source):
            self.moves.append((target.data_ptr(), source.data_ptr(), source.nbytes))
        else:
            self.targets.append(target)
            self.sources.append(source)


def is_plain_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is in host memory, with its values in order."""
    is_here = tensor.device.type == "cpu" and tensor.is_contiguous()
    return is_here and not tensor.is_conj() and not tensor.is_neg()


class SnapshotWriter:
    """Writer of a rank's snapshots."""

    def __init__(
        self,
        descriptor: int,
        kept: Position | None = None,
        num_places: int = NUM_PLACES,
        origin: Origin | None = None,
    ) -> None:
        """Take over the memory of an earlier round.

        Args:
            descriptor: Descriptor of the memory.
            kept: Position from which this round continues; its snapshot is overwritten last. All others are forgotten,
                because another rank may not have them.
            num_places: Maximum number of snapshots, the same as in earlier rounds.
            origin: Rank, world size and round of the writer, if the rank may differ in the next round.
        """
        self._descriptor = descriptor
        self._origin = origin or Origin()
        self._device_copies = DeviceCopies()
        self._copied: int | None = None
        """Place whose tensors are being copied from accelerators; None if there is none."""
        self._is_pinned: bool | None = None
        """True if the memory is pinned; None if that was not tried."""
        if os.fstat(descriptor).st_size < HEADER_BYTES:
            os.ftruncate(descriptor, HEADER_BYTES)
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._entries = [entry_of(self._memory, place) for place in range(num_places)]
        self._whole: dict[int, int] = {}
        """Samples seen by the complete snapshots, by their places."""
        for place, entry in enumerate(self._entries):
            if entry.is_whole and entry.position == kept:
                self._whole[place] = entry.samples_seen
            else:
                self._mark(place, is_whole=0)
        self._laid_out: list[ShareLayout | None] = [None] * num_places
        self._targets: list[list[Tensor]] = [[] for _ in range(num_places)]
        self._copies = [_Copies() for _ in range(num_places)]

    def write(
        self,
        layout: ShareLayout,
        tensors: list[Tensor],
        state: bytes,
        position: Position,
        trusted_samples: int | None = None,
        steady: Sequence[bool] | None = None,
        own: Sequence[Tensor] = (),
        replica_digest: int = 0,
    ) -> None:
        """Copy a share's current tensors over the oldest snapshot that need not be kept.

        Args:
            layout: Layout of the share; fast if it is the same object as before.
            tensors: Tensors in the order of the layout; also pass the same object again if they are in the same memory.
            state: `RankShard.state`: the state without tensors.
            position: Position of the run.
            trusted_samples: Position up to which the newest snapshot is kept, if that and the newest both have a place.
            steady: True for each tensor that changes only after `complete`; such tensors on accelerators are copied
                until then. None to complete all copies before returning.
            own: Tensors at the end of the layout, new ones each time.
            replica_digest: `Entry.replica_digest`.
        """
        self.complete()
        place = self._place(trusted_samples)
        entry = self._entries[place]
        self._whole.pop(place, None)
        self._mark(place, is_whole=0)
        if self._laid_out[place] is not layout or entry.state_begin + len(state) > entry.data_begin:
            self._lay_out(place, layout, 2 * len(state))
            entry = self._entries[place]
        self._copy(place, tensors, own, steady)
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
            replica_digest=replica_digest,
        )
        self._put(place)
        self._copied = place
        if steady is None or self._device_copies.is_complete:
            self.complete()

    def complete(self) -> bool:
        """Complete the snapshot being written; return whether its tensors stayed unchanged.

        If they did not, the snapshot is discarded.
        """
        place, self._copied = self._copied, None
        if place is None:
            return True
        is_same = self._device_copies.complete()
        if is_same:
            self._mark(place, is_whole=1)
            self._whole[place] = self._entries[place].samples_seen
        return is_same

    @property
    def is_complete(self) -> bool:
        """Return whether the tensors may change."""
        return self._copied is None

    def _copy(self, place: int, tensors: list[Tensor], own: Sequence[Tensor], steady: Sequence[bool] | None) -> None:
        copies, targets = self._copies[place], self._targets[place]
        if copies.tensors is not tensors:
            addresses = [target.data_ptr() for target in targets]
            copies = self._copies[place] = _Copies(tensors=tensors, addresses=addresses)
            for number, tensor in enumerate(tensors):
                copies.add(targets[number], tensor, number)
        others = _Copies()
        for number, tensor in enumerate(own, len(tensors)):
            if tensor.nbytes < _SMALL_BYTES and is_plain_memory(tensor):
                ctypes.memmove(copies.addresses[number], tensor.data_ptr(), tensor.nbytes)
            else:
                others.add(targets[number], tensor, number)
        for move in copies.moves:
            ctypes.memmove(*move)
        away = copies.away + others.away
        if away:
            self._pin(away[0].device.type)
            numbers = copies.away_numbers + others.away_numbers
            flags = [steady is not None and steady[number] for number in numbers]
            self._device_copies.begin(copies.away_targets + others.away_targets, away, flags)
        if copies.targets or others.targets:
            with torch.no_grad():
                copy_all(copies.targets + others.targets, copies.sources + others.sources)

    def _place(self, trusted_samples: int | None) -> int:
        """Choose the place to overwrite: an incomplete one, or else the oldest that need not be kept."""
        places = range(len(self._entries))
        if trusted_samples is None:
            return min(places, key=lambda place: self._whole.get(place, -1))
        by_age = sorted(places, key=lambda place: self._whole.get(place, -1))
        trusted = [p for p in by_age if p in self._whole and self._whole[p] <= trusted_samples]
        kept = {*by_age[-1:], *trusted[-1:]}
        return next((place for place in by_age if place not in kept), by_age[0])

    def _lay_out(self, place: int, layout: ShareLayout, state_bytes: int) -> None:
        state_begin = aligned(len(layout.text))
        data_begin = aligned(state_begin + state_bytes)
        needed = data_begin + layout.num_bytes
        old = self._entries[place]
        begin, room = old.begin, old.num_bytes
        if room < needed:
            # a new place at the end: the other one must stay as it is
            begin, room = aligned(os.fstat(self._descriptor).st_size), needed
            os.ftruncate(self._descriptor, begin + room)
            self._map_again()
        entry = Entry(
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
        self._find_targets(place)

    def _find_targets(self, place: int) -> None:
        layout, begin = self._laid_out[place], self._entries[place].data_begin
        if layout is not None:
            self._targets[place] = [
                view_of(self._memory, begin + at, dtype, shape)
                for at, (dtype, shape) in zip(layout.begins, layout.kinds, strict=True)
            ]
        self._copies[place] = _Copies()

    def _map_again(self) -> None:
        if self._is_pinned:
            unpin_host_memory(self._address())
        self._is_pinned = None
        self._memory = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
        for place in range(len(self._entries)):
            self._find_targets(place)

    def _pin(self, kind: str) -> None:
        """Pin the memory once, because copies of such a device into other memory would block the host."""
        if self._is_pinned is None:
            can_pin = device_kind(kind).pins_any_memory
            self._is_pinned = can_pin and pin_host_memory(self._address(), len(self._memory))

    def _address(self) -> int:
        return view_of(self._memory, 0, torch.uint8, [1]).data_ptr()

    def _put(self, place: int) -> None:
        self._memory[place * ENTRY.size : (place + 1) * ENTRY.size] = ENTRY.pack(*self._entries[place])

    def _mark(self, place: int, *, is_whole: int) -> None:
        struct.pack_into("<q", self._memory, place * ENTRY.size, is_whole)
