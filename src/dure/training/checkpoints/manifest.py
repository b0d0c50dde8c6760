"""Manifest of a checkpoint: its contents and files, with sizes and digests; written last.

The manifest seals itself: its last lines are the SHA-256 of every byte before them. They are compared byte by byte, so
that any changed bit, even in white space, is detected. It stays plain JSON, readable by a person or `jq`.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dure.errors import CheckpointDamaged, CheckpointMismatch
from dure.strategies.state.tensor_shard import Rectangle
from dure.training.checkpoints.durable_files import open_regular
from dure.training.checkpoints.safetensors_file import DTYPES

MANIFEST_NAME = "manifest.json"
MANIFEST_MAX_BYTES = 256 * 2**20
"""Size of a manifest of about a million tensors; larger files are refused, because they would only fill the memory."""
FORMAT_VERSION = 2
_READ_VERSIONS = (1, 2)

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.(safetensors|json)$")]
"""File name without a slash or a leading dot, so that a manifest cannot name a file outside its directory."""
Size = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileEntry(_Strict):
    """A file of the checkpoint, as its writer passed it to the system."""

    num_bytes: Size
    digest: str = Field(pattern=r"^(xxh3_128:[0-9a-f]{32}|sha256:[0-9a-f]{64})$")
    """Kind and digits of the digest of its bytes."""

    @model_validator(mode="before")
    @classmethod
    def _of_format_1(cls, found: Any) -> Any:
        """Read an entry of format 1, which had no other digest than SHA-256."""
        if not (isinstance(found, dict) and isinstance(found.get("sha256"), str)):
            return found
        others = {name: value for name, value in found.items() if name != "sha256"}
        return {**others, "digest": f"sha256:{found['sha256']}"}


class PieceEntry(_Strict):
    """A rectangular piece of a tensor, and the file that holds it under the tensor's name."""

    file: FileName
    offsets: tuple[Size, ...]
    sizes: tuple[Size, ...]


class TensorEntry(_Strict):
    """A whole tensor, and the pieces in which it was saved."""

    dtype: str
    shape: tuple[Size, ...]
    pieces: tuple[PieceEntry, ...] = Field(min_length=1)

    @property
    def is_whole(self) -> bool:
        """Return whether a single piece covers the tensor."""
        return len(self.pieces) == 1 and self.pieces[0].sizes == self.shape

    def fault(self) -> str | None:
        """Return why the pieces do not form the tensor, or None if they do."""
        for piece in self.pieces:
            if not len(piece.offsets) == len(piece.sizes) == len(self.shape):
                return "a piece has another number of dimensions"
            if any(o + s > n for o, s, n in zip(piece.offsets, piece.sizes, self.shape, strict=True)):
                return "a piece reaches beyond the tensor"
        if len({piece.file for piece in self.pieces}) != len(self.pieces):
            return "two pieces are in one file"  # a file has only one tensor of that name
        if len({(piece.offsets, piece.sizes) for piece in self.pieces}) != len(self.pieces):
            return "a piece appears twice"
        covered = sum(prod(piece.sizes) for piece in self.pieces)
        if covered != prod(self.shape):
            return f"pieces of {covered} items for {prod(self.shape)}"
        return "two pieces overlap" if _overlap(self.pieces) else None


def _overlap(pieces: Sequence[PieceEntry]) -> bool:
    """Return whether any two pieces have an element in common."""
    ordered = sorted(pieces, key=lambda piece: piece.offsets)
    while ordered:
        first, *ordered = ordered
        for other in ordered:
            # pieces that begin beyond its end in the first dimension follow each other
            if first.offsets and other.offsets[0] >= first.offsets[0] + first.sizes[0]:
                break
            if Rectangle(first.offsets, first.sizes).overlap(Rectangle(other.offsets, other.sizes)) is not None:
                return True
    return False


class PositionEntry(_Strict):
    """The `Position` of the checkpoint."""

    samples_seen: Size
    step: Size
    epoch: Size


class _Version(BaseModel):
    version: int


