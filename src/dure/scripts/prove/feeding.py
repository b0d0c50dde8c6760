"""Batches of several ranks, joined for one."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree

from dure.scripts.prove.recording import CannotJoin, Fetch, Recording, load, recording_path


class Batches:
    """Batches and first weights of the recorded ranks."""

    def __init__(self, folder: Path) -> None:
        self._ranks = read_recordings(folder)
        self.seed = self._ranks[0].seed
        keys = [loader.key for loader in self._ranks[0].loaders]
        self._keys = [*keys, *(each.key for one in self._ranks[1:] for each in one.loaders if each.key not in keys)]
        self._fetches = [
            {
                (self._keys.index(recording.loaders[fetch.loader].key), fetch.epoch, fetch.position): fetch
                for fetch in recording.fetches
            }
            for recording in self._ranks
        ]

    def number_of(self, key: str, taken: Collection[int]) -> int:
        """Return the number of the ranks' loader with a key, or else of the next one of the same data."""
        if key in self._keys:
            return self._keys.index(key)
        data = key.rpartition(" ")[2]
        for number, known in enumerate(self._keys):
            if known.rpartition(" ")[2] == data and number not in taken:
                return number
        return len(self._keys) + len(taken)

    def length(self, data: int, own: int) -> int:
        """Return the length that a loader of a data set had on the recorded ranks."""
        return self._ranks[0].lengths.get(data, own)

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
                    _give(tensor, known)


def _give(tensor: Tensor, values: Tensor) -> None:
    if isinstance(tensor, DTensor):
        values = distribute_tensor(values.to(tensor.device), tensor.device_mesh, tensor.placements)
    tensor.copy_(values)


def read_recordings(folder: Path) -> list[Recording]:
    """Read the recordings of all ranks of an observed run, in order; those that wrote none are left out."""
    numbers = sorted(int(path.stem.removeprefix("rank")) for path in folder.glob("rank*.json"))
    return [load(recording_path(folder, number)) for number in numbers]


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
    if isinstance(first, dict):
        if any(set(each) != set(first) for each in batches):
            raise CannotJoin("batches with other keys on each rank")
        return {key: join([each[key] for each in batches]) for key in first}
    if isinstance(first, list | tuple):
        if any(len(each) != len(first) for each in batches) or not _has_tensors(first):
            merged = [item for each in batches for item in each]
        else:
            merged = [join(list(parts)) for parts in zip(*batches, strict=True)]
        return merged if isinstance(first, list) else tuple(merged)
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


def shaped(example: Any, batch: Any) -> Any:
    """Return a batch in containers of the types that an example has."""
    if isinstance(example, Mapping) and isinstance(batch, dict):
        inner = {key: shaped(example.get(key), each) for key, each in batch.items()}
        kind: Any = type(example)
        return inner if kind is dict else kind(inner)
    if isinstance(batch, list | tuple):
        examples = example if isinstance(example, list | tuple) and len(example) == len(batch) else [None] * len(batch)
        parts = [shaped(one, each) for one, each in zip(examples, batch, strict=True)]
        if isinstance(example, tuple) and hasattr(example, "_fields"):
            return type(example)(*parts)
        return parts if isinstance(batch, list) else tuple(parts)
    if isinstance(example, np.ndarray) and isinstance(batch, Tensor):
        return batch.numpy()
    return batch
