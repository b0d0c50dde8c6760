"""Values of tensors by which the first steps of a run are compared, and the judgement of their differences."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dure.strategies.state.tensor_shard import TensorShard
from dure.terminal import few

NUM_STEPS = 2
"""Steps that are compared: in the second one momentum, buffers and all that a step leaves behind have an effect."""
_RELATIVE = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Difference that counts as rounding, relative to the largest change of the value in a step, by its dtype."""
_FLOOR = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The same, relative to the largest change of all values of the kind."""
OPTIMIZER = "optimizer."
"""Beginning of the names of an optimiser's state: `optimizer.0.weight.exp_avg`."""
DTYPES = frozenset(_RELATIVE)
"""Floating dtypes of tensors that are compared."""
_MOST_VALUES = 16_384
"""Values that are compared, of all tensors together."""
_VALUES_PER_TENSOR = 32
_LEAST_PER_TENSOR = 4
_DETERMINED = 1e-2
"""Relative effect of rounding on a value's change, above which the value is not compared."""
_MOST_UNDETERMINED = 2
"""Values that rounding changes so among those chosen of a tensor, above which the tensor is not compared."""
_ROUNDINGS = 64
"""Difference that counts as rounding, in units of a value's last place, and of the seen effect of rounding."""
_MOST_OFF = 0.1
"""Fraction of a tensor's values that may differ: the sign of a tiny gradient decides over a step of Adam."""
_LEAST_OFF = 4
"""Values that must differ at least, of all tensors together, for the same reason."""


@dataclass(frozen=True, kw_only=True)
class SomeValues:
    """Some values of a tensor after the steps in one process. JSON values only."""

    shape: Sequence[int]
    """Shape of the whole tensor."""
    places: Sequence[int]
    """Indices of the values in the flattened tensor."""
    after: Sequence[float]
    tolerances: Sequence[float]
    """Absolute differences that count as rounding."""


class Difference(NamedTuple):
    """Differences of one tensor on one rank. JSON values only."""

    num_compared: int
    num_off: int
    here: float
    """Value that differs most."""
    expected: float
    """The same value in one process."""


class StepsFound(NamedTuple):
    """Result of the comparison."""

    num_tensors: int
    """Tensors that were compared; 0 if there was nothing to compare with."""
    declaration: str | None
    """Description of the difference; None if there is none."""


