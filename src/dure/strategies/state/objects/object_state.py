"""State of plain Python objects: detection of changes, and restoration.

A task, a module or an optimiser may keep state that is in no `state_dict`: counters, running means, its own generators.
It is found by walking over attributes and containers, as long as these are plain.
"""

import functools
import gc
import io
import operator
import threading
import types
import weakref
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from itertools import islice
from queue import Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import Dataset

from dure.strategies.state.objects.foreign_objects import hides_state, is_foreign
from dure.strategies.state.objects.generator_state import GENERATORS
from dure.strategies.state.objects.namespaces import (
    ATOMS,
    BUILTIN_METHODS,
    SEALED,
    FunctionState,
    Namespace,
    UnsavedBuffers,
    Variables,
    class_variables,
    is_users,
    with_dict,
)
from dure.strategies.state.objects.state_places import (
    DEFINITIONS,
    Place,
    attribute_place,
    cache_place,
    comparable,
    container_place,
    event_place,
    file_place,
    generator_place,
    key_text,
    optimizer_place,
    queue_place,
    skips_state,
    some,
    stream_place,
    variable_place,
)
from dure.strategies.state.objects.tensor_places import (
    array_place,
    bytes_place,
    is_large,
    memory_of,
    memory_place,
    parts_place,
    tensor_place,
)
from dure.torchcompat.compilation import as_written

Holder = tuple[str, str]
"""Path of an owner and the name of its attribute, which is restored as a whole. An object without an owner has an empty
path and its own path as the name.
"""

_COMPILER = ("torch._dynamo", "torch._functorch", "torch._inductor")
"""Packages of `torch.compile`, whose objects count and cache for themselves."""
_COMPILED_ATTRIBUTES = "_dynamo_"
"""Prefix of the attributes that a compiler sets on parameters."""
_CALL = "()"
"""Suffix of a function's path, followed by its variables."""
HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
)
"""Dictionaries of the hooks that a step runs."""
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
"""Classes of `ATOMS`, without their subclasses, which are quick to tell."""
_MOST_OBJECTS = 5_000
"""Maximum number of objects and containers searched in one walk; all others are compared by identity."""
_MOST_CACHED = 100
"""Maximum number of values searched in the cache of a function."""
_MOST_SMALL = 16
"""Maximum number of items of a small value."""
_MOST_LEVELS = 60
"""Maximum nesting of objects in a walk."""


