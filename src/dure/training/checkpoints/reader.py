"""Reader of checkpoints, which uses nothing before all needed bytes have been checked."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.documents import DocumentInvalid, parse_json
from dure.errors import CheckpointDamaged, CheckpointMismatch
from dure.own_files import sync_folder
from dure.strategies.state.optimizer import optimizer_from_names
from dure.strategies.state.tensor_shard import Needs, SavedTensor, TensorShard, own_shard, whole_buffers
from dure.terminal import few
from dure.torchcompat.tensors import bytes_of
from dure.training.checkpoints.durable_files import (
    check_file,
    raise_if_full,
    read_verified,
    write_new_file,
)
from dure.training.checkpoints.manifest import Manifest, PositionEntry, TensorEntry, read_manifest
from dure.training.checkpoints.needed_tensors import read_part, wanted_parts
from dure.training.checkpoints.rank_shard import (
    PARTS,
    STATE_NAME,
    RankShard,
    merged_state,
    part_file_name,
    rank_file_name,
    without_copies,
)
from dure.training.checkpoints.safetensors_file import DTYPE_NAMES, DTYPES, file_buffers, lay_out, parse
from dure.training.checkpoints.state import Position
from dure.training.checkpoints.state_tree import decode

FEW = 5
"""Maximum names of each kind in an error message."""


def verify(path: Path) -> Manifest:
    """Check every byte of a checkpoint and return its manifest.

    Raises:
        CheckpointDamaged: Something is missing, truncated or altered; the message names checkpoint and file.
        CheckpointMismatch: A newer dure wrote it.
    """
    try:
        manifest = read_manifest(path)
        for name, entry in manifest.files.items():
            check_file(path / name, entry.num_bytes, entry.digest)
    except (CheckpointDamaged, CheckpointMismatch) as error:
        raise _named(error, path.name) from error
    return manifest


def _named(error: CheckpointDamaged | CheckpointMismatch, name: str) -> CheckpointDamaged | CheckpointMismatch:
    if isinstance(error, CheckpointDamaged):
        return CheckpointDamaged(f"checkpoint {name} is damaged: {error}")
    return CheckpointMismatch(f"checkpoint {name} does not fit: {error}")


class Checkpoint:
    """A checkpoint whose needed parts were read once, checked, and are held in memory.

    The checked bytes themselves are held, and nothing is read again. Parts are released once they are loaded.
    """

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        state: Mapping[str, Any],
        held: Mapping[str, Mapping[str, list[TensorShard]]],
        own: Mapping[str, Tensor],
        first: Mapping[str, Tensor],
    ) -> None:
        """Hold the parts that were read.

        Args:
            name: Name of the checkpoint, for error messages.
            manifest: Its manifest.
            state: State without tensors.
            held: For `model` and `optimizer`, the pieces read of each tensor.
            own: State of this rank alone.
            first: State of rank 0 alone.
        """
        self.name = name
        self.manifest = manifest
        self._state = state
        self._held = held
        self._own = own
        self._first = first

    @classmethod
    def read(cls, path: Path, *, rank: int = 0, weights_only: bool = False, needs: Needs | None = None) -> "Checkpoint":
        """Read and check a checkpoint.

        Args:
            path: Directory of the checkpoint.
            rank: Rank whose own state is read, if the checkpoint has one.
            weights_only: Whether to read only the model, for an evaluation or an export.
            needs: Parts to read; None for everything. Files without such parts are not read.

        Raises:
            CheckpointDamaged: Something needed is missing, truncated or altered; the message names it.
            CheckpointMismatch: A newer dure wrote it.
        """
        try:
            manifest = read_manifest(path)
            state = _parse_state(bytes(_read(path, manifest, STATE_NAME)))
            _check_state(state, manifest, weights_only=weights_only)
            parts = PARTS[:1] if weights_only else PARTS
            wanted = wanted_parts(manifest, state, needs, parts)
            held = {part: read_part(path, manifest, getattr(manifest, part), wanted[part]) for part in parts}
            own, first = ({} if weights_only else _read_own(path, manifest, number) for number in (rank, 0))
        except (CheckpointDamaged, CheckpointMismatch) as error:
            raise _named(error, path.name) from error
        return cls(path.name, manifest, state, held, own, first)

    def take_in(self, share: RankShard, needs: Needs) -> None:
        """Replace meta tensors by copies of the needed parts of a share.

        Args:
            share: One of the shares that make up the checkpoint.
            needs: Parts that the rank loads.
        """
        wanted = wanted_parts(self.manifest, self._state, needs, PARTS)
        for part, tensors in share.parts.items():
            for name, value in tensors.items():
                piece, pieces = own_shard(value), self._held[part].get(name, [])
                missing = [n for n, one in enumerate(pieces) if one.tensor.is_meta and one.rectangle == piece.rectangle]
                for number in missing:
                    needed = wanted[part].get(name)
                    common = None if needed is None else piece.rectangle.overlap(needed)
                    pieces[number : number + 1] = [] if common is None else [piece.cut(common)]

    @property
    def position(self) -> Position:
        """Position of the checkpoint in the run."""
        return Position(**self.manifest.position.model_dump())

    @property
    def metrics(self) -> Any:
        """Evaluation saved with the checkpoint."""
        return decode(self.manifest.metrics)

    @property
    def extra(self) -> Any:
        """Plain values saved with the checkpoint."""
        return decode(self._state["extra"])

    @property
    def optimizer(self) -> dict[str, Any]:
        """Optimiser's state by parameter names, with whole tensors on the CPU."""
        return self._optimizer(SavedTensor.whole)

    @property
    def own(self) -> dict[str, Any]:
        """Saving strategy's own state apart from the optimiser's, with whole tensors on the CPU."""
        own = self._state["optimizer"].get("own", {})
        return dict(decode(own, lambda name: self._saved("optimizer", name).whole()))

    def _optimizer(self, of: Callable[[SavedTensor], Any]) -> dict[str, Any]:
        # a tensor that occurs in several places stays one tensor
        return dict(decode(self._state["optimizer"], functools.cache(lambda name: of(self._saved("optimizer", name)))))

    def per_rank(self, world_size: int) -> dict[str, Tensor] | None:
        """Return the state of this rank alone, or None if the checkpoint is of another number of ranks."""
        if self.manifest.world_size != world_size:
            return None
        return {name: tensor.clone() for name, tensor in self._own.items()}

    def of_rank0(self) -> dict[str, Tensor]:
        """Return the state of rank 0 alone, for ranks without state of their own."""
        return {name: tensor.clone() for name, tensor in self._first.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return every tensor of the model, whole and under all its names; tied ones are the same tensor."""
        found = {name: self._saved("model", name).whole() for name in self.manifest.model}
        return found | {alias: found[name] for alias, name in self.manifest.aliases.items()}

    def _saved(self, part: str, name: str) -> SavedTensor:
        entry: TensorEntry = getattr(self.manifest, part)[name]
        pieces = self._held[part].get(name, [])
        return SavedTensor(dtype=DTYPES[entry.dtype], shape=entry.shape, shards=pieces)

    def load_model(self, model: nn.Module, *, is_part: bool = False) -> None:
        """Copy the weights into a model on any device and with any sharding; either all of them or none.

        Args:
            model: Model itself, not wrapped.
            is_part: Whether the model is a part of the saved one, with the same names as there (a pipeline's stage).

        Raises:
            CheckpointMismatch: The checkpoint is of another model; the message says which tensors differ.
        """
        wanted = model.state_dict()
        late = self._late_buffers(model)
        self._check_fits(wanted | late, is_part=is_part)
        for name, buffer in late.items():
            path, _, own = name.rpartition(".")
            model.get_submodule(path)._buffers[own] = buffer
        wanted = model.state_dict() if late else wanted
        extra = self._state["model_extra"]
        state: dict[str, Any] = {name: decode(value) for name, value in extra.items() if name in wanted}
        tensor = functools.cache(lambda name: self._saved("model", name).whole())
        for name, target in wanted.items():
            if isinstance(target, Tensor):
                own = self.manifest.aliases.get(name, name)
                is_sharded = hasattr(target, "__create_chunk_list__")
                state[name] = _like(target, self._saved("model", own)) if is_sharded else tensor(own)
        self._check_ties(wanted, state)
        for pieces in self._held["model"].values():
            pieces.clear()
        model.load_state_dict(state, strict=True)

    def _late_buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """Return new buffers, to be filled, for buffers that had another shape when saved, or are None now."""
        found: dict[str, Tensor] = {}
        device = next((parameter.device for parameter in model.parameters()), None)
        for name, buffer in whole_buffers(model).items():
            entry = self.manifest.model.get(self.manifest.aliases.get(name, name))
            if entry is not None and (buffer is None or tuple(buffer.shape) != entry.shape):
                at = device if buffer is None else buffer.device
                found[name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=at)
        return found

    def _check_fits(self, wanted: Mapping[str, Any], *, is_part: bool) -> None:
        aliases, entries = self.manifest.aliases, self.manifest.model
        had = {name: entries[aliases.get(name, name)] for name in [*entries, *aliases]}
        has = {name: value for name, value in wanted.items() if isinstance(value, Tensor)}
        if is_part:
            had = {name: entry for name, entry in had.items() if name in has}
        extra = {name for name in self._state["model_extra"] if name in wanted or not is_part}
        others = extra ^ (wanted.keys() - has.keys())
        shapes = [
            f"{name} ({_describe(had[name].dtype, had[name].shape)} in the checkpoint,"
            f" {_describe(DTYPE_NAMES.get(value.dtype, str(value.dtype)), tuple(value.shape))} in the model)"
            for name, value in has.items()
            if name in had
            and (had[name].shape != tuple(value.shape) or had[name].dtype != DTYPE_NAMES.get(value.dtype))
        ]
        faults = [
            *_listed("that the checkpoint lacks", [name for name in has if name not in had]),
            *_listed("that the model lacks", [name for name in had if name not in has]),
            *_listed("of another shape or dtype", shapes),
            *_listed("of extra state on one side only", sorted(others)),
        ]
        if faults:
            raise CheckpointMismatch(
                f"checkpoint {self.name} is of another model: {'; '.join(faults)}. Build the model as the run that"
                " saved it did (the same task and task options), or start a new run"
            )

    def _check_ties(self, wanted: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Refuse to load two different tensors into one tied tensor, where the last would win."""
        first: dict[int, str] = {}
        for name, target in wanted.items():
            if not isinstance(target, Tensor) or target.numel() == 0 or hasattr(target, "__create_chunk_list__"):
                continue
            other = first.setdefault(hash((target.data_ptr(), target.shape, target.stride())), name)
            if (
                other != name
                and state[other] is not state[name]
                and not torch.equal(bytes_of(state[other]), bytes_of(state[name]))
            ):
                raise CheckpointMismatch(
                    f"checkpoint {self.name} is of another model: {other} and {name} are one tensor in the model"
                    " and two different ones in the checkpoint"
                )

    def load_optimizer(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        whole: Sequence[Collection[str]] | None = None,
        cuts: Mapping[str, TensorShard] | None = None,
        has_state: bool = True,
    ) -> None:
        """Load the saved state into an optimiser over the model's parameters, bit for bit.

        Args:
            model: Model itself, not wrapped.
            optimizer: Optimiser built like the saved one.
            whole: Names of all parameters, by group, if the optimiser has only one rank's part of them.
            cuts: Shards of the saved parameters that the model's parameters are, by name, if these do not show it
                themselves.
            has_state: Whether this rank keeps state of parameters; if not, other ranks do.

        Raises:
            CheckpointMismatch: The optimiser's parameter groups are not the saved ones.
        """
        try:
            saved = self._optimizer(lambda saved: saved)
            state = saved["state"] if has_state else {}
            optimizer_from_names(model, optimizer, {**saved, "state": state}, whole=whole, cuts=cuts)
        except CheckpointMismatch as error:
            raise _named(error, self.name) from error


def checkpoint_of(shares: Sequence[RankShard], position: Position, rank: int) -> Checkpoint:
    """Return the checkpoint that ranks would have written, from their shares.

    Args:
        shares: Shares of all ranks, in the order of ranks.
        position: Position of the shares in the run.
        rank: Rank whose own state is wanted.
    """
    pieces = without_copies([share.pieces() for share in shares])
    is_spread = len(shares) > 1 and bool(shares[1].state)
    states = [share.state for share in shares] if is_spread else [shares[0].state]
    manifest = Manifest(
        written_at="",
        written_with={},
        position=PositionEntry(samples_seen=position.samples_seen, step=position.step, epoch=position.epoch),
        world_size=len(shares),
        is_best=False,
        metrics=None,
        model=shares[0].entries("model", pieces),
        aliases={name: of for share in reversed(shares) for name, of in share.aliases.items()},
        optimizer=shares[0].entries("optimizer", pieces),
        files={},
    )
    held = {part: _held_of(shares, part, getattr(manifest, part)) for part in PARTS}
    name = f"in memory of step {position.step}"
    return Checkpoint(
        name,
        manifest,
        parse_json(merged_state(states), may_repeat_keys=True, most_depth=None),
        held,
        next((share.per_rank for share in shares if share.rank == rank), {}),
        shares[0].per_rank,
    )


def _held_of(
    shares: Sequence[RankShard], part: str, entries: Mapping[str, TensorEntry]
) -> dict[str, list[TensorShard]]:
    ranks = {part_file_name(part, share.rank): share for share in shares}
    return {
        name: [own_shard(ranks[piece.file].parts[part][name]) for piece in entry.pieces]
        for name, entry in entries.items()
    }


def _read(path: Path, manifest: Manifest, name: str) -> bytearray:
    if name not in manifest.files:
        raise CheckpointDamaged(f"{name} is not among its files")
    entry = manifest.files[name]
    return read_verified(path / name, entry.num_bytes, entry.digest)


def _read_own(path: Path, manifest: Manifest, rank: int) -> dict[str, Tensor]:
    name = rank_file_name(rank)
    return parse(_read(path, manifest, name), name) if name in manifest.files else {}


def _check_state(state: Mapping[str, Any], manifest: Manifest, *, weights_only: bool) -> None:
    """Refuse state that dure did not write, before any of it is used."""
    try:
        for value in (state["extra"], state["model_extra"], manifest.metrics):
            decode(value)
        if not weights_only:
            decode(state["optimizer"], manifest.optimizer.__getitem__)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointDamaged(f"{STATE_NAME} is not what dure writes: {error!r}") from error


def _parse_state(data: bytes) -> dict[str, Any]:
    try:
        state = parse_json(data, may_repeat_keys=True, most_depth=None)
    except DocumentInvalid as error:
        raise CheckpointDamaged(f"{STATE_NAME} {error}") from error
    if not isinstance(state, dict) or not {"optimizer", "model_extra", "extra"} <= state.keys():
        raise CheckpointDamaged(f"{STATE_NAME} lacks its fields")
    return state


def _like(target: Tensor, saved: SavedTensor) -> Tensor:
    filled = torch.empty_like(target)
    local = own_shard(filled)
    saved.fill(local.tensor, local.rectangle)
    return filled


def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {shape}"


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    return [f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'} {what}: {few(names, FEW)}"]


def export_weights(path: Path, out: Path) -> int:
    """Write a checkpoint's weights as one safetensors file, readable by any library, and return its bytes.

    The file appears completely or not at all; an existing file is replaced. A tied tensor is stored under each of its
    names.

    Raises:
        CheckpointDamaged: The checkpoint is damaged.
        DiskFull: There is no space for the file.
        OSError: The system refuses the file.
    """
    weights = Checkpoint.read(path, weights_only=True).weights()
    layout = lay_out(weights)
    new = out.with_name(f".{out.name}.writing")
    new.unlink(missing_ok=True)
    try:
        write_new_file(new, file_buffers(weights, layout))
        new.replace(out)
        sync_folder(out.parent)
    except OSError as error:
        raise_if_full(error, new)
        raise
    finally:
        new.unlink(missing_ok=True)
    return layout.num_bytes