class Recording:
    """Values of tensors at first and after each step, at places that the first step decides.

    Only there is a copy of all tensors in memory, that of before the first step.
    """

    def __init__(self, like: "Recording | None" = None, parameters: Collection[str] = ()) -> None:
        """Begin with nothing.

        Args:
            like: Recording whose places are used; None to choose them.
            parameters: Names of the model's parameters; its other tensors are buffers.
        """
        self._parameters = frozenset(parameters)
        self._before: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {} if like is None else like.tensors
        """Tensors without memory, for shape and dtype, by name."""
        self.places: dict[str, Tensor] = {} if like is None else like.places
        """Indices in each flattened tensor, on its device."""
        self.values: dict[str, list[Tensor]] = {}
        """Values at these places in float64, at first and after each step."""
        self.largest: dict[str, float] = {}
        """Largest finite change of all values of a kind in the first step."""

    @torch.no_grad()
    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Record the tensors before the first step."""
        if self.places:
            self._take(tensors)
        else:
            self._before = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    @torch.no_grad()
    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Record the tensors after a step."""
        if not self.places:
            self._choose(tensors)
            self._take(self._before)
            self._before = {}
        self._take(tensors)

    def _choose(self, tensors: Mapping[str, Tensor]) -> None:
        """Choose the places of those values of each tensor that changed most, and of about as many random ones.

        A batch may concern few rows of a table, which random places would miss.
        """
        num_values = min(_VALUES_PER_TENSOR, max(_LEAST_PER_TENSOR, _MOST_VALUES // max(1, len(tensors))))
        generator = torch.Generator().manual_seed(0)
        for name, tensor in tensors.items():
            now, before = _numbers(tensor), self._before.get(name)
            # an optimiser makes its state in the first step
            change = now.abs() if before is None or before.shape != tensor.shape else (now - _numbers(before)).abs_()
            some = torch.randint(len(now), (min(num_values // 2, len(now)),), generator=generator).to(now.device)
            most = change.topk(min(num_values - len(some), len(now)))
            self.places[name] = torch.cat([most.indices, some]).unique()
            self.tensors[name] = tensor.detach().to("meta")
            kind, finite = self.kind(name), change[change.isfinite()]
            self.largest[kind] = max([self.largest.get(kind, 0.0), *([float(finite.max())] if len(finite) else [])])

    def kind(self, name: str) -> str:
        """Return what a tensor is: a parameter, a buffer of its own kind, or an optimiser's state under one key."""
        if name.startswith(OPTIMIZER):
            return OPTIMIZER + name.rpartition(".")[2]
        return "" if name in self._parameters else name

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        for name, places in self.places.items():
            found = tensors.get(name)
            if found is None or found.shape != self.tensors[name].shape:
                values = torch.zeros(len(places), dtype=torch.float64)
            else:
                values = found.detach().flatten()[places].double().cpu()
            self.values.setdefault(name, []).append(values)


def chosen(recording: Recording, disturbed: Recording) -> Iterator[tuple[str, SomeValues]]:
    """Yield the names of tensors with the values by which they are compared: those that rounding does not decide.

    Args:
        recording: Recording of the steps.
        disturbed: Recording of the same steps that round differently.
    """
    for name, series in recording.values.items():
        tensor, others = recording.tensors[name], disturbed.values[name]
        change = torch.stack([(after - before).abs() for before, after in pairwise(series)]).amax(0)
        effect = ((others[-1] - others[0]) - (series[-1] - series[0])).abs()
        is_determined = effect <= _DETERMINED * change
        if int((~is_determined).sum()) > _MOST_UNDETERMINED:
            continue
        tolerances = torch.zeros_like(change)
        if tensor.is_floating_point():
            last_places = torch.finfo(tensor.dtype).eps * series[-1].abs()
            floor = _FLOOR[tensor.dtype] * recording.largest[recording.kind(name)]
            tolerances = _RELATIVE[tensor.dtype] * change + floor + _ROUNDINGS * (effect + last_places)
        yield (
            name,
            SomeValues(
                shape=list(tensor.shape),
                places=recording.places[name].cpu()[is_determined].tolist(),
                after=series[-1][is_determined].tolist(),
                tolerances=tolerances[is_determined].tolist(),
            ),
        )


def _numbers(tensor: Tensor) -> Tensor:
    """Return a tensor as floating numbers, flat."""
    flat = tensor.detach().flatten()
    return flat if flat.is_floating_point() else flat.double()


@torch.no_grad()
def difference(shard: TensorShard, values: SomeValues) -> Difference | None:
    """Return the differences of this rank's part of a tensor; None if none of the values lies in it."""
    if tuple(shard.shape) != tuple(values.shape):
        return None
    if values.shape:
        offsets, sizes = np.array(shard.offsets), np.array(shard.tensor.shape)
        places = np.stack(np.unravel_index(np.array(values.places, dtype=np.int64), tuple(values.shape)), axis=1)
        inside = np.flatnonzero(((places >= offsets) & (places < offsets + sizes)).all(axis=1))
        index = tuple(torch.from_numpy(column).to(shard.tensor.device) for column in (places[inside] - offsets).T)
        here = shard.tensor.detach()[index].double().cpu().numpy()
    else:
        inside, here = np.arange(len(values.places)), np.array([float(shard.tensor)])[: len(values.places)]
    if not len(inside):
        return None
    expected, tolerances = np.array(values.after)[inside], np.array(values.tolerances)[inside]
    distance = np.abs(here - expected)
    is_off = ~(distance <= tolerances)
    worst = int(np.argmax(np.where(is_off, distance, -1.0)))
    return Difference(len(inside), int(is_off.sum()), float(here[worst]), float(expected[worst]))


def judged(by_rank: Sequence[Mapping[str, Difference]]) -> StepsFound:
    """Return the result of the comparisons on all ranks."""
    names = {name for one in by_rank for name in one}
    off: dict[str, Difference] = {}
    num_off = 0
    for name in sorted(names):
        found = [one[name] for one in by_rank if name in one]
        most = max(found, key=lambda each: each.num_off)
        compared = sum(each.num_compared for each in found)
        if sum(each.num_off for each in found) > _MOST_OFF * compared:
            off[name] = most
            num_off += sum(each.num_off for each in found)
    if num_off < _LEAST_OFF:
        return StepsFound(len(names), None)
    name, worst = next(iter(off.items()))
    text = (
        f"weights: after the first {NUM_STEPS} steps {few(list(off))} differ from those of one process ({name} has a "
        f"value of {worst.here:.6g} in the place of {worst.expected:.6g}), for a reason that is not known"
    )
    return StepsFound(len(names), text)
