"""Plain Python state as tensors and plain values: counters and similar state that no `state_dict` contains."""

import io
import threading
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from enum import Enum
from functools import partial
from multiprocessing.sharedctypes import SynchronizedBase
from queue import Queue
from random import SystemRandom
from types import MethodType
from typing import Any, ClassVar, TypeGuard
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dure.strategies.state.objects.foreign_objects import is_foreign
from dure.strategies.state.objects.generator_state import GENERATORS, generator_state
from dure.strategies.state.objects.namespaces import ATOMS, BUILTIN_METHODS, SEALED, with_dict
from dure.strategies.state.objects.object_state import is_searched_method, plain_attributes
from dure.strategies.state.objects.state_places import key_text
from dure.strategies.state.objects.tensor_places import KINDS_OF_MEMORY, is_shared, memory_of

JSON_TYPES = (bool, int, float, str)
SEQUENCES: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque, WeakSet)}
MAPPINGS: dict[str, Any] = {
    kind.__name__: kind for kind in (dict, OrderedDict, defaultdict, Counter, WeakKeyDictionary)
}
FACTORIES: dict[Any, str] = {kind: kind.__name__ for kind in (bool, int, float, str, list, tuple, set, dict)}
_VALUES = (*ATOMS, np.generic, tuple, frozenset)
"""Types of values whose identity does not matter."""


class CannotKeep(TypeError):
    """State of a type that cannot be written without pickle; the message gives its path and type."""


class KnownObjects:
    """Objects that exist whenever a session is built, by their paths."""

    def __init__(self, objects: Mapping[str, object] | None = None, elsewhere: Collection[int] = ()) -> None:
        """Register objects.

        Args:
            objects: Objects by their paths. If an object has several paths, the first is used.
            elsewhere: The `id` of objects whose content is kept in another place, such as the model's parts.
        """
        self.objects = dict(objects or {})
        self.elsewhere = elsewhere
        self.paths: dict[int, str] = {}
        self.kinds: dict[type, str] = {}
        """Path of one object of each type."""
        for path, value in self.objects.items():
            self.kinds.setdefault(type(value), path)
            if not isinstance(value, _VALUES):
                self.paths.setdefault(id(value), path)
        self._memory: dict[int, list[Tensor]] | None = None

    def sharing_memory(self, tensor: Tensor) -> list[Tensor]:
        """Return the known tensors in the same storage as another tensor."""
        if self._memory is None:
            self._memory = {}
            for value in self.objects.values():
                if _is_plain(value):
                    self._memory.setdefault(value.untyped_storage().data_ptr(), []).append(value)
        return self._memory.get(tensor.untyped_storage().data_ptr(), []) if tensor.numel() else []