class ObjectState:
    """State of some objects at one point in time."""

    def __init__(
        self,
        roots: Mapping[str, object],
        *,
        sees_data: bool = False,
        sees_unsaved_buffers: bool = False,
        without: object = None,
    ) -> None:
        """Walk over objects.

        Args:
            roots: Objects by the names with which their paths begin. Of an `nn.Module` and an `Optimizer` among them,
                only the plain attributes are included; of those that other objects hold, such as a teacher, all state.
            sees_data: Whether numbers and other plain attributes of a `Dataset` are included. What it changes when it
                is read would be restored too.
            sees_unsaved_buffers: Whether buffers of modules among the objects are included that are in no `state_dict`.
            without: Object that is not searched.
        """
        self._sees_data = sees_data
        self._sees_unsaved_buffers = sees_unsaved_buffers
        self._places: list[Place] = []
        self._seen: dict[int, object] = {id(without): without}
        self._num_left = _MOST_OBJECTS
        self._depth = 0
        self._holder: Holder = ("", "")
        self._hooks: list[tuple[Mapping[int, object], list[int]]] = []
        """Dictionaries of hooks, with the ids of the hooks that they had."""
        self.owners: dict[str, Any] = {}
        """Objects whose attributes are restored one by one, by their paths: roots, modules of a model, tensors,
        functions.
        """
        self.opaque: list[str] = []
        """Paths of iterators: their position can be neither read nor restored."""
        self.hidden: list[str] = []
        """Paths of other objects whose changes cannot be detected."""
        self.large: dict[str, Tensor] = {}
        """Tensors of which no copy is kept, by their paths: code that changes them must undo it."""
        self.first: dict[str, object] = {}
        """Objects in the order in which they were found, by their paths; without those in sets, which have no order."""
        self._is_in_set = False
        self.unseen: str | None = None
        """Path of the first object that was not searched, because there are too many, or it is nested too deeply; None
        if all were.
        """
        trained = [root for root in roots.values() if isinstance(root, nn.Module)]
        self._unsaved: set[int] = set()
        self._trained = {id(t) for root in trained for t in (*root.parameters(), *root.buffers())}
        optimizers = [root for root in roots.values() if isinstance(root, Optimizer)]
        # a strategy may let it step others than the model's, which a schedule finds in its groups
        self._trained |= {id(t) for root in optimizers for group in root.param_groups for t in group["params"]}
        self._by_name = dict(roots)
        self._roots = {id(root) for root in roots.values()}
        self._own_parts = self._roots | {id(module) for root in trained for module in root.modules()}
        self._classes = {id(root.owner) for root in roots.values() if isinstance(root, Namespace)}
        # models and optimisers first: others may hold them, but their state must have their own paths
        for name, root in sorted(roots.items(), key=lambda item: not isinstance(item[1], nn.Module | Optimizer)):
            self._holder = "", name
            self._walk(name, root)

    def is_state_of(self, roots: Mapping[str, object]) -> bool:
        """Return whether these are the objects, and nothing of them has changed."""
        is_same = roots.keys() == self._by_name.keys() and all(
            roots[name] is each for name, each in self._by_name.items()
        )
        # a new hook may hold objects that the walk has not seen
        is_same = is_same and all([*map(id, hooks.values())] == before for hooks, before in self._hooks)
        return is_same and not any(place.has_changed() for place in self._places)

    def changed(self) -> dict[str, Any]:
        """Return changed state by its path, without random number generators.

        The values serve only for comparison with those of another call.
        """
        found: dict[str, Any] = {}
        for place in self._places:
            if not place.is_generator and not place.is_derived and place.has_changed():
                found |= {place.path: place.value()} if place.names is None else place.value()
        return found

    def small_places(self) -> list[Place]:
        """Return the places of small plain values on the host, such as flags, without generators and caches."""

        def is_small(place: Place) -> bool:
            if place.is_generator or place.is_derived:
                return False
            return place.names is not None or is_small_value(self.first.get(place.path))

        return [place for place in self._places if is_small(place)]

    def readers(self, paths: Iterable[str], small: Collection[str] = ()) -> dict[str, Callable[[], Any]]:
        """Return functions that return the current content of state, by its path, to compare it between processes.

        Args:
            paths: Paths of attributes, which need not be set yet, and of other places; unknown ones are left out.
            small: Paths of attributes that are read as None as long as they are not small.
        """
        places = {place.path: place.value for place in self._places if place.names is None}

        def reader(path: str) -> Callable[[], Any] | None:
            owner, _, name = path.rpartition(".")
            if owner in self.owners and name.isidentifier():
                return lambda: content(vars(self.owners[owner]).get(name), path in small)
            return None if path in small else places.get(path)

        def content(value: object, is_only_if_small: bool) -> Any:
            return None if is_only_if_small and not is_small_value(value) else comparable(value)

        return {path: found for path in (*paths, *small) if (found := reader(path)) is not None}

    def current(self, path: str) -> object:
        """Return the object at a path of `readers` now; of a place that is no attribute, the one found first."""
        owner, _, name = path.rpartition(".")
        return vars(self.owners[owner]).get(name) if owner in self.owners and name.isidentifier() else self.first[path]

    def take_changed(self, *, is_thorough: bool = False) -> set[Holder]:
        """Return the holders of changed state, including generators.

        Values and generators are returned only once, and are not watched any more.

        Args:
            is_thorough: Whether large values are compared as a whole too.
        """
        changed = [place for place in self._places if place.has_changed() and not place.is_derived]
        if is_thorough:
            changed += [
                place
                for place in self._places
                if place.has_changed_anywhere is not None and place.has_changed_anywhere()
            ]
        if done := {id(place) for place in changed if place.names is None}:
            self._places = [place for place in self._places if id(place) not in done]
        found = set()
        for place in changed:
            path, name = place.holder
            found |= {(path, name or each) for each in ([name] if place.names is None else place.names())}
        return found

    def generators(self) -> list[str]:
        """Return the paths of the random number generators among the objects."""
        return [place.path for place in self._places if place.is_generator]

    def drawn(self) -> list[str]:
        """Return the paths of the random number generators among the objects that have been drawn from."""
        return [place.path for place in self._places if place.is_generator and place.has_changed()]

    def filled(self) -> list[str]:
        """Return the paths of the functions whose caches have grown."""
        return [place.path for place in self._places if place.is_derived and place.has_changed()]

    def put_back(self, *, keeps_derived: bool = False, only: Collection[str] | None = None) -> list[str]:
        """Restore all state; return the paths of state that cannot be restored.

        Args:
            keeps_derived: Whether caches of functions are left unchanged.
            only: Paths of the places to restore; None for all.
        """
        left = []
        for place in self._places if only is None else [each for each in self._places if each.path in only]:
            if not (keeps_derived and place.is_derived) and place.has_changed():
                place.put_back()
                left += [] if place.is_put_back else [place.path]
        return left

    def put_back_generators(self) -> None:
        """Restore the states of the random number generators."""
        for place in self._places:
            if place.is_generator and place.has_changed():
                place.put_back()

    def _note(self, path: str, value: object) -> None:
        if not self._is_in_set:
            self.first.setdefault(path, value)

    def _walk(self, path: str, value: Any) -> None:
        self._note(path, value)
        if type(value) in _PLAIN:  # most attributes of modules, of which a large model has thousands
            return
        if self._depth < _MOST_LEVELS:
            self._depth += 1
            self._look_into(path, value)
            self._depth -= 1
        elif not isinstance(value, (*ATOMS, *SEALED)) and id(value) not in self._seen:
            self.unseen = self.unseen or path

    def _add(self, place: Place) -> None:
        place.holder = self._holder
        self._places.append(place)

    def _look_into(self, path: str, value: Any) -> None:
        if id(value) in self._roots and self._by_name.get(path) is not value:
            return  # a hook of the optimiser may hold the task, whose state has its own paths
        if self._sees_data and isinstance(value, Dataset) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._attributes(path, value)
        if (written := as_written(value)) is not value:
            self._walk(path, written)
            return
        if is_searched_method(value):
            self._walk(f"{path}.__self__", value.__self__)  # a list, say, that nothing else holds but its `append`
        elif isinstance(value, types.FunctionType) and id(value) not in self._seen and is_users(value):
            self._seen[id(value)] = value
            self._attributes(f"{path}{_CALL}", FunctionState(value))
        elif isinstance(value, functools._lru_cache_wrapper) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._add(cache_place(path, value))
            self._walk(path, value.__wrapped__)
            for number, cached in enumerate(islice(_cached_values(value), _MOST_CACHED)):
                self._walk(f"{path}{_CALL}[{number}]", cached)
        if isinstance(value, (*ATOMS, *SEALED)) or id(value) in self._seen:
            return
        if type(value).__module__.startswith(_COMPILER) and not isinstance(value, nn.Module):
            return
        of_pythons = next((place for kind, place in _OF_PYTHONS.items() if isinstance(value, kind)), None)
        memory = memory_of(value)
        if isinstance(value, torch.jit.ScriptModule):
            self.hidden.append(path)
            return
        if of_pythons is None and memory is None and is_foreign(value):
            if hides_state(value):
                self.hidden.append(path)
            return
        if self._num_left <= 0:
            self.unseen = self.unseen or path
            return
        self._num_left -= 1
        self._seen[id(value)] = value  # kept alive, so that no other object gets its id
        if of_pythons is not None:
            self._add(of_pythons(path, value))
        elif memory is not None:
            self._add(memory_place(path, memory))
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                self._walk(f"{path}.{name}", getattr(value, name))
        elif isinstance(value, Tensor):
            if id(value) in self._unsaved:
                self._add(tensor_place(path, value, is_most_often_constant=True))
            elif id(value) not in self._trained:
                self._tensor(path, value)
        elif isinstance(value, np.ndarray):
            self._add(array_place(path, value))
            for number, (_, item) in enumerate(some(value.ravel()) if value.dtype == object else ()):
                self._walk(f"{path}.flat[{number}]", item)
            self._beside_items(path, value)
        elif (generator := generator_place(path, value)) is not None:
            self._add(generator)
        elif isinstance(value, nn.Module):
            self._module(path, value)
        elif isinstance(value, Optimizer) and id(value) not in self._roots:
            self._add(optimizer_place(path, value))
            self._attributes(path, value)
        elif isinstance(value, tuple | frozenset | list | deque | set | MutableMapping | weakref.WeakSet):
            if not isinstance(value, tuple | frozenset):
                self._add(container_place(path, value))
            if skips_state(value):
                self.unseen = self.unseen or path
            if isinstance(value, defaultdict):
                self._walk(f"{path}.default_factory", value.default_factory)
            outer, self._is_in_set = self._is_in_set, self._is_in_set or not isinstance(value, _ORDERED)
            for number, (key, item) in enumerate(some(value)):
                shown = key_text(key) if isinstance(key, (*ATOMS, tuple)) else f"#{number}"
                self._walk(f"{path}[{shown}]", item)
            self._is_in_set = outer
            self._beside_items(path, value)
        elif isinstance(value, Iterator):
            self.opaque.append(path)
        elif with_dict(value) is not None:
            self._attributes(path, value)
            cls = type(value)
            if (
                self._sees_data
                and id(cls) not in self._classes
                and is_users(cls)
                and not isinstance(value, Variables | Namespace)
            ):
                self._classes.add(id(cls))
                self._attributes(f"{path}.__class__", class_variables(cls))
        elif hides_state(value):
            self.hidden.append(path)

    def _module(self, path: str, value: nn.Module) -> None:
        own = []
        modules = [*value.named_modules()]
        parameters, buffers = [*value.named_parameters()], [*value.named_buffers()]
        for name, module in modules:
            inner = f"{path}.{name}" if name else path
            self._note(inner, module)
            if module is value or id(module) not in self._seen:
                self._seen[id(module)] = module
                own.append(module)
                self._attributes(inner, module)
        for name, tensor in (*parameters, *buffers):
            self._note(f"{path}.{name}", tensor)
        if id(value) not in self._roots:
            self._add(parts_place(path, own))
            self._tensors_of(path, value)
            return
        for name, parameter in parameters:
            if type(parameter) is nn.Parameter and id(parameter) not in self._seen:
                self._seen[id(parameter)] = parameter
                self._attributes_of_tensor(f"{path}.{name}", parameter)
        for name, buffer in buffers:
            self._attributes_of_tensor(f"{path}.{name}", buffer)
        if self._sees_unsaved_buffers:
            for name, module in modules:
                unsaved = UnsavedBuffers(module)
                inner = f"{path}.{name}._buffers" if name else f"{path}._buffers"
                self._unsaved |= {id(buffer) for buffer in unsaved.values()}
                if unsaved:
                    self._attributes(inner, Variables(unsaved))

    def _beside_items(self, path: str, value: Any) -> None:
        """Walk over the attributes of a container of a user's own class."""
        owner = with_dict(value) if is_users(type(value)) else None
        if owner is not None and vars(owner) is not value:
            self._attributes(path, value)

    def _attributes_of_tensor(self, path: str, tensor: Tensor) -> None:
        if type(tensor) not in (Tensor, nn.Parameter) and not is_users(type(tensor)):
            return
        attributes = vars(tensor)
        if attributes:
            self._attributes(path, tensor)
            return

        def names() -> list[str]:
            return [name for name in attributes if not name.startswith(_COMPILED_ATTRIBUTES)]

        def put_back() -> None:
            for name in names():
                del attributes[name]

        # there are hardly ever any, but many tensors: this check runs at the speed of C
        place = Place(
            path,
            attributes.__len__,
            put_back,
            lambda: {f"{path}.{name}": comparable(attributes[name]) for name in names()},
            names=names,
        )
        outer = self._holder
        if not self._is_in_set:
            self.owners[path], self._holder = tensor, (path, "")
        self._add(place)
        self._holder = outer

    def _tensor(self, path: str, tensor: Tensor) -> None:
        if is_large(tensor):
            self.large[path] = tensor
        self._add(tensor_place(path, tensor))
        self._attributes_of_tensor(path, tensor)

    def _tensors_of(self, path: str, module: nn.Module) -> None:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if id(tensor) not in self._trained and id(tensor) not in self._seen:
                self._seen[id(tensor)] = tensor
                self._tensor(f"{path}.{name}", tensor)

    def _attributes(self, path: str, value: Any) -> None:
        owner: Any = with_dict(value)
        before = plain_attributes(owner, value)
        everything = dict(vars(owner).items())
        torchs = _torchs_own(value)
        left_out = {name: item for name, item in everything.items() if name not in before and name not in torchs}
        outer, is_owner = (
            self._holder,
            isinstance(value, Namespace | Variables)
            or (isinstance(value, Tensor) and not self._is_in_set)
            or id(value) in self._own_parts,
        )
        if is_owner:
            self.owners[path] = owner
            self._holder = path, ""

        every = getattr(vars(owner), "unfiltered", {})
        first = dict(every)

        def have_names_changed() -> bool:
            # most classes do not change at all, which is quick to check
            if every and every.keys() == first.keys() and all(map(operator.is_, every.values(), first.values())):
                return False
            there = vars(owner)  # only a value that was left out can become an attribute later
            names_now = there.keys() if type(there) is dict else set(there)  # views of others are slow to compare
            if names_now == everything.keys() and (not left_out or all(there[n] is v for n, v in left_out.items())):
                return False
            return now().keys() != before.keys()

        def names() -> list[str]:
            return [*(now().keys() ^ before.keys())]

        def now() -> dict[str, Any]:
            return plain_attributes(owner, value)

        def put_back() -> None:
            for name in now().keys() - before.keys():
                del vars(owner)[name]
            vars(owner).update(before)

        def came_or_went() -> dict[str, Any]:
            there = now()
            return {f"{path}.{name}": comparable(there.get(name)) for name in there.keys() ^ before.keys()}

        def within(name: str) -> None:
            if is_owner:
                self._holder = path, name

        self._add(Place(path, have_names_changed, put_back, came_or_went, names=names))
        for name, item in before.items():
            within(name)
            self._add(attribute_place(f"{path}.{name}", owner, name, item))
            self._walk(f"{path}.{name}", item)
        is_plain_object = not isinstance(value, (nn.Module, Optimizer, Dataset, Namespace))
        for name, item in left_out.items():
            within(name)
            self._note(f"{path}.{name}", item)
            if is_plain_object and isinstance(item, DEFINITIONS):
                self._add(attribute_place(f"{path}.{name}", owner, name, item))
            if isinstance(item, (types.FunctionType, types.MethodType, *BUILTIN_METHODS)) or (
                self._sees_data and isinstance(item, Dataset)
            ):
                self._walk(f"{path}.{name}", item)
        attributes = vars(owner)
        for hooks in HOOKS:
            registered = attributes.get(hooks)
            if registered is None:
                continue
            if isinstance(registered, dict):
                self._hooks.append((registered, [*map(id, registered.values())]))
            if registered:
                within(hooks)
                for number, hook in enumerate(registered.values()):
                    self._walk(f"{path}.{hooks}[{number}]", hook)
        self._holder = outer


