"""Step counts from which an optimiser may behave differently, and a way to reach them without all the steps before."""

import inspect
import types
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

STEPS_EACH = 3
"""Steps about each landmark: the one before it, its own and the one after."""
STEPS_BEFORE = 3
"""Steps before the first landmark, which show the counters."""
_MOST_LANDMARKS = 16
_LARGEST = 10**8
_MOST_FUNCTIONS = 100

_Place = tuple[MutableMapping[str, Any], str]


def landmarks_of(optimizer: Optimizer, tried: int) -> list[int]:
    """Return the whole numbers in an optimiser's settings and code that may be step counts: a warm-up, an interval.

    Args:
        optimizer: Optimiser of a class that is not torch's own.
        tried: Number of steps that are tried anyway.
    """
    found = {*_numbers_in(optimizer.defaults.values()), *_numbers_in(vars(optimizer).values())}
    for group in optimizer.param_groups:
        found |= {*_numbers_in(value for key, value in group.items() if key != "params")}
    for cls in type(optimizer).__mro__:
        if not _is_of_torch(cls):
            found |= {*_numbers_in(vars(cls).values())}
            seen: set[types.CodeType] = set()
            for member in vars(cls).values():
                found |= {*_numbers_of(inspect.unwrap(member) if callable(member) else member, seen)}
    return sorted(number for number in found if tried <= number < _LARGEST)[:_MOST_LANDMARKS]


def _is_of_torch(definition: Any) -> bool:
    return (getattr(definition, "__module__", None) or "").partition(".")[0] in ("torch", "builtins")


def _numbers_of(function: Any, seen: set[types.CodeType]) -> Iterator[int]:
    """Yield the whole numbers in a function, and in those that it uses."""
    if not isinstance(function, types.FunctionType) or _is_of_torch(function) or len(seen) > _MOST_FUNCTIONS:
        return
    used = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    codes = [function.__code__]
    for code in codes:
        if code in seen:
            continue
        seen.add(code)
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        yield from _numbers_in(code.co_consts)
        used += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    yield from _numbers_in(used)
    for other in used:
        yield from _numbers_of(inspect.unwrap(other) if isinstance(other, types.FunctionType) else other, seen)


def _numbers_in(values: Any) -> Iterator[int]:
    for value in values:
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
            yield int(value)


class StepCounters:
    """The counters of an optimiser, told by their growth: one for each step."""

    def __init__(self, landmarks: list[int]) -> None:
        self._landmarks = landmarks
        self._before: dict[tuple[int, str], float] = {}
        self._counters: list[_Place] = []

    def before_step(self, optimizer: Optimizer, number: int) -> None:
        """Record the counters in the first steps, and later set them to shortly before the next landmark.

        Args:
            optimizer: Optimiser that is about to step.
            number: Number of the step in this trial, from 0 on.
        """
        if number == STEPS_BEFORE - 1:
            self._before = {(id(held), name): _as_number(held[name]) for held, name in _numeric_places(optimizer)}
        if number < STEPS_BEFORE:
            return
        if number == STEPS_BEFORE:
            self._counters = [
                (held, name)
                for held, name in _numeric_places(optimizer)
                if self._before.get((id(held), name)) == _as_number(held[name]) - 1
            ]
        if (number - STEPS_BEFORE) % STEPS_EACH == 0:
            for held, name in self._counters:
                value, count = held[name], self._landmarks[(number - STEPS_BEFORE) // STEPS_EACH] - STEPS_EACH + 1
                if isinstance(value, Tensor):
                    value.fill_(count)
                else:
                    held[name] = type(value)(count)


def _numeric_places(optimizer: Optimizer) -> list[_Place]:
    places = [vars(optimizer), *optimizer.param_groups, *optimizer.state.values()]
    return [(held, name) for held in places for name, value in held.items() if _is_number(value)]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
