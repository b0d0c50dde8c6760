"""Batches of several ranks, joined for one."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dure.scripts.prove.recording import Fetch, Recording, recording_path


class CannotJoin(Exception):
    """Batches of the ranks that cannot be one batch."""


class Batches:
    """Batches and first weights of the recorded ranks."""

    def __init__(self, folder: Path) -> None:
        self._ranks = read_recordings(folder)
        self._fetches = [
            {(fetch.loader, fetch.epoch, fetch.position): fetch for fetch in recording.fetches}
            for recording in self._ranks
        ]

    def length(self, loader: int, own: int) -> int:
        """Return the length that a loader had on the recorded ranks."""
        loaders = self._ranks[0].loaders
        lengths = loaders[loader].lengths if loader < len(loaders) else []
        return lengths[-1] if lengths else own

    def joined(self, wanted: Fetch) -> Any:
        """Return the batch of all ranks at a fetch.

        Raises:
            StopIteration: No rank had a further batch.
            CannotJoin: The batches do not fit each other.
        """
        place = wanted.loader, wanted.epoch, wanted.position
        found = [fetches[place] for fetches in self._fetches if place in fetches]
        there = [fetch for fetch in found if fetch.samples is not None]
        if not there:
            raise StopIteration
        wanted.samples = [sample for fetch in there for sample in fetch.samples or ()]
        wanted.size = sum(fetch.size for fetch in there)
        batches = [fetch.batch for fetch in there if fetch.batch is not None]
        if not batches:
            raise CannotJoin("the ranks fetched less for the compared steps than one process does")
        return join(batches)

    def give_weights(self, number: int, tensors: dict[str, Tensor]) -> None:
        """Set the weights and buffers of a model to those of the first recorded rank at its first call."""
        first = self._ranks[0].initial
        with torch.no_grad():
            for name, tensor in tensors.items():
                known = first.get(f"{number}.{name}")
                if known is not None and known.shape == tensor.shape:
                    tensor.copy_(known)


def read_recordings(folder: Path) -> list[Recording]:
    """Read the recordings of all ranks of an observed run, in order; those that wrote none are left out."""
    paths = sorted(folder.glob("rank*.pt"), key=lambda path: int(path.stem.removeprefix("rank")))
    return [torch.load(path, weights_only=False) for path in paths if path == recording_path(folder, int(path.stem[4:]))]


def join(batches: list[Any]) -> Any:
    """Return one batch of the samples of several.

    Raises:
        CannotJoin: They do not fit each other.
    """
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    if isinstance(first, Tensor):
        return _joined_tensors(batches)
    if isinstance(first, dict) or hasattr(first, "keys"):
        if any(set(each.keys()) != set(first.keys()) for each in batches):
            raise CannotJoin("the batches of the ranks have other keys")
        joined = {key: join([each[key] for each in batches]) for key in first}
        return joined if type(first) is dict else type(first)(joined)
    if isinstance(first, list | tuple):
        if any(len(each) != len(first) for each in batches) or not _has_tensors(first):
            merged = [item for each in batches for item in each]
            return merged if isinstance(first, list) else type(first)(merged)
        parts = [join(list(parts)) for parts in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if all(each == first for each in batches):
        return first
    raise CannotJoin(f"batches with values of {type(first).__name__}, which are not the same on all ranks")


def _joined_tensors(tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    if not first.dim():
        if all(torch.equal(each, first) for each in tensors):
            return first
        raise CannotJoin("batches with single numbers, which are not the same on all ranks")
    if any(each.shape[1:] != first.shape[1:] for each in tensors):
        raise CannotJoin(f"tensors of shapes {', '.join(str(tuple(each.shape)) for each in tensors)}")
    return torch.cat(tensors)


def _has_tensors(found: Any) -> bool:
    return any(isinstance(each, Tensor) for each in pytree.tree_leaves(found))
