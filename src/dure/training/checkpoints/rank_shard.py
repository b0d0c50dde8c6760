"""Shard of a checkpoint that one rank writes: its tensors by file, and the bytes of the files."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from dure.documents import parse_json
from dure.errors import TaskInvalid
from dure.strategies.state.tensor_shard import TensorShard, as_shard, memory_of, whole
from dure.training.checkpoints.direct_file import Buffer
from dure.training.checkpoints.durable_files import write_new_file
from dure.training.checkpoints.finite_check import FiniteCheck
from dure.training.checkpoints.kept_tensors import check_apart, check_kind
from dure.training.checkpoints.manifest import FileEntry, PieceEntry, TensorEntry
from dure.training.checkpoints.safetensors_file import DTYPE_NAMES, file_buffers, lay_out
from dure.training.checkpoints.state import Snapshot
from dure.training.checkpoints.state_tree import NamedTensors, encode

PARTS = ("model", "optimizer")
STATE_NAME = "state.json"
_HEADER_BYTES = 256
"""Maximum header bytes for each tensor besides its names and shape, and again for all tensors together."""
TURN_BYTES = 4 * 2**20
"""Bytes of a file that are hashed and written at a time."""

PieceTable = dict[str, dict[str, Any]]
"""Pieces that a rank has of each part, by name: dtype, whole shape, offsets, sizes; plain JSON values."""


def rank_file_name(rank: int) -> str:
    """Return the name of the file for the state of a single rank."""
    return f"rank{rank}.safetensors"


def part_file_name(part: str, rank: int) -> str:
    """Return the name of the file that a rank writes for a part; without shards rank 0 writes the whole part."""
    return f"{part}.safetensors" if rank == 0 else f"{part}-{rank:05d}.safetensors"


@dataclass(kw_only=True)
class RankShard:
    """Tensors and files that one rank writes."""

    rank: int
    parts: dict[str, dict[str, Tensor | TensorShard]]
    """Tensors of `model` and `optimizer` that this rank must write, by name."""
    per_rank: dict[str, Tensor]
    aliases: dict[str, str] = field(default_factory=dict)
    state: bytes = b""
    """JSON of the state without tensors; rank 0 writes it."""
    steady: frozenset[str] = frozenset()
    """Names as in `Snapshot.steady`."""

    finite: frozenset[str] = frozenset()
    """Names as in `Snapshot.finite`."""

    def pieces(self) -> PieceTable:
        """Return the pieces among the tensors as plain JSON values, for the other ranks."""
        return {
            part: {
                name: {
                    "dtype": DTYPE_NAMES[value.tensor.dtype],
                    "shape": list(value.shape),
                    "offsets": list(value.offsets),
                    "sizes": list(value.tensor.shape),
                }
                for name, value in tensors.items()
                if isinstance(value, TensorShard)
            }
            for part, tensors in self.parts.items()
        }

    def keep_only(self, pieces: PieceTable) -> None:
        """Drop the pieces that are not in `pieces`, because a lower rank writes them."""
        for part, tensors in self.parts.items():
            for name in [name for name, value in tensors.items() if isinstance(value, TensorShard)]:
                if name not in pieces[part]:
                    del tensors[name]

    def steadiness(self) -> list[bool]:
        """Return, for each of `tensors`, whether only the optimiser's step changes it."""
        steady = [
            name in self.steady if part == "model" else bool(self.steady)
            for part, tensors in self.parts.items()
            for name in tensors
        ]
        return [*steady, *(False for _ in self.per_rank)]

    def files(self) -> dict[str, dict[str, Tensor | TensorShard]]:
        """Return the tensors of each safetensors file."""
        files = {part_file_name(part, self.rank): tensors for part, tensors in self.parts.items()}
        written = {name: tensors for name, tensors in files.items() if tensors or self.rank == 0}
        return {**written, rank_file_name(self.rank): dict(self.per_rank)}

    def tensors(self) -> list[Tensor]:
        """Return all tensors, part by part, with those of this rank alone at the end."""
        values = [value for tensors in self.parts.values() for value in tensors.values()]
        return [
            *(value.tensor if isinstance(value, TensorShard) else value for value in values),
            *self.per_rank.values(),
        ]

    def most_bytes(self) -> int:
        """Return an upper bound of the bytes of this rank's files; their exact layout would make training wait."""
        total = len(self.state)
        for tensors in self.files().values():
            total += _HEADER_BYTES
            for name, value in tensors.items():
                tensor = value.tensor if isinstance(value, TensorShard) else value
                total += tensor.nbytes + 2 * len(name.encode()) + _HEADER_BYTES + 16 * tensor.dim()
        return total

    def write(self, directory: Path, between: Callable[[], None]) -> dict[str, FileEntry]:
        """Write this rank's files, flush each to disk, and return their sizes and hashes.

        Parameters are checked while they are hashed, because no run can continue from weights that are not finite.

        Args:
            directory: Directory for the files.
            between: Called after every few megabytes; an exception from it ends the writing.

        Raises:
            DiskFull: There is no space.
            WeightsNotFinite: A parameter is not finite; the message names it.
        """
        written = {}
        model = part_file_name("model", self.rank)
        for name, mixed in self.files().items():
            tensors, offsets = _split(mixed)
            layout = lay_out(tensors, offsets)
            check = FiniteCheck({n: tensors[n].dtype for n in self.finite & tensors.keys()} if name == model else {})
            names = [None, *(tensor for tensor in layout.order if tensors[tensor].numel())]
            buffers = _in_turns(zip(names, file_buffers(tensors, layout), strict=True), check, between)
            size, digest = write_new_file(directory / name, buffers)
            written[name] = FileEntry(num_bytes=size, digest=digest)
        if self.rank == 0:
            size, digest = write_new_file(directory / STATE_NAME, [self.state])
            written[STATE_NAME] = FileEntry(num_bytes=size, digest=digest)
        return written

    def entries(self, part: str, pieces: list[PieceTable]) -> dict[str, TensorEntry]:
        """Return the manifest's entries of a part: rank 0's whole tensors and every rank's pieces.

        Args:
            part: `model` or `optimizer`.
            pieces: Pieces that each rank writes, in the order of ranks.
        """
        wholes = {name: value for name, value in self.parts[part].items() if isinstance(value, Tensor)}
        found = {name: _whole_entry(value, part_file_name(part, 0)) for name, value in wholes.items()}
        for rank, theirs in enumerate(pieces):
            for name, piece in theirs[part].items():
                entry = PieceEntry(
                    file=part_file_name(part, rank), offsets=tuple(piece["offsets"]), sizes=tuple(piece["sizes"])
                )
                before = found[name].pieces if name in found else ()
                found[name] = TensorEntry(dtype=piece["dtype"], shape=tuple(piece["shape"]), pieces=(*before, entry))
        return found


