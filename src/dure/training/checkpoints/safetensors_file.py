"""Safetensors files for checkpoints: size known in advance, hashed while written, parsed from checked bytes.

The safetensors library does not flush a file to disk, and reads it by name, a second time after any check. This is a
separate implementation of the format (https://huggingface.co/docs/safetensors, "Format"); a test compares both.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from dure.documents import parse_json
from dure.errors import CheckpointDamaged
from dure.torchcompat.tensors import bytes_of
from dure.training.checkpoints.direct_file import Buffer

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

DCP_SHARDING_KEY = "DCP_SHARDING_INFO"
"""Metadata key from which torch's `HuggingFaceStorageReader` reads the offsets of a piece; a test reads our files with
it."""

PREFIX_BYTES = 8
"""Bytes of the header's length, an unsigned little-endian integer before the header."""
HEADER_MAX_BYTES = 256 * 2**20
"""Maximum size of a header, enough for about a million tensors."""


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """Layout of a file to be written."""

    header: bytes
    order: tuple[str, ...]
    """Names in the order of their bytes: larger items first, so that every tensor is aligned to its item size."""
    num_bytes: int


def lay_out(tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]] | None = None) -> FileLayout:
    """Choose the place of each tensor in a file.

    Args:
        tensors: Tensors of the file, by name.
        offsets: Offsets of tensors that are pieces of larger ones; zeros for absent names.

    Raises:
        TypeError: A tensor has a dtype that safetensors does not support.
    """
    for name, tensor in tensors.items():
        check_dtype(name, tensor)
    order = tuple(sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)))
    header: dict[str, Any] = {"__metadata__": _metadata(tensors, offsets or {})}
    end = 0
    for name in order:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(PREFIX_BYTES, "little")
    return FileLayout(header=prefix + text, order=order, num_bytes=PREFIX_BYTES + len(text) + end)


def check_dtype(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that no file can hold.

    Raises:
        TypeError: The dtype is not supported; the message names the tensor.
    """
    if tensor.dtype not in DTYPE_NAMES:
        raise TypeError(f"tensor {name} has dtype {tensor.dtype}, which safetensors files cannot hold")


def _metadata(tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]]) -> dict[str, str]:
    metadata = {"format": "pt"}
    if offsets:
        begins = {name: {"saved_offsets": list(offsets.get(name, [0] * t.dim()))} for name, t in tensors.items()}
        metadata[DCP_SHARDING_KEY] = json.dumps(begins)
    return metadata


def file_buffers(tensors: Mapping[str, Tensor], layout: FileLayout) -> Iterator[Buffer]:
    """Yield the bytes of a file part by part; at most one tensor is copied (from a device, or to be contiguous)."""
    yield layout.header
    for name in layout.order:
        if tensors[name].numel():
            yield bytes_of(tensors[name].detach().to("cpu")).numpy().data


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """Place of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte from the beginning of the file."""
    end: int


def read_header(text: bytes, num_bytes: int) -> dict[str, TensorPlace]:
    """Return the places of the tensors in a file.

    Args:
        text: Header, without its length in front.
        num_bytes: Bytes of the whole file.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: The header is not valid.
    """
    header = parse_json(text)
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        if not all(type(number) is int for number in (*shape, *entry["data_offsets"])):
            raise ValueError(f"an entry has {entry}, which are no whole numbers")
        first, end = (PREFIX_BYTES + len(text) + offset for offset in entry["data_offsets"])
        is_within = PREFIX_BYTES + len(text) <= first and end <= num_bytes
        if min(shape, default=0) < 0 or not is_within or end - first != prod(shape) * dtype.itemsize:
            raise ValueError(f"an entry of shape {list(shape)} cannot stand at bytes {entry['data_offsets']}")
        places[name] = TensorPlace(name=name, dtype=dtype, shape=shape, begin=first, end=end)
    in_order = sorted(places.values(), key=lambda place: (place.begin, place.end))
    if any(place.end > following.begin for place, following in pairwise(in_order)):
        raise ValueError("two of its tensors share bytes")
    return places


def parse(data: bytearray, name: str) -> dict[str, Tensor]:
    """Return the tensors of a file as views of its bytes, without a copy.

    Args:
        data: Bytes of the whole file.
        name: Name of the file, for error messages.

    Raises:
        CheckpointDamaged: The bytes are not a safetensors file.
    """
    begin = PREFIX_BYTES + int.from_bytes(data[:PREFIX_BYTES], "little")
    if len(data) < PREFIX_BYTES or begin > len(data):
        raise CheckpointDamaged(f"{name} is no safetensors file: its header does not fit into its {len(data)} bytes")
    try:
        places = read_header(bytes(data[PREFIX_BYTES:begin]), len(data))
        return {key: _view(data, place) for key, place in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointDamaged(f"{name} is no safetensors file: {error}") from error


def _view(data: bytearray, place: TensorPlace) -> Tensor:
    if place.begin == place.end:
        return torch.empty(place.shape, dtype=place.dtype)
    if place.begin % place.dtype.itemsize:
        return torch.frombuffer(data[place.begin : place.end], dtype=place.dtype).reshape(place.shape)
    count = prod(place.shape)
    return torch.frombuffer(data, dtype=place.dtype, count=count, offset=place.begin).reshape(place.shape)