class Manifest(_Strict):
    """Everything about a checkpoint except its tensors and plain state."""

    format: Literal["dure-checkpoint"] = "dure-checkpoint"
    version: int = FORMAT_VERSION
    written_at: str
    """UTC time in ISO 8601."""
    written_with: dict[str, str]
    """Versions of torch and Python."""
    position: PositionEntry
    world_size: int = Field(ge=1)
    is_best: bool
    """True if this was the best by the chosen metric when saved; the newest such checkpoint is the best one."""
    metrics: Any
    """Evaluation at this position, as written by `state_tree.encode`."""
    model: dict[str, TensorEntry]
    aliases: dict[str, str]
    """Further names of tied tensors, each with the name under which the tensor is stored."""
    optimizer: dict[str, TensorEntry]
    files: dict[FileName, FileEntry]

    @property
    def num_bytes(self) -> int:
        """Bytes of the files, without the manifest."""
        return sum(entry.num_bytes for entry in self.files.values())

    def fault(self) -> str | None:
        """Return a contradiction within the manifest, or None."""
        in_files: dict[str, int] = {}
        for name, entry in [*self.model.items(), *self.optimizer.items()]:
            if fault := entry.fault():
                return f"{name}: {fault}"
            if missing := {piece.file for piece in entry.pieces} - self.files.keys():
                return f"{name} is in {min(missing)}, which is not among the files"
            if entry.dtype not in DTYPES:
                return f"{name} is of {entry.dtype}, which is no dtype"
            for piece in entry.pieces:
                in_files[piece.file] = in_files.get(piece.file, 0) + prod(piece.sizes) * DTYPES[entry.dtype].itemsize
        for file, num_bytes in in_files.items():
            if num_bytes > self.files[file].num_bytes:
                return f"{file} has {self.files[file].num_bytes} bytes for tensors of {num_bytes}"
        if both := files_of(self.model) & files_of(self.optimizer):
            return f"{min(both)} holds tensors of the model and of the optimiser"
        if wrong := [name for name, of in self.aliases.items() if of not in self.model]:
            return f"{wrong[0]} is an alias of a tensor that is not there"
        return None


def files_of(entries: Mapping[str, TensorEntry]) -> set[str]:
    """Return the files that hold some tensors."""
    return {piece.file for entry in entries.values() for piece in entry.pieces}


def seal(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest, ending with their own hash."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False)
    body = (text.removesuffix("\n}") + ",\n").encode()
    return body + _closing(body)


def _closing(body: bytes) -> bytes:
    return f' "sha256": "{sha256(body).hexdigest()}"\n}}\n'.encode()


def unseal(data: bytes) -> Manifest:
    """Parse the bytes that `seal` returned.

    Raises:
        CheckpointDamaged: A byte differs from what was written, or the contents contradict each other.
        CheckpointMismatch: A newer dure wrote it.
    """
    body = data[: -len(_closing(b""))]
    if data[len(body) :] != _closing(body):
        raise CheckpointDamaged(f"{MANIFEST_NAME} was altered or cut: its own SHA-256 does not fit")
    text = body.removesuffix(b",\n") + b"}"
    try:
        if (version := _Version.model_validate_json(text).version) not in _READ_VERSIONS:
            raise CheckpointMismatch(
                f"it has format {version} and this dure reads format {FORMAT_VERSION} and below: use the dure that "
                "wrote it"
            )
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise CheckpointDamaged(f"{MANIFEST_NAME} is not a manifest: {error}") from error
    if fault := manifest.fault():
        raise CheckpointDamaged(f"{MANIFEST_NAME} contradicts itself: {fault}")
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a checkpoint, but not its files.

    Raises:
        CheckpointDamaged: The manifest is missing or was altered.
        CheckpointMismatch: A newer dure wrote it.
    """
    with open(open_regular(directory / MANIFEST_NAME, at_most=MANIFEST_MAX_BYTES), "rb") as file:
        return unseal(file.read(MANIFEST_MAX_BYTES + 1))