class Keeper:
    """Converter of state into plain values. An object has one entry, wherever it is referenced."""

    def __init__(self, known: KnownObjects | None = None) -> None:
        """Start without entries.

        Args:
            known: Objects that will exist at the restore. The state of an object is restored into one of these, because
                objects cannot be created; known tensors and containers are filled in place, all others are created.
        """
        self._known = known or KnownObjects()
        self.objects: dict[str, Any] = {}
        """Content of the objects that entries reference: known ones by path, others by number."""
        self._new: dict[int, tuple[str, object]] = {}

    def entry(self, value: Any, path: str) -> Any:
        """Return the entry of a value, from which `Restorer` finds or creates it.

        Raises:
            CannotKeep: The value contains something that cannot be kept; nothing of it is kept then.
        """
        before = len(self.objects)
        try:
            return self._entry(value, path)
        except (CannotKeep, RecursionError):
            while len(self.objects) > before:
                self.objects.popitem()
            raise

    def _entry(self, value: Any, path: str) -> Any:
        if value is None or type(value) in JSON_TYPES or isinstance(value, torch.dtype | torch.Size):
            return value
        for kinds, write in self._values:
            if isinstance(value, kinds):
                return write(self, value, path)
        known = self._known.paths.get(id(value))
        if known is not None and id(value) in self._known.elsewhere:
            return {"ref": known}
        name = known or self._new.setdefault(id(value), (f"#{len(self._new)}", value))[0]
        if name not in self.objects:
            self.objects[name] = None  # for an object that refers to itself
            self.objects[name] = self._content(value, path, is_known=known is not None)
        return {"ref": name}

    def _content(self, value: Any, path: str, *, is_known: bool) -> Any:
        for kinds, write in self._kinds:
            if isinstance(value, kinds):
                return write(self, value, path, is_known)
        raise _unknown(value, path)

    # values

    def _complex(self, value: complex, path: str) -> Any:
        return {"complex": [value.real, value.imag]}

    def _enum(self, value: Enum, path: str) -> Any:
        content = value.value
        # a combination of flags has a value but no name
        how = {"value": content} if type(content) in JSON_TYPES else {"enum": value.name}
        return {**how, "of": self._alike(value, path)}

    def _bytes(self, value: bytes, path: str) -> Any:
        return {"bytes": _as_tensor(value)}

    def _number(self, value: Any, path: str) -> Any:
        return {"scalar": _array_content(value, path)}

    def _tuple(self, value: Any, path: str) -> Any:
        return self._sequence(value, path, True)

    def _method(self, value: MethodType, path: str) -> Any:
        name = value.__func__.__name__
        if id(value) in self._known.paths:
            return self._known_method(value, path)
        if id(value.__self__) not in self._known.paths or getattr(value.__self__, name, None) != value:
            raise _unknown(value, path)
        return {"method": name, "of": self._entry(value.__self__, path)}

    def _builtin_method(self, value: Any, path: str) -> Any:
        if id(value) not in self._known.paths:
            raise _unknown(value, path)
        return self._known_method(value, path)

    def _known_method(self, value: Any, path: str) -> Any:
        """Return the entry of a method with that of its object, if it was searched: nothing else may hold that."""
        held = value.__self__
        is_searched = is_searched_method(value) and not isinstance(held, (type(None), *SEALED))
        return {
            "ref": self._known.paths[id(value)],
            "held": self._entry(held, f"{path}.__self__") if is_searched else None,
        }

    def _device(self, value: torch.device, path: str) -> Any:
        return {"device": str(value)}

    def _range(self, value: range, path: str) -> Any:
        return {"range": [value.start, value.stop, value.step]}

    # objects

    def _tensor(self, value: Tensor, path: str, is_known: bool) -> Any:
        if not _is_plain(value):
            kind = type(value).__name__ if type(value) not in (Tensor, nn.Parameter) else f"{value.layout} tensor"
            raise CannotKeep(f"{path} is a {kind}, as which it cannot be kept (divided over ranks, say)")
        if not is_known and vars(value):
            raise CannotKeep(f"{path} is a tensor with attributes that was made on the way, which cannot be kept")
        if not is_known and (bases := self._known.sharing_memory(value)):
            return self._view(value, bases, path)
        values = value.detach().resolve_conj().resolve_neg()
        content = {"tensor": values, "requires_grad": value.requires_grad}
        if values.is_complex():
            content["tensor"], content["is_complex"] = torch.view_as_real(values), True
        if type(value) is nn.Parameter:
            content["is_parameter"] = True
        if value.device.type != "cpu":
            content["is_on_device"] = True
        if value.is_leaf and value.grad is not None:
            content["grad"] = self._entry(value.grad, f"{path}.grad")
        return content

    def _view(self, value: Tensor, bases: list[Tensor], path: str) -> Any:
        for base in bases:
            begin = value.storage_offset() - base.storage_offset()
            if value.dtype == base.dtype and begin >= 0 and begin + _span(value) <= _span(base):
                place = {"size": [*value.size()], "stride": [*value.stride()], "begin": begin}
                return {"view": self._entry(base, path), **place}
        raise CannotKeep(
            f"{path} shares memory with {self._known.paths[id(bases[0])]}, and a checkpoint would part them"
        )

    def _sequence(self, value: Any, path: str, is_known: bool) -> Any:
        kind = type(value)
        if kind not in SEQUENCES.values():
            raise CannotKeep(f"{path} is a {kind.__qualname__}, a container of its own kind, which cannot be kept")
        items = [
            item if item is None or type(item) in JSON_TYPES else self._entry(item, f"{path}[{i}]")
            for i, item in enumerate(value)
        ]
        return {"items": items, "type": kind.__name__} | ({"maxlen": value.maxlen} if kind is deque else {})

    def _mapping(self, value: Any, path: str, is_known: bool) -> Any:
        kind = type(value)
        if kind not in MAPPINGS.values():
            raise CannotKeep(f"{path} is a {kind.__qualname__}, a container of its own kind, which cannot be kept")
        if any(type(key) is int and key in self._known.paths for key in value):
            raise CannotKeep(
                f"{path} has ids of objects as keys, which are others in another process, so cannot be kept"
            )
        pairs = [
            [
                key if type(key) in JSON_TYPES else self._entry(key, f"{path} (a key)"),
                item if item is None or type(item) in JSON_TYPES else self._entry(item, f"{path}[{key_text(key)}]"),
            ]
            for key, item in value.items()
        ]
        return {"pairs": pairs, "type": kind.__name__, **self._factory(value, path, is_known)}

    def _factory(self, value: Any, path: str, is_known: bool) -> dict[str, Any]:
        """Return how a missing entry is created, by name; empty if the restored mapping knows it."""
        if type(value) is not defaultdict or is_known:
            return {}
        factory = value.default_factory
        if factory is None or any(factory is kind for kind in FACTORIES):
            return {"factory": getattr(factory, "__name__", None)}
        if (found := self._known.objects.get(path)) is None or type(found) is not defaultdict:
            raise _made_on_the_way(value, path)
        return {"like": path}

    def _array(self, value: Any, path: str, is_known: bool) -> Any:
        if type(value) is not np.ndarray:
            raise _unknown(value, path)
        base = value.base
        if not is_known and (id(base) in self._known.paths or isinstance(base, Tensor)):
            raise CannotKeep(f"{path} shares memory with other state, and a checkpoint would part them")
        return _array_content(value, path)

    def _buffer(self, value: Any, path: str, is_known: bool) -> Any:
        return {"buffer": _as_tensor(value), "type": value.typecode if isinstance(value, array) else "bytearray"}

    def _stream(self, value: Any, path: str, is_known: bool) -> Any:
        if type(value) not in (io.BytesIO, io.StringIO) or value.closed:
            raise _unknown(value, path)
        content = value.getvalue()
        return {"stream": content if isinstance(content, str) else _as_tensor(content), "at": value.tell()}

    def _file(self, value: Any, path: str, is_known: bool) -> Any:
        if not is_known:
            raise _made_on_the_way(value, path)
        if value.closed or value.writable() or not value.seekable():
            return None
        try:
            return {"position": value.tell()}
        except OSError as error:
            raise CannotKeep(f"{path} is a file whose position cannot be kept ({error})") from error

    def _event(self, value: Any, path: str, is_known: bool) -> Any:
        return {"flag": value.is_set()}

    def _generator(self, value: Any, path: str, is_known: bool) -> Any:
        if not is_known:
            raise _made_on_the_way(value, path)
        return None if isinstance(value, SystemRandom) else {"generator": generator_state(value)}

    def _other_threads(self, value: Any, path: str, is_known: bool) -> Any:
        raise CannotKeep(
            f"{path} is a {type(value).__qualname__}, which other threads may use, and which cannot be kept"
        )

    def _dataset(self, value: Any, path: str, is_known: bool) -> Any:
        if not is_known:
            raise _made_on_the_way(value, path)
        atoms = plain_attributes(value)
        return {"some": {n: v for n, v in atoms.items() if v is None or type(v) in JSON_TYPES}}

    def _partial(self, value: Any, path: str, is_known: bool) -> Any:
        return {"partial": [self._entry(each, path) for each in (value.func, value.args, value.keywords)]}

    def _module(self, value: nn.Module, path: str, is_known: bool) -> Any:
        like = {} if is_known else {"like": self._like_there(value, path)}
        parts = {}
        for name, module in value.named_modules():
            inner = f"{path}.{name}" if name else path
            if is_known and id(module) not in self._known.paths:
                raise _made_on_the_way(module, inner)
            if id(module) in self._known.elsewhere:
                continue
            attributes = plain_attributes(with_dict(module), module)
            # sizes, dtypes and the like are definitions
            own = {
                n: v for n, v in attributes.items() if v is None or type(v) in JSON_TYPES or not isinstance(v, ATOMS)
            }
            parts[name] = {
                "training": module.training,
                "plain": {n: self._entry(v, f"{inner}.{n}") for n, v in own.items()},
            }
            for kind in ("_parameters", "_buffers"):
                parts[name][kind] = {n: self._entry(v, f"{inner}.{n}") for n, v in getattr(module, kind).items()}
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                parts[name]["extra"] = packed(module.get_extra_state(), f"{inner}.get_extra_state()")
        return {"parts": parts, **like}

    def _memory(self, value: Any, path: str, is_known: bool) -> Any:
        if not is_known:
            raise _made_on_the_way(value, path)
        if is_shared(value):
            raise CannotKeep(
                f"{path} is memory that processes share, so ranks may change it for each other, and it cannot be kept"
            )
        memory = memory_of(value)
        assert memory is not None
        return {"memory": _as_tensor(memory)}

    def _object(self, value: Any, path: str, is_known: bool) -> Any:
        is_opaque = isinstance(value, (*SEALED, *ATOMS)) or is_foreign(value)
        owner = None if is_opaque else with_dict(value)
        if owner is None and (is_opaque or not _has_state_dict(value)):
            if is_known:
                return None  # such as a function or a lock
            raise _unknown(value, path)
        if _has_state_dict(value):
            if not is_known:
                self._like_there(value, path)
            own = value.state_dict()
            if not isinstance(own, Mapping):
                raise CannotKeep(f"{path} is a {type(value).__qualname__}, whose state_dict() is none")
            state = {"state_dict": packed(dict(own), f"{path}.state_dict()")}
            return state if is_known else {**state, "like": path}
        like = {} if is_known else {"like": self._alike(value, path)}
        return {"object": {name: self._entry(item, f"{path}.{name}") for name, item in vars(owner).items()}, **like}

    def _alike(self, value: Any, path: str) -> str:
        """Return the path of a known object of the same type, preferably the one at the same path."""
        if type(self._known.objects.get(path)) is type(value):
            return path
        if type(value) not in self._known.kinds:
            raise _made_on_the_way(value, path)
        return self._known.kinds[type(value)]

    def _like_there(self, value: Any, path: str) -> str:
        there = self._known.objects.get(path)
        if type(there) is not type(value) or id(there) in self._known.elsewhere:
            raise _made_on_the_way(value, path)
        return path

    _values: ClassVar[list[tuple[Any, Callable[["Keeper", Any, str], Any]]]] = [
        (np.generic, _number),
        (complex, _complex),
        (Enum, _enum),
        (bytes, _bytes),
        ((tuple, frozenset), _tuple),
        (MethodType, _method),
        (BUILTIN_METHODS, _builtin_method),
        (torch.device, _device),
        (range, _range),
    ]
    _kinds: ClassVar[list[tuple[Any, Callable[["Keeper", Any, str, bool], Any]]]] = [
        (Tensor, _tensor),
        ((list, set, deque, WeakSet), _sequence),
        ((dict, WeakKeyDictionary), _mapping),
        (np.ndarray, _array),
        ((bytearray, array), _buffer),
        ((io.BytesIO, io.StringIO), _stream),
        ((io.TextIOWrapper, io.BufferedReader), _file),
        (threading.Event, _event),
        (GENERATORS, _generator),
        ((Queue, ContextVar), _other_threads),
        (Dataset, _dataset),
        (partial, _partial),
        (nn.Module, _module),
        ((*KINDS_OF_MEMORY, SynchronizedBase), _memory),
        (object, _object),
    ]


