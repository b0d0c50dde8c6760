"""State of plain Python objects: seen when it changes, and put back.

A task, a module or an optimiser may keep state that no `state_dict` knows: counters, running means, generators of its
own. It is found by walking over attributes and containers, as far as these are plain.
"""

import copy
import itertools
import operator
import queue
import random
import sys
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import Dataset

from dure.measure.checksum import checksum
from dure.strategies.namespaces import ATOMS, SEALED, FunctionState, Namespace, is_users, with_dict

_CALL = "()"
"""End of a function's path, behind which its variables are."""
_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
)
_MOST_NODES = 5_000
"""Objects and containers that one walk looks into; the rest is compared by identity."""
_MOST_ITEMS = 1_000
"""Items of a container that are looked into, and compared of a long one. Of longer ones, most likely data, a tenth of
as many is looked into."""
_MOST_WATCHED = 10_000
"""Items of a container that are all compared, where nothing is put back."""
_MOST_COPIED = 100_000
"""Items of a container that are all compared and put back."""
_MOST_COMPARED = 1 << 16
"""Elements of a tensor or array whose values are compared between two moments."""
_MOST_ELEMENTS = 1 << 20
"""Elements of a tensor or array whose values are kept to be put back. Of larger ones, some are compared."""
_MOST_SAMPLED = 1 << 14
"""Elements of a large tensor or array that are compared."""


@dataclass(frozen=True, slots=True)
class _Node:
    """Place that may change, with functions that see the change and undo it."""

    path: str
    has_changed: Callable[[], bool]
    put_back: Callable[[], None]
    value: Callable[[], Any] = lambda: None
    """Content at this moment, to be compared with that of another moment."""
    is_generator: bool = False
    is_put_back: bool = True
    """Whether the change can be undone."""
    names: Callable[[], Iterable[str]] | None = None
    """Paths of attributes that came or went, where the place is the names of an object. The value is a dictionary of
    them then."""