def _whole_entry(tensor: Tensor, file: str) -> TensorEntry:
    shape = tuple(tensor.shape)
    piece = PieceEntry(file=file, offsets=(0,) * len(shape), sizes=shape)
    return TensorEntry(dtype=DTYPE_NAMES[tensor.dtype], shape=shape, pieces=(piece,))


def _split(mixed: Mapping[str, Tensor | TensorShard]) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    tensors = {name: value.tensor if isinstance(value, TensorShard) else value for name, value in mixed.items()}
    return tensors, {name: value.offsets for name, value in mixed.items() if isinstance(value, TensorShard)}


def _in_turns(
    buffers: Iterable[tuple[str | None, Buffer]], check: FiniteCheck, between: Callable[[], None]
) -> Iterator[Buffer]:
    """Split buffers into blocks, so that hashed bytes are still cached when written, and a thread can be stopped."""
    for name, buffer in buffers:
        view = memoryview(buffer)
        for begin in range(0, len(view), TURN_BYTES):
            turn = view[begin : begin + TURN_BYTES]
            check(name, turn)
            yield turn
            between()


def without_copies(tables: list[PieceTable]) -> list[PieceTable]:
    """Assign a piece that several ranks have (a replicated tensor) to the lowest of them, and an empty one to none."""
    seen: set[tuple[Any, ...]] = set()
    kept: list[PieceTable] = []
    for table in tables:
        mine: PieceTable = {part: {} for part in table}
        for part, pieces in table.items():
            for name, piece in pieces.items():
                place = (part, name, *piece["offsets"], *piece["sizes"])
                if place not in seen and (0 not in piece["sizes"] or 0 in piece["shape"]):
                    mine[part][name] = piece
                seen.add(place)
        kept.append(mine)
    return kept


