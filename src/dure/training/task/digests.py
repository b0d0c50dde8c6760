"""Digests of Python values and of a class's code: equal in two processes if and only if the contents are equal."""

import copyreg
import enum
import errno
import functools
import hashlib
import inspect
import types
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), type(NotImplemented))
_CONTAINERS = (list, tuple, dict, set, frozenset)
_DIGESTED_BY_REPR = (torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BYTES = 16


class _Opaque(Exception):
    """Value whose contents cannot be seen: a lock, an open file, a generator."""


_HAS_NO_FILE = (None, errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EACCES)
"""Error numbers for a class whose source is in no file; `inspect` gives none."""


def digest(value: Any) -> str | None:
    """Return a digest of a value's contents, or None if they cannot be seen.

    Nothing is pickled and no computing code of torch runs, because this process may be forked later.
    """
    walk = _Walk(is_strict=True)
    try:
        walk.value(value)
    except (_Opaque, RecursionError):
        return None
    return walk.hash.hexdigest()


def code_digest(cls: type) -> str:
    """Return a digest of a task's class and of its source file, if there is one."""
    hash_ = hashlib.blake2b(class_digest(cls).encode(), digest_size=_BYTES)
    try:
        hash_.update(Path(inspect.getsourcefile(cls) or "").read_bytes())
    except TypeError:
        pass  # the class was defined in an interpreter
    except OSError as error:
        # or in a notebook or an archive; any other error, such as a rank without free descriptors, must not become a
        # digest that only this rank has
        if error.errno not in _HAS_NO_FILE:
            raise
    return hash_.hexdigest()


def class_digest(cls: type) -> str:
    """Return a digest of the code of a class and its bases, except dure's; patched methods count.

    Functions of the same module that the methods call count too, and constants of the class.
    """
    walk = _Walk(is_strict=False)
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] not in ("dure", "builtins", "abc", "typing"):
            walk.class_body(base)
    return walk.hash.hexdigest()


