"""State of plain Python objects: seen when it changes, and put back.

A task, a module or an optimiser may keep state that no `state_dict` knows: counters, running means, generators of its
own. It is found by walking over attributes and containers, as far as these are plain.
"""

import operator
import sys
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from queue import Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import Dataset

from dure.strategies.namespaces import ATOMS, SEALED, FunctionState, Namespace, is_users, with_dict
from dure.strategies.state_places import (
    DEFINITIONS,
    Place,
    array_place,
    attribute_place,
    bytes_place,
    comparable,
    container_place,
    generator_place,
    is_large,
    key_text,
    optimizer_place,
    queue_place,
    some,
    tensor_place,
    variable_place,
)

_CALL = "()"
"""End of a function's path, behind which its variables are."""
_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
)
_MOST_OBJECTS = 5_000
"""Objects and containers that one walk looks into; the rest is compared by identity."""
_MOST_LEVELS = 60
"""Objects that hold one another, of which a walk looks into the innermost."""


class ObjectState:
    """The state that some objects had when this was made."""

    def __init__(self, roots: Mapping[str, object], *, sees_data: bool = False) -> None:
        """Walk over objects.

        Args:
            roots: The objects by the names that paths begin with. Of an `nn.Module` and an `Optimizer` among them the
                plain attributes are seen; of those that other objects hold, such as a teacher, all state.
            sees_data: Whether numbers and the like are seen that a `Dataset` has as attributes. What it changes by
                being read would be put back too.
        """
        self._sees_data = sees_data
        self._places: list[Place] = []
        self._seen: dict[int, object] = {}
        self._num_left = _MOST_OBJECTS
        self._depth = 0
        self.functions: dict[str, FunctionState] = {}
        """Functions that were found, by their paths."""
        self.opaque: list[str] = []
        """Paths of iterators: their position can be neither seen nor put back."""
        self.large: dict[str, Tensor] = {}
        """Tensors of which no copy is kept, by their paths: whoever changes them undoes it."""
        self.first: dict[str, object] = {}
        """What was found, by its path."""
        self.unseen: str | None = None
        """Path of the first object that was not looked into, for there are too many, or it lies too deep; None if all
        were."""
        trained = [root for root in roots.values() if isinstance(root, nn.Module)]
        self._trained = {id(t) for root in trained for t in (*root.parameters(), *root.buffers())}
        self._roots = {id(root) for root in roots.values()}
        # models and optimisers first: others may hold them, and their state is to have their own paths
        for name, root in sorted(roots.items(), key=lambda item: not isinstance(item[1], nn.Module | Optimizer)):
            self._walk(name, root)

    def changed(self) -> dict[str, Any]:
        """Return what is no longer as it was by its path, generators of random numbers left out.

        The values are only to be compared with those of another call.
        """
        found: dict[str, Any] = {}
        for place in self._places:
            if not place.is_generator and place.has_changed():
                found |= {place.path: place.value()} if place.names is None else place.value()
        return found

    def take_changed(self) -> list[str]:
        """Return the paths of what is no longer as it was, generators included.

        Values and generators are in one answer only, and are not watched any more.
        """
        changed = [place for place in self._places if place.has_changed()]
        if done := {id(place) for place in changed if place.names is None}:
            self._places = [place for place in self._places if id(place) not in done]
        paths = (path for place in changed for path in ([place.path] if place.names is None else place.names()))
        return list(dict.fromkeys(paths))

    def drawn(self) -> list[str]:
        """Return the paths of the generators of random numbers, among the objects, that have been drawn from."""
        return [place.path for place in self._places if place.is_generator and place.has_changed()]

    def put_back(self) -> list[str]:
        """Bring everything back into the state that it had; return the paths of what cannot be."""
        left = []
        for place in self._places:
            if place.has_changed():
                place.put_back()
                left += [] if place.is_put_back else [place.path]
        return left

    def put_back_generators(self) -> None:
        """Bring the generators of random numbers into the states that they had."""
        for place in self._places:
            if place.is_generator and place.has_changed():
                place.put_back()

    def _walk(self, path: str, value: Any) -> None:
        self.first[path] = value
        if self._depth < _MOST_LEVELS:
            self._depth += 1
            self._look_into(path, value)
            self._depth -= 1
        elif not isinstance(value, (*ATOMS, *SEALED)) and id(value) not in self._seen:
            self.unseen = self.unseen or path

    def _look_into(self, path: str, value: Any) -> None:
        if self._sees_data and isinstance(value, Dataset) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._attributes(path, value)
        if isinstance(value, types.MethodType) and is_users(value.__func__):
            self._walk(path, value.__self__)
        elif isinstance(value, types.FunctionType) and id(value) not in self._seen and is_users(value):
            self._seen[id(value)] = value
            self.functions[f"{path}{_CALL}"] = FunctionState(value)
            self._attributes(f"{path}{_CALL}", self.functions[f"{path}{_CALL}"])
        if isinstance(value, (*ATOMS, *SEALED)) or id(value) in self._seen:
            return
        of_pythons = next((place for kind, place in _OF_PYTHONS.items() if isinstance(value, kind)), None)
        if of_pythons is None and _is_foreign(value):
            return
        if self._num_left <= 0:
            self.unseen = self.unseen or path
            return
        self._num_left -= 1
        self._seen[id(value)] = value  # alive, so that no other object gets its id
        if of_pythons is not None:
            self._places.append(of_pythons(path, value))
        elif isinstance(value, Tensor):
            if id(value) not in self._trained:
                self._tensor(path, value)
        elif isinstance(value, np.ndarray):
            self._places.append(array_place(path, value))
        elif (generator := generator_place(path, value)) is not None:
            self._places.append(generator)
        elif isinstance(value, nn.Module):
            for name, module in value.named_modules():
                self._attributes(f"{path}.{name}" if name else path, module)
            if id(value) not in self._roots:
                self._tensors_of(path, value)
        elif isinstance(value, Optimizer) and id(value) not in self._roots:
            self._places.append(optimizer_place(path, value))
        elif isinstance(value, tuple | frozenset | list | deque | set | MutableMapping):
            if not isinstance(value, tuple | frozenset):
                self._places.append(container_place(path, value))
            for key, item in some(value):
                self._walk(f"{path}[{key_text(key)}]", item)
        elif isinstance(value, Iterator):
            self.opaque.append(path)
        elif (owner := with_dict(value)) is not None:
            self._attributes(path, owner)

    def _tensor(self, path: str, tensor: Tensor) -> None:
        if is_large(tensor):
            self.large[path] = tensor
        self._places.append(tensor_place(path, tensor))

    def _tensors_of(self, path: str, module: nn.Module) -> None:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if id(tensor) not in self._trained and id(tensor) not in self._seen:
                self._seen[id(tensor)] = tensor
                self._tensor(f"{path}.{name}", tensor)

    def _attributes(self, path: str, owner: Any) -> None:
        before = {name: vars(owner)[name] for name in plain_attributes(owner)}
        all_names = {*vars(owner)}
        torchs = _torchs_own(owner)
        left_out = {name: value for name, value in vars(owner).items() if name not in before and name not in torchs}

        every = getattr(vars(owner), "unfiltered", {})
        first = dict(every)

        def have_names_changed() -> bool:
            # of a class most often nothing changes at all, which is quick to see
            if every and every.keys() == first.keys() and all(map(operator.is_, every.values(), first.values())):
                return False
            there = vars(owner)  # only a value that was left out can count as an attribute later
            names_now = there.keys() if type(there) is dict else set(there)  # others' views are slow to compare
            if names_now == all_names and (not left_out or all(there[n] is v for n, v in left_out.items())):
                return False
            return now().keys() != before.keys()

        def names() -> list[str]:
            return [f"{path}.{name}" for name in now().keys() ^ before.keys()]

        def now() -> dict[str, Any]:
            return {name: vars(owner)[name] for name in plain_attributes(owner)}

        def put_back() -> None:
            for name in now().keys() - before.keys():
                del vars(owner)[name]
            vars(owner).update(before)

        for name in before:
            self._places.append(attribute_place(f"{path}.{name}", owner, name, before[name]))

        def came_or_went() -> dict[str, Any]:
            there = now()
            return {f"{path}.{name}": comparable(there.get(name)) for name in there.keys() ^ before.keys()}

        self._places.append(Place(path, have_names_changed, put_back, came_or_went, names=names))
        for name, item in before.items():
            self._walk(f"{path}.{name}", item)
        if not isinstance(owner, (nn.Module, Optimizer, Dataset, Namespace)):
            named = {name: item for name, item in left_out.items() if isinstance(item, DEFINITIONS)}
            self._places += [attribute_place(f"{path}.{name}", owner, name, item) for name, item in named.items()]
        for name, item in left_out.items():
            if isinstance(item, types.FunctionType | types.MethodType) or (
                self._sees_data and isinstance(item, Dataset)
            ):
                self._walk(f"{path}.{name}", item)
        for hooks in _HOOKS:
            for number, hook in enumerate(vars(owner).get(hooks, {}).values()):
                self._walk(f"{path}.{hooks}[{number}]", hook)