def shard_of(snapshot: Snapshot, rank: int, *, is_whole: bool = False) -> RankShard:
    """Return what a rank writes of a snapshot.

    Tied tensors of the model are written once, and their further names are kept as aliases.

    Args:
        snapshot: State of the run.
        rank: Rank that writes.
        is_whole: Whether it also writes what rank 0 would, because one of several hosts may be lost with its ranks.

    Raises:
        TaskInvalid: Model or optimiser hold something that cannot be saved without pickle.
    """
    try:
        model, aliases, model_extra = _model_parts(snapshot.model)
        is_writer = rank == 0 or is_whole or snapshot.is_spread
        optimizer = NamedTensors()
        state = {
            "optimizer": encode(dict(snapshot.optimizer), "optimizer", optimizer, (Tensor, TensorShard)),
            "model_extra": model_extra,
            "extra": encode(snapshot.extra, "extra"),
        }
        parts = {"model": model, "optimizer": dict(optimizer)}
        if snapshot.is_spread:
            parts = {
                part: {name: v if isinstance(v, TensorShard) else whole(v) for name, v in tensors.items()}
                for part, tensors in parts.items()
            }
        elif not is_writer:
            parts = {
                part: {name: value for name, value in tensors.items() if isinstance(value, TensorShard)}
                for part, tensors in parts.items()
            }
        share = RankShard(
            rank=rank,
            parts=parts,
            per_rank=dict(snapshot.per_rank),
            aliases=aliases,
            steady=snapshot.steady,
            finite=snapshot.finite,
        )
        share.state = json.dumps(state, ensure_ascii=False, allow_nan=False).encode() if is_writer else b""
        for name, value in [*model.items(), *parts["optimizer"].items(), *share.per_rank.items()]:
            check_kind(name, value)
        check_apart(parts["optimizer"], model)
    except TypeError as error:
        raise TaskInvalid(
            f"this run cannot be checkpointed: {error}; nothing is pickled, so a model's and an optimiser's state may"
            " hold tensors, numbers, strings, lists, tuples and dictionaries, and nothing of a class derived from these"
        ) from error
    return share


def merged_state(states: Sequence[bytes]) -> bytes:
    """Merge the state without tensors of several ranks; the first rank that has an entry provides it.

    Args:
        states: `RankShard.state` of every rank.
    """
    merged, *others = [parse_json(state, may_repeat_keys=True, most_depth=None) for state in states]
    for other in others:
        merged["model_extra"] = {**other["model_extra"], **merged["model_extra"]}
        ours, theirs = merged["optimizer"], other["optimizer"]
        ours["state"] = {**theirs["state"], **ours["state"]}
        if len(ours["groups"]) != len(theirs["groups"]):
            raise TypeError(f"ranks have {len(ours['groups'])} and {len(theirs['groups'])} parameter groups")
        ours["groups"] = [
            {**more, **group, "params": list(dict.fromkeys([*group["params"], *more["params"]]))}
            for group, more in zip(ours["groups"], theirs["groups"], strict=True)
        ]
    return json.dumps(merged, ensure_ascii=False, allow_nan=False).encode()


def _model_parts(model: Mapping[str, Any]) -> tuple[dict[str, Tensor | TensorShard], dict[str, str], dict[str, Any]]:
    tensors: dict[str, Tensor | TensorShard] = {}
    aliases: dict[str, str] = {}
    extra: dict[str, Any] = {}
    first_names: dict[Any, str] = {}
    for name, value in model.items():
        if not isinstance(value, Tensor | TensorShard):
            extra[name] = encode(value, f"the model's {name}")
            continue
        piece = as_shard(value)
        first = first_names.setdefault(memory_of(piece) or name, name)
        if first == name:
            tensors[name] = piece
        else:
            aliases[name] = first
    return tensors, aliases, extra
