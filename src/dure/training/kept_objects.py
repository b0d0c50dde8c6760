"""Plain Python state as tensors and plain values, and back: counters and the like that no `state_dict` knows."""

import copy
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from queue import Queue
from random import SystemRandom
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dure.strategies.generator_state import GENERATORS, generator_state, set_generator_state
from dure.strategies.namespaces import ATOMS, SEALED, with_dict
from dure.strategies.object_state import plain_attributes
from dure.strategies.state_places import key_text


class CannotKeep(TypeError):
    """State of a kind that cannot be written without pickle; the message says where it is and of which kind."""


def kept(value: Any, path: str, there: Mapping[str, object] | None = None) -> Any:
    """Return a value as tensors and plain values, from which `restored` makes it again.

    Args:
        value: To be kept.
        path: Of the value.
        there: What is there whenever the session is built, by its path. State of an object goes back into such a one,
            for none can be made; a tensor or a container that was there is filled where it is, for others may refer to
            it, and one that has taken its place is made anew. None if the value was there, and all that it holds.

    Raises:
        CannotKeep: It holds something of a kind that cannot be kept.
    """
    return _Keeper(there).kept(value, path)


class _Keeper:
    """Maker of plain values from state, a method for each kind of object."""

    def __init__(self, there: Mapping[str, object] | None) -> None:
        self._there = there

    def kept(self, value: Any, path: str) -> Any:
        if value is None or type(value) in _JSON:
            return value
        for kinds, keep in self._by_kind:
            if isinstance(value, kinds):
                return keep(self, value, path)
        raise CannotKeep(f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept")

    def _tensor(self, value: Tensor, path: str) -> Any:
        if type(value) not in (Tensor, nn.Parameter):
            raise CannotKeep(
                f"{path} is a {type(value).__name__}, as which it cannot be kept (divided over ranks, say)"
            )
        values = value.detach().resolve_conj().resolve_neg()
        return {"tensor": values, "requires_grad": value.requires_grad, **self._is_new(value, path)}

    def _container(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind not in _CONTAINERS.values() and kind not in _MAPPINGS.values():
            raise CannotKeep(f"{path} is a {kind.__qualname__}, a container of its own kind, which cannot be kept")
        if kind in _CONTAINERS.values():
            inside = self if kind not in (set, frozenset) else _Keeper({})  # by its place none is found again
            items = [inside.kept(item, f"{path}[{i}]") for i, item in enumerate(value)]
            more = {"maxlen": value.maxlen} if kind is deque else {}
            return {"items": items, "type": kind.__name__, **more, **self._is_new(value, path)}
        keys = _Keeper({})
        pairs = [
            [keys.kept(key, f"{path} (a key)"), self.kept(item, f"{path}[{key_text(key)}]")]
            for key, item in value.items()
        ]
        more = self._factory(value, path) if kind is defaultdict else {}
        return {"pairs": pairs, "type": kind.__name__, **more, **self._is_new(value, path)}

    def _factory(self, value: Any, path: str) -> dict[str, Any]:
        """Return how a missing entry is made, by name; nothing if that is known where the mapping is."""
        factory = value.default_factory
        if factory is None or any(factory is kind for kind in _FACTORIES):
            return {"factory": getattr(factory, "__name__", None)}
        self._check_there(value, path)
        return {}

    def _is_new(self, value: Any, path: str) -> dict[str, bool]:
        return {} if self._there is None or self._there.get(path) is value else {"is_new": True}

    def _check_there(self, value: Any, path: str) -> None:
        if self._there is not None and type(self._there.get(path)) is not type(value):
            raise CannotKeep(f"{path} is a {type(value).__qualname__} that was made on the way, which cannot be kept")

    def _array(self, value: Any, path: str) -> Any:
        if value.dtype.hasobject:
            raise CannotKeep(f"{path} is a numpy.ndarray of objects, which cannot be kept")
        values = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else torch.empty(0)
        return {
            "array": values,
            "dtype": np.lib.format.dtype_to_descr(value.dtype),
            "shape": list(value.shape),
            "is_array": isinstance(value, np.ndarray),
        } | (self._is_new(value, path))

    def _buffer(self, value: Any, path: str) -> Any:
        values = torch.frombuffer(bytearray(value), dtype=torch.uint8) if len(value) else torch.empty(0)
        kind = value.typecode if isinstance(value, array) else type(value).__name__
        return {"buffer": values, "type": kind, **self._is_new(value, path)}

    def _complex(self, value: complex, path: str) -> Any:
        return {"complex": [value.real, value.imag]}

    def _enum(self, value: Enum, path: str) -> Any:
        self._check_there(value, path)
        return {"enum": value.name}

    def _generator(self, value: Any, path: str) -> Any:
        self._check_there(value, path)
        return {"object": {}} if isinstance(value, SystemRandom) else {"generator": generator_state(value)}

    def _queue(self, value: Any, path: str) -> Any:
        raise CannotKeep(f"{path} is a queue, which other threads may use, and which cannot be kept")

    def _dataset(self, value: Any, path: str) -> Any:
        self._check_there(value, path)
        atoms = {name: vars(value)[name] for name in plain_attributes(value)}
        return {"object": {n: v for n, v in atoms.items() if v is None or type(v) in _JSON}}

    def _module(self, value: nn.Module, path: str) -> Any:
        self._check_there(value, path)
        plain = {}
        for name, module in value.named_modules():
            attributes = {each: vars(module)[each] for each in plain_attributes(module)}
            # sizes, dtypes and the like are definitions
            own = {n: v for n, v in attributes.items() if v is None or type(v) in _JSON or not isinstance(v, ATOMS)}
            inner = f"{path}.{name}" if name else path
            if own:
                plain[name] = {attribute: self.kept(item, f"{inner}.{attribute}") for attribute, item in own.items()}
        return {"state_dict": kept(dict(value.state_dict()), f"{path}.state_dict()"), "plain": plain}

    def _object(self, value: Any, path: str) -> Any:
        owner = None if isinstance(value, (*SEALED, *ATOMS)) else with_dict(value)
        if owner is None and not _has_state_dict(value):
            raise CannotKeep(f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept")
        self._check_there(value, path)
        if _has_state_dict(value):
            own = value.state_dict()
            if not isinstance(own, Mapping):
                raise CannotKeep(f"{path} is a {type(value).__qualname__}, whose state_dict() is none")
            return {"state_dict": kept(dict(own), f"{path}.state_dict()")}
        attributes = {name: self.kept(item, f"{path}.{name}") for name, item in vars(owner).items()}
        return {"object": attributes, **self._is_new(value, path)}

    _by_kind: ClassVar[list[tuple[Any, Callable[["_Keeper", Any, str], Any]]]] = [
        (Tensor, _tensor),
        ((list, tuple, set, frozenset, deque, dict), _container),
        ((np.ndarray, np.generic), _array),
        ((bytes, bytearray, array), _buffer),
        (complex, _complex),
        (Enum, _enum),
        (GENERATORS, _generator),
        (Queue, _queue),
        (Dataset, _dataset),
        (nn.Module, _module),
        (object, _object),
    ]


_JSON = (bool, int, float, str)
_CONTAINERS = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}
_MAPPINGS = {kind.__name__: kind for kind in (dict, OrderedDict, defaultdict, Counter)}
_FACTORIES: dict[Any, str] = {kind: kind.__name__ for kind in (bool, int, float, str, list, tuple, set, dict)}


def _has_state_dict(value: Any) -> bool:
    cls = type(value)  # an object's own `__getattr__` may raise anything
    return cls is not type and hasattr(cls, "state_dict") and hasattr(cls, "load_state_dict")


def restored(state: Any, current: Any, path: str) -> Any:
    """Return what `kept` was given: objects are those that are there, with the state that they had.

    Raises:
        CannotKeep: An object that had state is not there now.
    """
    if not isinstance(state, Mapping):
        return state
    target = None if state.get("is_new") else current
    if "tensor" in state:
        return _restored_tensor(state["tensor"], target, current, requires_grad=state["requires_grad"])
    if "items" in state:
        # what is inside is paired by its place, where the container is of the same kind as before
        olds = list(current) if isinstance(current, list | tuple | deque) else []
        items = [restored(item, olds[i] if i < len(olds) else None, path) for i, item in enumerate(state["items"])]
        kind = _CONTAINERS[state["type"]]
        return _refilled(target, items, kind, partial(deque, maxlen=state["maxlen"]) if kind is deque else kind)
    if "pairs" in state:
        before = current if isinstance(current, Mapping) else {}
        pairs = [(restored(key, None, path), item) for key, item in state["pairs"]]
        entries = {key: restored(item, before.get(key), f"{path}[{key_text(key)}]") for key, item in pairs}
        return _refilled(target, entries, _MAPPINGS[state["type"]], partial(_mapping, state, current))
    if "array" in state:
        return _restored_array(state, target)
    if "buffer" in state:
        content = bytes(state["buffer"].numpy().astype(np.uint8))
        if state["type"] == "bytes":
            return content
        buffer = bytearray(content) if state["type"] == "bytearray" else array(state["type"], content)
        if type(target) is not type(buffer):
            return buffer
        target[:] = buffer
        return target
    if "complex" in state:
        return complex(*state["complex"])
    if current is None:
        raise CannotKeep(f"{path} had state in the run that is gone on with, and is None now")
    if "enum" in state:
        return type(current)[state["enum"]]
    if "generator" in state:
        set_generator_state(current, state["generator"])
    elif "state_dict" in state:
        current.load_state_dict(restored(state["state_dict"], None, path))
        modules = dict(current.named_modules()) if "plain" in state else {}
        for name, own in state.get("plain", {}).items():
            _restore_attributes(modules[name], own, path)
    else:
        current = current if target is not None else copy.copy(current)
        _restore_attributes(with_dict(current), state["object"], path)
    return current


def _restore_attributes(owner: Any, state: Mapping[str, Any], path: str) -> None:
    for name, item in state.items():
        vars(owner)[name] = restored(item, vars(owner).get(name), f"{path}.{name}")


def _restored_tensor(saved: Tensor, target: Any, current: Any, *, requires_grad: bool) -> Tensor:
    if isinstance(target, Tensor) and target.shape == saved.shape and target.dtype == saved.dtype:
        target.detach().copy_(saved)
        return target
    device = current.device if isinstance(current, Tensor) else saved.device
    return saved.clone().to(device).requires_grad_(requires_grad)


def _restored_array(state: Mapping[str, Any], target: Any) -> Any:
    dtype = np.lib.format.descr_to_dtype(_as_descr(state["dtype"]))
    values = np.frombuffer(state["array"].numpy().tobytes(), dtype).reshape(state["shape"]).copy()
    is_alike = isinstance(target, np.ndarray) and (target.shape, target.dtype) == (values.shape, values.dtype)
    if is_alike and target.flags.writeable:
        target[...] = values
        return target
    return values if state["is_array"] else values[()]


def _refilled(target: Any, items: Any, kind: Any, make: Callable[[Any], Any]) -> Any:
    """Put items into the container that is there; make one if it is none, or of another kind."""
    if type(target) is kind and kind not in (tuple, frozenset):
        target.clear()
        (target.update if kind in (set, *_MAPPINGS.values()) else target.extend)(items)
        return target
    return make(items)


def _mapping(state: Mapping[str, Any], current: Any, entries: Mapping[Any, Any]) -> Any:
    kind: Any = _MAPPINGS[state["type"]]
    if kind is not defaultdict:
        return kind(entries)
    named = {name: factory for factory, name in _FACTORIES.items()} | {None: None}
    return kind(named[state["factory"]] if "factory" in state else current.default_factory, entries)


def _as_descr(descr: Any) -> Any:
    """Return a description of a dtype as NumPy made it, before it went through JSON."""
    if not isinstance(descr, list):
        return descr
    return [tuple(_as_descr(part) if i == 1 else _as_shape(part) for i, part in enumerate(field)) for field in descr]


def _as_shape(part: Any) -> Any:
    return tuple(_as_shape(each) for each in part) if isinstance(part, list) else part
