"""Batches of several ranks, joined for one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree

from dure.scripts.prove.recording import CannotJoin, Fetch, Loader, Recording, load, partial_path, recording_path


class NoMoreBatches(Exception):
    """End of the batches that the ranks have kept."""


class Batches:
    """Batches and first weights of the recorded ranks.

    Args:
        folder: Folder of the observed run.
        in_turns: True to give each fetch the batch of one rank, in turns, and not the joined batch of all.
    """

    def __init__(self, folder: Path, *, in_turns: bool = False) -> None:
        self._ranks = read_recordings(folder)
        self._in_turns = in_turns
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
        """Return the number of the ranks' loader with a key, or else of their next one."""
        if key in self._keys:
            return self._keys.index(key)
        return next(number for number in range(len(self._keys) + len(taken) + 1) if number not in taken)

    def length(self, measured: int, own: int) -> int:
        """Return the length that a loader or sampler of a data set had on the recorded ranks."""
        known = self._ranks[0].lengths.get(measured, own)
        return known * len(self._ranks) if self._in_turns else known

    def num_to_read(self, loader: int, epoch: int) -> tuple[int, bool]:
        """Return how many samples the ranks would read in one batch more of a pass, and whether they came to its end.

        Returns:
            The number, which is 0 if a rank did not train in this pass, and True if all came to its end.
        """
        if loader >= len(self._keys):
            return 0, False
        passes = [
            [fetch for place, fetch in fetches.items() if place[:2] == (loader, epoch)] for fetches in self._fetches
        ]
        if not all(any(fetch.is_trained for fetch in each) for each in passes):
            return 0, False
        is_whole = all(any(fetch.samples is None for fetch in each) for each in passes)
        sizes = [len(fetch.samples or ()) for each in passes for fetch in each]
        return sum(sizes) + max(sizes) * len(passes), is_whole

    def has_same_data(self, loader: int) -> bool:
        """Return whether equal indices are equal samples on all ranks."""
        return loader < len(self._keys) and have_same_data(self._ranks, self._keys[loader])

    def joined(self, wanted: Fetch) -> Any:
        """Return the batch of all ranks at a fetch, or that of one rank if they are given in turns.

        Raises:
            StopIteration: No rank had a further batch.
            NoMoreBatches: The ranks have not read or kept further batches.
            CannotJoin: The batches do not fit each other.
        """
        fetches, position = self._fetches, wanted.position
        if self._in_turns:
            fetches, position = [fetches[position % len(fetches)]], position // len(fetches)
        place = wanted.loader, wanted.epoch, position
        found = [of_rank[place] for of_rank in fetches if place in of_rank]
        if not found and self._has_ended_within(wanted):
            raise NoMoreBatches
        there = [fetch for fetch in found if fetch.samples is not None]
        if not there:
            raise StopIteration
        wanted.samples = [sample for fetch in there for sample in fetch.samples or ()]
        wanted.size = sum(fetch.size for fetch in there)
        if any(fetch.batch is None for fetch in there):  # a part of the samples would be taken for all of them
            problems = [problem for recording in self._ranks for problem in recording.problems]
            if not problems:
                raise NoMoreBatches
            raise CannotJoin(problems[0])
        return join([fetch.batch for fetch in there], [len(fetch.samples or ()) for fetch in there])

    def origin(self, fetch: Fetch) -> tuple[list[int], str]:
        """Return the ranks whose batches a fetch is given, and the name of the fetch there."""
        count, position = len(self._ranks), fetch.position
        if self._in_turns:
            return [position % count], f"{fetch.epoch} {position // count}"
        return [*range(count)], f"{fetch.epoch} {position}"

    def _has_ended_within(self, wanted: Fetch) -> bool:
        """Return whether the ranks were ended in this pass, or before it."""
        return not any(
            fetch.samples is None
            for fetches in self._fetches
            for place, fetch in fetches.items()
            if place[:2] == (wanted.loader, wanted.epoch)
        )

    def give_weights(self, number: int, tensors: dict[str, Tensor]) -> None:
        """Set the weights and buffers of a model to those of the first recorded rank at its first call."""
        first = self._ranks[0].initial
        with torch.no_grad():
            for name, tensor in tensors.items():
                known = first.get(f"{number}.{name}")
                if known is not None and known.shape == tensor.shape:
                    _give(tensor, known)
                elif known is not None and known.dim() == 1 and len(known) <= tensor.numel():  # put together of shards
                    tensor.view(-1)[: len(known)] = known


def _give(tensor: Tensor, values: Tensor) -> None:
    if isinstance(tensor, DTensor):
        values = distribute_tensor(values.to(tensor.device), tensor.device_mesh, tensor.placements)
    tensor.copy_(values)