def is_small_value(value: object) -> bool:
    """Return whether a value is quick to read after every step, without waiting for a device."""
    if isinstance(value, Tensor):
        return value.device.type == "cpu" and value.numel() <= _MOST_SMALL
    if isinstance(value, Mapping):
        return len(value) <= _MOST_SMALL and all(isinstance(item, (*ATOMS, np.generic)) for item in value.values())
    if isinstance(value, list | tuple | deque):
        return len(value) <= _MOST_SMALL and all(isinstance(item, (*ATOMS, np.generic)) for item in value)
    return isinstance(value, (*ATOMS, np.generic))


def is_searched_method(value: object) -> bool:
    """Return whether a value is a method whose object is searched: a user's, a generator's, or not one in Python."""
    if isinstance(value, types.MethodType):
        function = value.__func__
        return is_users(function) or isinstance(value.__self__, GENERATORS) or not isinstance(function, _FUNCTIONS)
    return isinstance(value, BUILTIN_METHODS)


def _cached_values(function: Any) -> Iterator[Any]:
    """Yield the values in the cache of a function, which are accessible only through the garbage collector."""
    attributes = vars(function)
    for held in gc.get_referents(function):
        if type(held) is dict and held is not attributes:
            yield from held.values()
        elif held is not attributes and not isinstance(held, (*SEALED, types.FunctionType)):
            yield held