_OF_PYTHONS: dict[Any, Callable[[str, Any], Place]] = {
    bytearray: bytes_place,
    array: bytes_place,
    Queue: queue_place,
    ContextVar: variable_place,
}
_KNOWN_PACKAGES = ("argparse", "builtins", "collections", "itertools", "random", "types", "__main__")
"""Packages of Python's own whose objects hold plain state; others' (locks, queues, files, loggers) are not touched."""


def _is_foreign(value: object) -> bool:
    """Return whether an object belongs to an engine that has put it into a module, or to Python's own machinery."""
    module = type(value).__module__
    package = module.partition(".")[0]
    is_pythons = package in sys.stdlib_module_names and package not in _KNOWN_PACKAGES
    return is_pythons or module.startswith("torch.distributed")


_TORCHS_OWN = {
    nn.Module: frozenset(vars(nn.Module())) | {"_is_full_backward_hook", "_forward_hooks_with_kwargs"},
    Optimizer: frozenset(vars(torch.optim.SGD([torch.zeros(1)]))),
}


def _torchs_own(owner: object) -> frozenset[str]:
    return next((names for kind, names in _TORCHS_OWN.items() if isinstance(owner, kind)), frozenset())


def plain_attributes(owner: object) -> list[str]:
    """Return the names of an object's attributes.

    Of a module or an optimiser these are those that are not torch's own, of a data set those that are no data.
    """
    if isinstance(owner, Dataset):
        return [name for name, value in vars(owner).items() if isinstance(value, ATOMS)]
    torchs = _torchs_own(owner)
    # what lists the parameters of a module is no state; a task may have parameters of its own
    has_parameters = isinstance(owner, nn.Module | Optimizer)
    return [
        name
        for name, value in vars(owner).items()
        if name not in torchs
        and not isinstance(value, SEALED)
        and not (has_parameters and _holds_parameters(value))
        and type(value) is not DTensor
    ]


def _holds_parameters(value: object) -> bool:
    """Return whether an attribute is, or lists, parameters: they have their own place (`nn.LSTM` keeps such a list)."""
    items = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
    return any(isinstance(item, nn.Parameter) or type(item) is DTensor for item in items)


def is_inside(path: str, other: str) -> bool:
    """Return whether a path of plain state is another one, or leads into it."""
    return other == path or other.startswith((f"{path}.", f"{path}["))
