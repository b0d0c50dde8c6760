"""Sequential reader of a safetensors file: everything is hashed, and only what is needed is kept.

A rank that needs a part of a file thus verifies the whole file, but holds only that part and one block.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from dure.errors import CheckpointDamaged
from dure.strategies.state.tensor_shard import Rectangle
from dure.torchcompat.tensors import bytes_of
from dure.training.checkpoints.durable_files import FileDigest, check_digest, open_regular, read_some
from dure.training.checkpoints.manifest import FileEntry
from dure.training.checkpoints.safetensors_file import (
    DTYPE_NAMES,
    HEADER_MAX_BYTES,
    PREFIX_BYTES,
    TensorPlace,
    read_header,
)

BLOCK_BYTES = 8 * 2**20
"""Bytes that are read and hashed at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Memory for a part of a tensor in a file."""

    part: Rectangle
    """Part as a rectangle in the tensor of the file."""
    values: Tensor
    """CPU tensor with the part's sizes."""


def read_tensors(
    path: Path, file: FileEntry, held: Mapping[str, tuple[str, tuple[int, ...]]], targets: Mapping[str, Target]
) -> None:
    """Read a file and fill the targets, which may be used only after this returns.

    Args:
        path: Path of the file.
        file: Its size and hash.
        held: Tensors that it must hold: dtype and sizes, by name.
        targets: Targets for some of these tensors, by name.

    Raises:
        CheckpointDamaged: The file is missing or altered, or does not hold what it must.
    """
    with _opened(path, file) as stream:
        fault = None
        try:
            places = _places(stream, path.name, file.num_bytes, held)
            for place in sorted(places.values(), key=lambda place: place.begin):
                stream.skip_to(place.begin)
                if place.name in targets and place.end > place.begin:
                    _fill(stream, place, targets[place.name])
        except _ContentsInvalid as error:
            fault = error  # an altered file may look like this, too
        stream.skip_to(file.num_bytes)
        check_digest(path, stream.digest, file.digest)
        if fault is not None:
            raise CheckpointDamaged(str(fault))


class _ContentsInvalid(Exception):
    """The file is not one that dure would write for this manifest."""


class _Stream:
    """Bytes of a file in order, each hashed as it is read."""

    def __init__(self, path: Path, descriptor: int, digest: FileDigest) -> None:
        self.digest = digest
        self._path = path
        self._descriptor = descriptor
        self._position = 0
        self._block = memoryview(bytearray(0))

    def read_into(self, view: memoryview) -> None:
        begin = 0
        while begin < len(view):
            got = read_some(self._descriptor, view[begin : begin + BLOCK_BYTES], self._path)
            if not got:
                raise CheckpointDamaged(f"{self._path.name} ended after {self._position + begin} bytes")
            self.digest.update(view[begin : begin + got])
            begin += got
        self._position += len(view)

    def block(self, num_bytes: int) -> memoryview:
        """Return the next bytes, valid until the next call."""
        if len(self._block) < num_bytes:
            self._block = memoryview(bytearray(max(num_bytes, min(BLOCK_BYTES, 2 * num_bytes))))
        self.read_into(self._block[:num_bytes])
        return self._block[:num_bytes]

    def skip_to(self, position: int) -> None:
        if position < self._position:
            raise _ContentsInvalid(f"{self._path.name} is no safetensors file: two of its tensors share bytes")
        while self._position < position:
            self.block(min(BLOCK_BYTES, position - self._position))


@contextmanager
def _opened(path: Path, file: FileEntry) -> Iterator[_Stream]:
    descriptor = open_regular(path, file.num_bytes)
    try:
        yield _Stream(path, descriptor, FileDigest(file.digest))
    finally:
        os.close(descriptor)


def _places(
    stream: _Stream, name: str, num_bytes: int, held: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, TensorPlace]:
    if num_bytes < PREFIX_BYTES:
        raise _ContentsInvalid(f"{name} is no safetensors file: it has {num_bytes} bytes")
    length = int.from_bytes(stream.block(PREFIX_BYTES), "little")
    if length > min(num_bytes - PREFIX_BYTES, HEADER_MAX_BYTES):
        raise _ContentsInvalid(f"{name} is no safetensors file: its header does not fit into its {num_bytes} bytes")
    try:
        places = read_header(bytes(stream.block(length)), num_bytes)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _ContentsInvalid(f"{name} is no safetensors file: {error}") from error
    for tensor, (dtype, sizes) in held.items():
        place = places.get(tensor)
        if place is None or place.shape != sizes or DTYPE_NAMES[place.dtype] != dtype:
            raise _ContentsInvalid(f"{name} does not hold {tensor} as the manifest says")
    return places


def _fill(stream: _Stream, place: TensorPlace, target: Target) -> None:
    """Read a tensor of the file, and keep the target's part of it."""
    if target.part.sizes == place.shape and target.values.is_contiguous():
        stream.read_into(bytes_of(target.values).numpy().data)
        return
    # read in blocks of rows, in the outermost dimension whose rows fit into a block
    sizes, last = place.shape, len(place.shape) - 1
    row_bytes = [prod(sizes[dim + 1 :]) * place.dtype.itemsize for dim in range(last + 1)]
    cut = next(dim for dim in range(last + 1) if row_bytes[dim] <= BLOCK_BYTES or dim == last)
    num_rows = max(1, BLOCK_BYTES // row_bytes[cut])
    for outer in product(*map(range, sizes[:cut])):
        for begin in range(0, sizes[cut], num_rows):
            count = min(num_rows, sizes[cut] - begin)
            block = Rectangle(
                (*outer, begin, *(0 for _ in sizes[cut + 1 :])), (*(1 for _ in outer), count, *sizes[cut + 1 :])
            )
            data = stream.block(count * row_bytes[cut])
            if (common := block.overlap(target.part)) is not None:
                values = torch.frombuffer(data, dtype=place.dtype).view(block.sizes)
                target.values[common.within(target.part)].copy_(values[common.within(block)])