class _Walk:
    """Traversal of a value and everything it refers to, each object once."""

    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        """True if everything that a function closes over counts; False for plain values and functions of its module
        only."""
        self.hash = hashlib.blake2b(digest_size=_BYTES)
        self._seen: dict[int, tuple[int, Any]] = {}
        """Number by identity. The object is kept alive, so that its identity is not reused."""
        self._functions: set[types.FunctionType] = set()

    def _put(self, *words: object) -> None:
        self.hash.update("\0".join(map(str, words)).encode("utf-8", "surrogatepass") + b"\1")

    def value(self, value: Any) -> None:
        if type(value) in _PLAIN or isinstance(value, _DIGESTED_BY_REPR):
            self._put(type(value).__name__, repr(value))
        elif type(value) is tuple:
            self._put("tuple")
            self._all(value)
        elif id(value) in self._seen:
            self._put("again", self._seen[id(value)][0])
        else:
            self._seen[id(value)] = len(self._seen), value
            self._put(type(value).__qualname__)
            self._contents(value)

    def _contents(self, value: Any) -> None:
        if isinstance(value, enum.Enum):
            self._put(value.name)
        elif isinstance(value, PurePath):
            self._put(value)
        elif type(value) is list:
            self._all(value)
        elif type(value) in (set, frozenset):
            self._set(value)
        elif type(value) in (dict, types.MappingProxyType):
            self._all([part for item in value.items() for part in item])
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, type):
            self._put(value.__qualname__)
        elif isinstance(value, types.ModuleType):
            self._put(value.__name__)
        elif isinstance(value, types.FunctionType):
            self.function(value)
        elif isinstance(value, types.MethodType):
            self._all((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            self._all((value.func, value.args, value.keywords))
        elif isinstance(value, types.BuiltinFunctionType):
            self._put(value.__qualname__)
            self.value(value.__self__)
        else:
            self._object(value)

    def _all(self, values: Any) -> None:
        self._put(len(values))
        for value in values:
            self.value(value)

    def _set(self, values: Any) -> None:
        digests = [digest(value) for value in values]
        if None in digests:
            raise _Opaque
        self._put(*sorted(map(str, digests)))

    def _tensor(self, tensor: torch.Tensor) -> None:
        self._put(tensor.dtype, tuple(tensor.shape), tensor.device.type, tensor.requires_grad)
        plain = tensor.detach()
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise _Opaque
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_conj() or tensor.is_neg():
            raise _Opaque
        if not tensor.dtype.is_complex:  # NumPy has no bfloat16 and no float8
            plain = plain.view(_INTEGERS[tensor.dtype.itemsize])
        self._array(plain.numpy())

    def _array(self, array: "np.ndarray[Any, Any]") -> None:
        self._put(array.dtype.str, array.shape)
        if array.dtype.hasobject:
            self._all(array.ravel().tolist())
        else:
            self.hash.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _object(self, value: Any) -> None:
        """Add an object as `copy` sees it: its class, how it is rebuilt, and its state."""
        registered = copyreg.dispatch_table.get(type(value))
        try:
            seen = value.__reduce_ex__(4) if registered is None else registered(value)
        except Exception:
            raise _Opaque from None
        if isinstance(seen, str):
            self._put(seen)
            return
        rebuild, arguments, *rest = seen
        self.value(rebuild)
        self._all(arguments)
        state, items, pairs = (*rest, None, None, None)[:3]
        self.value(state)
        self._all(list(items or ()))
        self._all([part for pair in pairs or () for part in pair])

    # code

    def class_body(self, cls: type) -> None:
        """Add the functions and plain constants of a class, without its bases."""
        self._put("class", cls.__qualname__)
        for name, value in sorted(vars(cls).items()):
            if name.startswith("__dataclass_") or _is_generated(value):
                continue
            functions = [part for part in _functions_in(value) if not _is_generated(part)]
            if functions:
                self._put(name, type(value).__name__)
                for function in functions:
                    self.function(function)
            elif type(value) in (*_PLAIN, *_CONTAINERS) and not name.startswith("__"):
                self._put(name, digest(value))

    def function(self, function: types.FunctionType) -> None:
        """Add a function: its code, its defaults, its closure, and the functions of its module that it names."""
        if function in self._functions:
            return
        self._functions.add(function)
        self._code(function.__code__)
        cells = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells):
            if self._is_strict:
                self.value(value)
            else:
                self._as_far_as_plain(value, function)
        for name in _names_in(function.__code__):
            if name in function.__globals__ and not name.startswith("__"):
                self._as_far_as_plain(function.__globals__[name], function)

    def _as_far_as_plain(self, value: Any, function: types.FunctionType) -> None:
        if isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
            self.function(value)
        elif type(value) in _PLAIN:
            self._put(type(value).__name__, repr(value))

    def _code(self, code: types.CodeType) -> None:
        self.hash.update(code.co_code)
        self._put(code.co_qualname, code.co_names, code.co_varnames, code.co_freevars, code.co_flags)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            elif isinstance(constant, frozenset):
                self._put(*sorted(map(repr, constant)))
            else:
                self._put(type(constant).__name__, repr(constant))


def _names_in(code: types.CodeType) -> list[str]:
    inner = [
        name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names_in(constant)
    ]
    return [*code.co_names, *inner]


def _is_generated(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and value.__code__.co_filename == "<string>"


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _functions_in(value: Any) -> list[types.FunctionType]:
    """Return the functions behind a class attribute: a method of any kind, a property, or a wrapper around one."""
    if isinstance(value, property):
        return [part for part in (value.fget, value.fset, value.fdel) if isinstance(part, types.FunctionType)]
    value = getattr(value, "__func__", value)
    if not callable(value):
        return []
    inner = inspect.unwrap(value)
    return [part for part in ((value,) if inner is value else (value, inner)) if isinstance(part, types.FunctionType)]