class ObjectState:
    """The state that some objects had when this was made."""

    def __init__(self, roots: Mapping[str, object], *, sees_data: bool = False, puts_back: bool = True) -> None:
        """Walk over objects.

        Args:
            roots: The objects by the names that paths begin with. Of an `nn.Module` and an `Optimizer` among them the
                plain attributes are seen; of those that other objects hold, such as a teacher, all state.
            sees_data: Whether numbers and the like are seen that a `Dataset` has as attributes. What it changes by
                being read would be put back too.
            puts_back: Whether `put_back` will be called. If not, less is copied, and of large values a sample compared.
        """
        self._sees_data = sees_data
        self._most_elements = _MOST_ELEMENTS if puts_back else _MOST_COMPARED
        self._most_copied = _MOST_COPIED if puts_back else _MOST_WATCHED
        self._nodes: list[_Node] = []
        self._seen: dict[int, object] = {}
        self._num_left = _MOST_NODES
        self.functions: dict[str, FunctionState] = {}
        """Functions that were found, by their paths."""
        self.opaque: list[str] = []
        """Paths of iterators: their position can be neither seen nor put back."""
        self.large: dict[str, Tensor] = {}
        """Tensors of which no copy is kept, by their paths: whoever changes them undoes it."""
        self.kinds: dict[str, type] = {}
        """Types of what was found, by its path."""
        self.unseen: str | None = None
        """Path of the first object that was not looked into, because there are too many; None if all were."""
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
        for node in self._nodes:
            if not node.is_generator and node.has_changed():
                found |= {node.path: node.value()} if node.names is None else node.value()
        return found

    def take_changed(self) -> list[str]:
        """Return the paths of what is no longer as it was, generators included.

        Values and generators are in one answer only, and are not watched any more.
        """
        changed = [node for node in self._nodes if node.has_changed()]
        if done := {id(node) for node in changed if node.names is None}:
            self._nodes = [node for node in self._nodes if id(node) not in done]
        paths = (path for node in changed for path in ([node.path] if node.names is None else node.names()))
        return list(dict.fromkeys(paths))

    def drawn(self) -> list[str]:
        """Return the paths of the generators of random numbers, among the objects, that have been drawn from."""
        return [node.path for node in self._nodes if node.is_generator and node.has_changed()]

    def put_back(self) -> list[str]:
        """Bring everything back into the state that it had; return the paths of what is too large for that."""
        left = []
        for node in self._nodes:
            if node.has_changed():
                node.put_back()
                left += [] if node.is_put_back else [node.path]
        return left

    def put_back_generators(self) -> None:
        """Bring the generators of random numbers into the states that they had."""
        for node in self._nodes:
            if node.is_generator and node.has_changed():
                node.put_back()

    def _walk(self, path: str, value: Any) -> None:
        self.kinds[path] = type(value)
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
        if isinstance(value, queue.Queue):
            self._walk(f"{path}.queue", value.queue)
        if self._num_left <= 0:
            self.unseen = self.unseen or path
            return
        if isinstance(value, bytearray | array):
            self._nodes.append(_bytes_node(path, value))
        elif isinstance(value, ContextVar):
            self._nodes.append(_variable_node(path, value))
        elif _is_foreign(value):
            return
        self._num_left -= 1
        self._seen[id(value)] = value  # alive, so that no other object gets its id
        if isinstance(value, Tensor):
            if id(value) not in self._trained:
                self._tensor(path, value)
        elif isinstance(value, np.ndarray):
            self._nodes.append(_array_node(path, value, self._most_elements))
        elif (generator := _generator_node(path, value)) is not None:
            self._nodes.append(generator)
        elif isinstance(value, nn.Module):
            for name, module in value.named_modules():
                self._attributes(f"{path}.{name}" if name else path, module)
            if id(value) not in self._roots:
                self._tensors_of(path, value)
        elif isinstance(value, Optimizer) and id(value) not in self._roots:
            self._nodes.append(_optimizer_node(path, value))
        elif isinstance(value, tuple | frozenset):
            self._items(path, _some(value))
        elif isinstance(value, list | deque | set | MutableMapping):
            self._container(path, value)
        elif isinstance(value, Iterator):
            self.opaque.append(path)
        elif (owner := with_dict(value)) is not None:
            self._attributes(path, owner)

    def _tensor(self, path: str, tensor: Tensor) -> None:
        if tensor.numel() > self._most_elements:
            self.large[path] = tensor
        self._nodes.append(_tensor_node(path, tensor, self._most_elements))

    def _tensors_of(self, path: str, module: nn.Module) -> None:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if id(tensor) not in self._trained and id(tensor) not in self._seen:
                self._seen[id(tensor)] = tensor
                self._tensor(f"{path}.{name}", tensor)

    def _items(self, path: str, items: Any) -> None:
        for key, item in items:
            self._walk(f"{path}[{key_text(key)}]", item)

    def _container(self, path: str, value: Any) -> None:
        if len(value) > self._most_copied:
            self._nodes.append(_long_node(path, value))
            self._items(path, _some(value))
            return
        before = copy.copy(value)
        is_mapping = isinstance(value, MutableMapping)

        def put_back() -> None:
            value.clear()
            (value.update if is_mapping or isinstance(value, set) else value.extend)(before)

        self._nodes.append(
            _Node(path, lambda: not _are_same_items(before, value), put_back, lambda: _comparable(value))
        )
        self._items(path, _some(value))

    def _attributes(self, path: str, owner: Any) -> None:
        before = {name: vars(owner)[name] for name in plain_attributes(owner)}
        all_names = {*vars(owner)}
        torchs = _torchs_own(owner)
        left_out = {name: value for name, value in vars(owner).items() if name not in before and name not in torchs}

        def have_names_changed() -> bool:
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
            self._nodes.append(_attribute_node(f"{path}.{name}", owner, name, before[name]))

        def came_or_went() -> dict[str, Any]:
            there = now()
            return {f"{path}.{name}": _comparable(there.get(name)) for name in there.keys() ^ before.keys()}

        self._nodes.append(_Node(path, have_names_changed, put_back, came_or_went, names=names))
        for name, item in before.items():
            self._walk(f"{path}.{name}", item)
        if not isinstance(owner, (nn.Module, Optimizer, Dataset, Namespace)):
            named = {name: item for name, item in left_out.items() if isinstance(item, _DEFINITIONS)}
            self._nodes += [_attribute_node(f"{path}.{name}", owner, name, item) for name, item in named.items()]
        for name, item in left_out.items():
            if isinstance(item, types.FunctionType | types.MethodType) or (
                self._sees_data and isinstance(item, Dataset)
            ):
                self._walk(f"{path}.{name}", item)
        for hooks in _HOOKS:
            for number, hook in enumerate(vars(owner).get(hooks, {}).values()):
                self._walk(f"{path}.{hooks}[{number}]", hook)