def packed(value: Any, path: str) -> Any:
    """Return a value as tensors and plain values on its own, without references to known objects.

    Raises:
        CannotKeep: The value contains something that cannot be kept.
    """
    keeper = Keeper()
    return {"value": keeper.entry(value, path), "objects": keeper.objects}


def _has_state_dict(value: Any) -> bool:
    cls = type(value)  # the object's own `__getattr__` may raise anything
    return cls is not type and hasattr(cls, "state_dict") and hasattr(cls, "load_state_dict")


def _is_plain(value: object) -> TypeGuard[Tensor]:
    if type(value) is not Tensor and type(value) is not nn.Parameter:
        return False
    return value.layout == torch.strided and not value.is_meta


def _span(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))


def _as_tensor(content: Any) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if len(content) else torch.empty(0)


def _array_content(value: Any, path: str) -> Any:
    if value.dtype.hasobject:
        raise CannotKeep(f"{path} is a numpy.ndarray of objects, which cannot be kept")
    descr = np.lib.format.dtype_to_descr(value.dtype)
    return {"array": _as_tensor(value.tobytes()), "dtype": descr, "shape": list(value.shape)}


def _unknown(value: object, path: str) -> CannotKeep:
    return CannotKeep(f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept")


def _made_on_the_way(value: object, path: str) -> CannotKeep:
    return CannotKeep(f"{path} is a {type(value).__qualname__} that was made on the way, which cannot be kept")