_FUNCTIONS = (types.FunctionType, functools.partial)
_ORDERED = (tuple, list, deque, MutableMapping)
_OF_PYTHONS: dict[Any, Callable[[str, Any], Place]] = {
    bytearray: bytes_place,
    array: bytes_place,
    Queue: queue_place,
    ContextVar: variable_place,
    io.BytesIO: stream_place,
    io.StringIO: stream_place,
    io.TextIOWrapper: file_place,
    io.BufferedReader: file_place,
    threading.Event: event_place,
}
_TORCHS_OWN = {
    nn.Module: frozenset(vars(nn.Module())) | {"_is_full_backward_hook", "_forward_hooks_with_kwargs"},
    Optimizer: frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) - {"defaults"},  # in no `state_dict`
}


def _torchs_own(owner: object) -> frozenset[str]:
    for kind, names in _TORCHS_OWN.items():
        if isinstance(owner, kind):
            return names
    return frozenset()


def plain_attributes(owner: object, kind: object = None) -> dict[str, Any]:
    """Return an object's attributes by name.

    For a module or an optimiser these exclude torch's own, and for a data set its data.

    Args:
        owner: The object, or one that has its attributes as `vars`.
        kind: The object itself, if it is not the owner.
    """
    kind = owner if kind is None else kind
    if isinstance(kind, Dataset):
        return {name: value for name, value in vars(owner).items() if isinstance(value, ATOMS)}
    torchs = _torchs_own(kind)
    # lists of the parameters of a module are no state; a task may have its own parameters
    has_parameters = isinstance(kind, nn.Module | Optimizer)
    return {
        name: value
        for name, value in vars(owner).items()
        if name not in torchs
        and not isinstance(value, SEALED)
        and not (has_parameters and _holds_parameters(value))
        and type(value) is not DTensor
    }


def _holds_parameters(value: object) -> bool:
    """Return whether an attribute is, or lists, parameters, which have their own places (`nn.LSTM` has such lists)."""
    items = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
    return any(isinstance(item, nn.Parameter | weakref.ref) or type(item) is DTensor for item in items)


def is_inside(path: str, other: str) -> bool:
    """Return whether a path of plain state equals another one, or leads into it."""
    return other == path or other.startswith((f"{path}.", f"{path}["))
