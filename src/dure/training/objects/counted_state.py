"""State that every call of the loss changes in the same way, as far as trials before training have shown.

A coefficient that the loss raises or lowers by what a batch gave may have moved alike on all samples that were tried.
During the run each rank therefore records the values after every step, and ranks compare their records.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dure.strategies.contract.strategy import Strategy
from dure.strategies.state.objects.namespaces import ATOMS
from dure.strategies.state.objects.object_state import ObjectState

_MOST_ITEMS = 16
"""Maximum items of a container that is read after every step; others are read only before ranks compare."""


class CountedState:
    """Record of a rank's counted state, by path, over the steps so far."""

    def __init__(self, strategy: Strategy) -> None:
        """Start with no steps.

        Args:
            strategy: Strategy of ranks that compute the whole loss, each on its own samples; of any other strategy, and
                of one rank, nothing is recorded.
        """
        is_compared = strategy.group.world_size > 1 and strategy.is_synchronous and not strategy.rules.divides_model
        traits = strategy.traits
        paths = [path for path in traits.counted_state if path not in traits.cached_state] if is_compared else []
        state = ObjectState({**strategy.objects, "model": strategy.model}) if paths else None
        self._readers: Mapping[str, Callable[[], Any]] = {} if state is None else state.readers(paths)
        self._each_step = [path for path in self._readers if state is not None and _is_small(state.first.get(path))]
        self._digests = dict.fromkeys(self._readers, 0)
        names = traits.supposed_buffers if is_compared else ()
        self._buffers = [(name, buffer) for name, buffer in strategy.model.named_buffers() if name in names]
        self._sums = [torch.zeros((), dtype=torch.float64, device=buffer.device) for _, buffer in self._buffers]

    def note_step(self) -> None:
        """Record the values after the calls of a step; nothing is read from a device."""
        self._add(self._each_step)
        for total, (_, buffer) in zip(self._sums, self._buffers, strict=True):
            # weighted by the steps before, so that a difference in one step is not undone by that in another
            total.mul_(1.25).remainder_(1e6).add_(buffer.detach().sum(dtype=torch.float64))

    def digests(self) -> dict[str, str]:
        """Return a digest of all values so far by path, equal on ranks that had the same in every step."""
        self._add([path for path in self._readers if path not in self._each_step])
        of_buffers = {name: float(total).hex() for total, (name, _) in zip(self._sums, self._buffers, strict=True)}
        return {path: f"{digest:08x}" for path, digest in self._digests.items()} | of_buffers

    def _add(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._digests[path] = zlib.crc32(repr(self._readers[path]()).encode(), self._digests[path])


def differing(digests: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the paths whose digests are not the same on all ranks that have them."""
    paths = dict.fromkeys(path for each in digests for path in each)
    return [path for path in paths if len({each[path] for each in digests if path in each}) > 1]


def _is_small(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.device.type == "cpu" and value.numel() <= _MOST_ITEMS
    if isinstance(value, list | tuple | dict):
        return len(value) <= _MOST_ITEMS
    return isinstance(value, ATOMS)