def read_recordings(folder: Path) -> list[Recording]:
    """Read the recordings of all ranks of an observed run, in order; those that wrote none are left out."""
    numbers = sorted({int(path.name[4:].partition(".")[0]) for path in folder.glob("rank*.json")})
    paths = [recording_path(folder, number) for number in numbers]
    found = [
        load(path if path.exists() else partial_path(folder, number))
        for path, number in zip(paths, numbers, strict=True)
    ]
    for recording in found[1:]:
        _take_keys_of(found[0], recording)
    return found


def _take_keys_of(first: Recording, other: Recording) -> None:
    """Give the loaders that a rank makes at another line than rank 0 the keys that they have there, by their order."""
    known, here = {each.key for each in first.loaders}, {each.key for each in other.loaders}
    for loader in other.loaders:
        if loader.key not in known:
            same = (each for each in first.loaders if each.key not in here and _is_alike(first, each, other, loader))
            found = next(same, None)
            if found is not None:
                loader.key = found.key
                here.add(found.key)


def _is_alike(first: Recording, one: Loader, other: Recording, two: Loader) -> bool:
    return (one.num_samples, one.sampler, _is_trained(first, one)) == (
        two.num_samples,
        two.sampler,
        _is_trained(other, two),
    )


def _is_trained(recording: Recording, loader: Loader) -> bool:
    return any(fetch.is_trained for fetch in recording.fetches if recording.loaders[fetch.loader] is loader)


def have_same_data(ranks: Sequence[Recording], key: str) -> bool:
    """Return whether equal indices are equal samples on all ranks."""
    loaders = [loader for recording in ranks for loader in recording.loaders if loader.key == key]
    if len(loaders) != len(ranks):
        return False
    if all(each.probes is None for each in loaders):
        return len({each.num_samples for each in loaders}) == 1
    # the first probe is the number of samples; without another, nothing of a sample can be read twice alike
    return all(each.probes == loaders[0].probes and len(each.probes or ()) > 1 for each in loaders)


def join(batches: list[Any], counts: list[int]) -> Any:
    """Return one batch of the samples of several.

    Args:
        batches: Batches in plain containers.
        counts: Samples of each.

    Raises:
        CannotJoin: They do not fit each other.
    """
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    if isinstance(first, Tensor):
        return _joined_tensors(batches, counts)
    if isinstance(first, dict):
        if any(set(each) != set(first) for each in batches):
            raise CannotJoin("batches with other keys on each rank")
        return {key: join([each[key] for each in batches], counts) for key in first}
    if isinstance(first, list | tuple):
        if _is_by_sample(batches, counts):
            merged = [item for each in batches for item in each]
        else:
            merged = [join(list(parts), counts) for parts in zip(*batches, strict=True)]
        return merged if isinstance(first, list) else tuple(merged)
    if all(each == first for each in batches):
        return first
    raise CannotJoin(f"batches with values of {type(first).__name__}, which are not the same on all ranks")


def _is_by_sample(batches: list[Any], counts: list[int]) -> bool:
    """Return whether sequences have an item for each sample, and not for each part of a sample."""
    if any(len(each) != len(batches[0]) for each in batches) or not _has_tensors(batches[0]):
        return True
    is_as_long = all(len(each) == count for each, count in zip(batches, counts, strict=True))
    has_dimension = all(
        isinstance(item, Tensor) and item.dim() and count in item.shape[:2]
        for each, count in zip(batches, counts, strict=True)
        for item in each
    )
    return is_as_long and not has_dimension


def _joined_tensors(tensors: list[Tensor], counts: list[int]) -> Tensor:
    first = tensors[0]
    if not first.dim():
        if all(torch.equal(each, first) for each in tensors):
            return first
        raise CannotJoin("batches with single numbers, which are not the same on all ranks")
    for dimension in range(min(2, first.dim())):
        is_batch = all(each.shape[dimension] == count for each, count in zip(tensors, counts, strict=True))
        rest = {each.shape[:dimension] + each.shape[dimension + 1 :] for each in tensors}
        if is_batch and len(rest) == 1:
            return torch.cat(tensors, dimension)
    shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
    raise CannotJoin(f"tensors of shapes {shapes} for {', '.join(map(str, counts))} samples")


def _has_tensors(found: Any) -> bool:
    return any(isinstance(each, Tensor) for each in pytree.tree_leaves(found))


def shaped(example: Any, batch: Any) -> Any:
    """Return a batch in containers of the types that an example has."""
    if is_dataclass(example) and not isinstance(example, type) and isinstance(batch, dict):
        return replace(example, **{name: shaped(getattr(example, name), each) for name, each in batch.items()})
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
