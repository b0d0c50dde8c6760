"""Parts of a checkpoint that a rank needs, tensor by tensor, and the files that hold them."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dure.strategies.state.tensor_shard import Needs, Rectangle, TensorShard
from dure.training.checkpoints.manifest import Manifest, PieceEntry, TensorEntry
from dure.training.checkpoints.safetensors_file import DTYPES
from dure.training.checkpoints.state_tree import tensor_names
from dure.training.checkpoints.tensor_stream import Target, read_tensors

Wanted = Mapping[str, Rectangle]
"""Parts of saved tensors, by tensor name."""


def wanted_parts(
    manifest: Manifest, state: Mapping[str, Any], needs: Needs | None, parts: Collection[str]
) -> dict[str, Wanted]:
    """Return the needed parts of the saved tensors, for the model and for the optimiser.

    Args:
        manifest: Manifest of the checkpoint.
        state: State in the checkpoint without tensors. That of the optimiser is used only if its tensors are read.
        needs: Names and parts that a rank loads, named as in its model; None for everything.
        parts: `model`, or `model` and `optimizer`.
    """
    if needs is None:
        return {"model": dict(_wholes(manifest.model)), "optimizer": dict(_wholes(manifest.optimizer))}
    model: dict[str, Rectangle] = {}
    for name, part in needs.model.items():
        own = manifest.aliases.get(name, name)
        # mismatches are refused when the tensors are loaded
        if own in manifest.model and part.fits(manifest.model[own].shape):
            model[own] = part
    for name in needs.buffers:
        own = manifest.aliases.get(name, name)
        if own in manifest.model:
            model[own] = Rectangle.of_whole(manifest.model[own].shape)
    if "optimizer" not in parts:
        return {"model": model}
    return {"model": model, "optimizer": dict(_optimizer_parts(manifest, state["optimizer"], needs.optimizer))}


def _wholes(entries: Mapping[str, TensorEntry]) -> Iterator[tuple[str, Rectangle]]:
    return ((name, Rectangle.of_whole(entry.shape)) for name, entry in entries.items())


def _optimizer_parts(
    manifest: Manifest, optimizer: Mapping[str, Any], needed: Mapping[str, Rectangle]
) -> Iterator[tuple[str, Rectangle]]:
    """Yield the needed parts of an optimiser's tensors.

    For the state of a parameter these are tensors of its shape, cut like it, and all other tensors whole. State that
    belongs to no parameter is needed completely.
    """
    entries, aliases = manifest.optimizer, manifest.aliases
    needed = {aliases.get(name, name): part for name, part in needed.items()}
    for key, value in optimizer.items():
        is_by_parameter = key == "state" and isinstance(value, dict)
        for parameter, saved in value.items() if is_by_parameter else [("", value)]:
            name_of_tensor = aliases.get(parameter, parameter)
            if is_by_parameter and name_of_tensor not in needed:
                continue
            own = manifest.model.get(name_of_tensor)
            for name in tensor_names(saved):
                whole = Rectangle.of_whole(entries[name].shape)
                is_cut = is_by_parameter and own is not None and own.shape == whole.sizes
                part = needed[name_of_tensor] if is_cut else whole
                yield name, part if part.fits(whole.sizes) else whole


def read_part(
    path: Path, manifest: Manifest, entries: Mapping[str, TensorEntry], wanted: Wanted
) -> dict[str, list[TensorShard]]:
    """Read and check the files that hold the wanted parts of tensors; return each part as one piece.

    Raises:
        CheckpointDamaged: A file is missing or altered, or does not hold what the manifest says.
    """
    held = {
        name: TensorShard(
            tensor=torch.empty(part.sizes, dtype=DTYPES[entries[name].dtype]),
            offsets=part.offsets,
            shape=entries[name].shape,
        )
        for name, part in wanted.items()
    }
    expected: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
    targets: dict[str, dict[str, Target]] = defaultdict(dict)
    for name, entry in entries.items():
        for piece in entry.pieces:
            expected[piece.file][name] = entry.dtype, piece.sizes
            if name in held and (target := _target(piece, held[name])) is not None:
                targets[piece.file][name] = target
    for file in sorted(expected):
        if file in targets or len(wanted) == len(entries):
            read_tensors(path / file, manifest.files[file], expected[file], targets[file])
    return {name: [piece] for name, piece in held.items()}


def _target(saved: PieceEntry, held: TensorShard) -> Target | None:
    """Return the needed part of a saved piece and its destination, or None if no part is needed."""
    whole = Rectangle(saved.offsets, saved.sizes)
    common = whole.overlap(held.rectangle)
    if common is None:
        return None
    begins = tuple(mine - theirs for mine, theirs in zip(common.offsets, whole.offsets, strict=True))
    return Target(part=Rectangle(begins, common.sizes), values=held.tensor[common.within(held.rectangle)])