_DEFINITIONS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
"""Kinds of values that are no state themselves; which one of them an attribute names is."""


def _some(container: Any, most: int = _MOST_ITEMS // 10) -> Iterator[tuple[Any, Any]]:
    """Yield the items of a container, each with its place; of a long one so many, equally far apart."""
    items = container.items() if isinstance(container, Mapping) else enumerate(container)
    step = 1 if len(container) <= _MOST_ITEMS else -(-len(container) // most)
    yield from list(itertools.islice(items, 0, None, step))


_KNOWN_PACKAGES = ("builtins", "collections", "itertools", "random", "types", "__main__")
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


def _attribute_node(path: str, owner: Any, name: str, before: Any) -> _Node:
    missing = object()

    def has_changed() -> bool:
        return not _is_same(vars(owner).get(name, missing), before)

    return _Node(
        path, has_changed, lambda: vars(owner).__setitem__(name, before), lambda: _comparable(vars(owner).get(name))
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Incomparable:
    """Value of which nothing can be told but which object it is: another one counts as changed by the samples."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Incomparable) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _comparable(value: Any, depth: int = 4) -> Any:
    """Return something that is equal for values that are alike, a few levels deep into containers."""
    if isinstance(value, Tensor) and type(value) is Tensor and value.layout == torch.strided and not value.is_meta:
        shown = [str(value.dtype), tuple(value.shape)]
        return [*shown, _bits(value).tolist() if value.numel() <= _MOST_COMPARED else checksum([value])]
    if isinstance(value, ATOMS):
        return key_text(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return [str(value.dtype), np.shape(value), value.tobytes()]
    if isinstance(value, _DEFINITIONS):
        return value.__qualname__
    if depth and isinstance(value, Mapping):
        return [(_comparable(key, 0), _comparable(item, depth - 1)) for key, item in value.items()]
    if depth and isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if depth and isinstance(value, list | tuple | deque):
        return [_comparable(item, depth - 1) for item in value]
    return _Incomparable(value)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not isinstance(one, (*ATOMS, types.MethodType)) or type(one) is not type(other):
        return False
    return bool(one == other or (one != one and other != other))  # NaN is the same as itself here


def _are_same_items(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, set):
        return bool(one == other)
    return all(map(operator.is_, one, other)) or all(map(_is_same, one, other))


def _long_node(path: str, container: Any) -> _Node:
    """Return the place of a container that is too long to be compared item by item."""
    length, some = len(container), list(_some(container, _MOST_ITEMS))

    def has_changed() -> bool:
        if len(container) != length:
            return True
        if isinstance(container, Mapping):
            return not all(key in container and _is_same(container[key], item) for key, item in some)
        if isinstance(container, set):
            return not all(item in container for _, item in some)
        return not all(_is_same(container[place], item) for place, item in some)

    def shorten() -> None:
        if isinstance(container, list):
            del container[length:]  # logs and histories grow at their end

    return _Node(path, has_changed, shorten, lambda: (len(container), _comparable(some)), is_put_back=False)


def _tensor_node(path: str, tensor: Tensor, most_elements: int) -> _Node:
    version = tensor._version
    is_comparable = tensor.layout == torch.strided and not tensor.is_meta
    is_small = is_comparable and tensor.numel() <= most_elements
    values = tensor.detach().clone() if is_small else None
    sample = _sample(tensor).clone() if is_comparable and not is_small else None

    def has_changed() -> bool:
        if values is None:
            # a change through `.data` has no version
            return bool(tensor._version != version) or not (sample is None or torch.equal(_sample(tensor), sample))
        return not torch.equal(_bits(tensor), _bits(values))

    def put_back() -> None:
        if values is not None:
            at = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())
            tensor.detach()[at].copy_(values[at])  # expanded ones have several elements in one place

    return _Node(path, has_changed, put_back, lambda: _comparable(tensor), is_put_back=is_small)


def _sample(tensor: Tensor) -> Tensor:
    """Return some elements of a tensor as bytes, equally far apart."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)[:_MOST_SAMPLED]
    return _bits(flat[:: flat.numel() // _MOST_SAMPLED | 1])


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes: NaN is equal to itself."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _array_node(path: str, values: Any, most_elements: int) -> _Node:
    is_small = values.dtype != object and values.size <= most_elements

    def looked_at() -> Any:
        return values if is_small else values.flat[:: values.size // _MOST_SAMPLED | 1]

    before = looked_at().copy()

    def has_changed() -> bool:
        now = looked_at()
        return not _are_same_items([*now], [*before]) if values.dtype == object else now.tobytes() != before.tobytes()

    def put_back() -> None:
        if is_small:
            np.copyto(values, before)

    return _Node(path, has_changed, put_back, lambda: _comparable(values), is_put_back=is_small)


def _bytes_node(path: str, value: Any) -> _Node:
    before = value[:]

    def put_back() -> None:
        value[:] = before

    return _Node(path, lambda: value != before, put_back, lambda: bytes(value))


def _variable_node(path: str, variable: ContextVar[Any]) -> _Node:
    before = variable.get(None)

    def has_changed() -> bool:
        return not _is_same(variable.get(None), before)

    def put_back() -> None:
        variable.set(before)

    return _Node(path, has_changed, put_back, lambda: _comparable(variable.get(None)))


def _optimizer_node(path: str, optimizer: Optimizer) -> _Node:
    before = copy.deepcopy(optimizer.state_dict())

    def put_back() -> None:
        optimizer.load_state_dict(copy.deepcopy(before))

    return _Node(path, lambda: not _is_equal_state(optimizer.state_dict(), before), put_back)


def _is_equal_state(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(_is_equal_state(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_equal_state, one, other))
    return _is_same(one, other)


# generators of random numbers

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _generator_node(path: str, value: Any) -> _Node | None:
    if not isinstance(value, GENERATORS) or isinstance(value, random.SystemRandom):
        return None  # the system's own has no state
    before = copy.deepcopy(generator_state(value))

    def has_changed() -> bool:
        return repr(generator_state(value)) != repr(before)

    return _Node(path, has_changed, lambda: set_generator_state(value, before), is_generator=True)


def generator_state(generator: Any) -> Any:
    """Return the state of a generator of random numbers, of torch, NumPy or Python, as plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state(legacy=False)
        return _plain(state)
    return _plain(generator.bit_generator.state)


def set_generator_state(generator: Any, state: Any) -> None:
    """Give a generator the state that `generator_state` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_with_arrays(state))
    else:
        generator.bit_generator.state = _with_arrays(state)


def _plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    return {"array": state.tolist(), "dtype": str(state.dtype)} if isinstance(state, np.ndarray) else state


def _with_arrays(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    if state.keys() == {"array", "dtype"}:
        return np.array(state["array"], dtype=state["dtype"])
    return {key: _with_arrays(value) for key, value in state.items()}


def key_text(key: object) -> str:
    """Return a key as paths show it."""
    try:
        return repr(key)
    except Exception:
        return object.__repr__(key)  # of a class whose own fails


def is_inside(path: str, other: str) -> bool:
    """Return whether a path of plain state is another one, or leads into it."""
    return other == path or other.startswith((f"{path}.", f"{path}["))
