"""Values of tensors by which the first steps of a run are compared, and the judgement of their differences."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dure.strategies.contract.declarations import few
from dure.strategies.state.tensor_shard import TensorShard

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


class _Candidates(NamedTuple):
    """Values of a tensor that may be compared, each of shape `(N,)` in float64."""

    tensor: Tensor
    places: Tensor
    after: Tensor
    change: Tensor
    """Largest change in a step: what one step takes away another may have added."""
    effect: Tensor
    """Effect of rounding."""


def chosen(
    states: Sequence[Mapping[str, Tensor]], disturbed: Sequence[Mapping[str, Tensor]]
) -> Iterator[tuple[str, SomeValues]]:
    """Yield the names of tensors with the values by which they are compared.

    Half of a tensor's values are those that change most, because a batch may concern few rows of a table.

    Args:
        states: Tensors by name, at first and after each step.
        disturbed: The same of steps that round differently.
    """
    num_values = min(_VALUES_PER_TENSOR, max(_LEAST_PER_TENSOR, _MOST_VALUES // max(1, len(states[-1]))))
    generator = torch.Generator().manual_seed(0)
    candidates: dict[str, _Candidates] = {}
    largest: dict[str, float] = {}
    for name, tensor in states[-1].items():
        one, other = _series(name, states, tensor), _series(name, disturbed, tensor)
        changes = reduce(torch.maximum, [(after - before).abs() for before, after in pairwise(one)])
        largest[_kind(name)] = max(largest.get(_kind(name), 0.0), float(changes.max()))
        some = torch.randint(len(changes), (min(num_values // 2, len(changes)),), generator=generator)
        places = torch.cat([changes.topk(min(num_values - len(some), len(changes))).indices, some]).unique()
        first, after, first_other, after_other = (
            each[places].double() for each in (one[0], one[-1], other[0], other[-1])
        )
        effect = ((after_other - first_other) - (after - first)).abs()
        candidates[name] = _Candidates(tensor, places, after, changes[places].double(), effect)
    for name, found in candidates.items():
        values = _determined(found, largest[_kind(name)])
        if values is not None:
            yield name, values


def _determined(found: _Candidates, largest: float) -> SomeValues | None:
    """Return the values of a tensor that rounding does not decide; None if it decides several.

    Args:
        found: Values that may be compared.
        largest: Largest change of all values of this kind.
    """
    is_determined = found.effect <= _DETERMINED * found.change
    if int((~is_determined).sum()) > _MOST_UNDETERMINED:
        return None
    tolerances = torch.zeros_like(found.after)
    if found.tensor.is_floating_point():
        last_places = torch.finfo(found.tensor.dtype).eps * found.after.abs()
        of_change = _RELATIVE[found.tensor.dtype] * found.change + _FLOOR[found.tensor.dtype] * largest
        tolerances = of_change + _ROUNDINGS * (found.effect + last_places)
    return SomeValues(
        shape=list(found.tensor.shape),
        places=found.places[is_determined].tolist(),
        after=found.after[is_determined].tolist(),
        tolerances=tolerances[is_determined].tolist(),
    )


def _kind(name: str) -> str:
    """Return what a tensor is: an optimiser's state under one key, or a tensor of the model."""
    return name.rpartition(".")[2] if name.startswith(OPTIMIZER) else ""


def _series(name: str, states: Sequence[Mapping[str, Tensor]], like: Tensor) -> list[Tensor]:
    """Return a tensor in each state, flat; zeros where it is not, as before an optimiser's first step."""
    zeros = torch.zeros_like(like)
    found = [state.get(name, zeros) for state in states]
    flat = [(each if each.shape == like.shape else zeros).flatten() for each in found]
    return flat if like.is_floating_point() else [each.double() for each in flat]


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
