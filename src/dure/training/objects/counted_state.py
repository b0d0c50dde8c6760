"""State that the loss seemed, in trials before training, to change alike in every call, or never.

A coefficient that the loss raises or lowers by what a batch gave may have moved alike on all samples that were tried,
and a flag may be set back before anything looks at it. During the run each rank therefore records the values after
every step, and ranks compare their records.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dure.strategies.contract.strategy import Strategy
from dure.strategies.state.objects.object_state import ObjectState, is_inside, is_small_value
from dure.strategies.state.objects.state_places import Place

_FIRST_STEPS = 32
"""Steps after each of which all small state is looked at; later, a look follows so many steps that it costs little."""
_PLACES_PER_STEP = 20
"""Number of places for which a look may cost a step, on average: about ten microseconds."""
_MOST_ITEMS = 64
"""Number of items up to which a container is read."""
_PLAIN = (bool, int, float, str, type(None))


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
        # masks and tables that a rank makes when it first needs them may be of other sizes than those of another
        cached = traits.cached_state if is_compared else ()
        paths = [path for path in traits.counted_state if path not in cached] if is_compared else []
        state = ObjectState({**strategy.objects, "model": strategy.model}) if paths or cached else None
        self._readers: Mapping[str, Callable[[], Any]] = {} if state is None else state.readers(paths, cached)
        self._state, self._cached = state, cached
        self._digests = dict.fromkeys(self._readers, 0)
        self._read: dict[str, Any] = {}
        """Content of state when it was read last."""
        self._left_out: set[str] = set()
        """Paths of state that evaluations change, which is declared elsewhere."""
        self._task = vars(strategy.objects["task"])
        of_collate = {*traits.collate_state, *traits.collate_count, *traits.collate_tables}
        known = {*traits.learned_state, *of_collate, *self._readers}
        self._plain = [
            name
            for name, value in self._task.items()
            if is_compared and type(value) in _PLAIN and f"task.{name}" not in known
        ]
        """Attributes of the task that are single values."""
        self._last = self._plain_values()
        self._num_steps = 0
        self._strategy = strategy if is_compared else None
        self._known = (*known, *traits.cached_state, *(f"task.{name}" for name in self._plain))
        self._places: list[Place] = []
        """Places of small state whose change no trial has shown."""
        self._looked_at: ObjectState | None = None
        """Objects among which the places are."""
        self._stride = 1
        self._begin_look()
        names = traits.supposed_buffers if is_compared else ()
        buffers = {name: buffer for name, buffer in strategy.model.named_buffers() if name in names}
        self._buffers = [(name, *_place_of(strategy.model, name)) for name in buffers]
        """Names of buffers, each with its module and its name there: forward may put another tensor in its place."""
        self._sums = [torch.zeros((), dtype=torch.float64, device=buffer.device) for buffer in buffers.values()]

    def note_step(self) -> None:
        """Record the values after the calls of a step; nothing is read from a device."""
        self._num_steps += 1
        self._add(filter(self._is_quick, self._readers))
        if (values := self._plain_values()) != self._last:
            for name, before, now in zip(self._plain, self._last, values, strict=True):
                if now != before:
                    self._fold(f"task.{name}", (self._num_steps, now))
            self._last = values
        if self._places and (self._num_steps <= _FIRST_STEPS or not self._num_steps % self._stride):
            self._look()
        for total, (_, module, leaf) in zip(self._sums, self._buffers, strict=True):
            buffer = module._buffers[leaf]
            if buffer is None or buffer.device != total.device:
                continue
            # weighted by the steps before, so that a difference in one step is not undone by that in another
            total.mul_(1.25).remainder_(1e6).add_(buffer.detach().sum(dtype=torch.float64))

    def leave_out_changes(self) -> None:
        """Leave out what has changed single values since the last step: an evaluation, which is declared elsewhere."""
        self._last = self._plain_values()
        read = [path for path in self._readers if path in self._read and self._is_quick(path)]
        self._left_out |= {path for path in read if self._readers[path]() != self._read[path]}
        self._begin_look()

    def _begin_look(self) -> None:
        """Take the current values of all small state as those from which changes are counted."""
        if self._strategy is None:
            return
        self._looked_at = ObjectState({**self._strategy.objects, "model": self._strategy.model})
        self._places = [
            place
            for place in self._looked_at.small_places()
            if place.names is not None or not any(is_inside(place.path, path) for path in self._known)
        ]
        self._stride = -(-len(self._places) // _PLACES_PER_STEP)

    def _look(self) -> None:
        for place in self._places:
            if not place.has_changed() or not self._has_small_content(place):
                continue
            found = {place.path: place.value()} if place.names is None else place.value()
            for path, value in found.items():
                if not any(is_inside(path, known) for known in self._known):
                    self._fold(path, (self._num_steps, value))

    def _has_small_content(self, place: Place) -> bool:
        """Return whether a place is still as quick to read as when it was found: a list may have grown since."""
        if place.names is not None or self._looked_at is None:
            return True
        value = self._looked_at.current(place.path)
        items = value.values() if isinstance(value, Mapping) else value
        if isinstance(items, Collection) and not isinstance(items, str | bytes | Tensor):
            return len(items) <= _MOST_ITEMS and all(map(is_small_value, items))
        return is_small_value(value)

    def digests(self) -> dict[str, str]:
        """Return a digest of all values so far by path, equal on ranks that had the same in every step."""
        self._add([path for path in self._readers if not self._is_quick(path)])
        of_buffers = {name: float(total).hex() for total, (name, *_) in zip(self._sums, self._buffers, strict=True)}
        of_state = {path: "" if path in self._left_out else f"{digest:08x}" for path, digest in self._digests.items()}
        return of_state | of_buffers

    def _is_quick(self, path: str) -> bool:
        """Return whether state is read after every step; what has become large is read only when ranks compare."""
        assert self._state is not None
        return path in self._cached or is_small_value(self._state.current(path))

    def _add(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._read[path] = self._readers[path]()
            self._fold(path, self._read[path])

    def _fold(self, path: str, value: object) -> None:
        self._digests[path] = zlib.crc32(repr(value).encode(), self._digests.get(path, 0))

    def _plain_values(self) -> list[object]:
        """Return the attributes' values; of one that has become anything else, a tensor for example, its class."""
        values = map(self._task.get, self._plain)
        return [value if type(value) in _PLAIN else type(value) for value in values]


def _place_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module of a buffer, and the buffer's own name there."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def differing(digests: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the paths whose digests differ between ranks that have recorded any, without what evaluations change."""
    recorded = [each for each in digests if each]
    paths = dict.fromkeys(path for each in recorded for path in each)
    found = {path: {each.get(path) for each in recorded} for path in paths}
    return [path for path, values in found.items() if len(values) > 1 and "" not in values]
