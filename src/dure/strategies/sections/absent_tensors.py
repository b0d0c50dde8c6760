"""Placeholders for parameters and buffers on another rank: code may read their shape, but never their values.

A rank with a section of a model keeps the whole module tree, so that names, shapes and the optimiser's groups are the
same on all ranks. While code of the task runs, an operation on an absent tensor raises `TaskInvalid`.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from dure.errors import TaskInvalid
from dure.strategies.contract.batches import map_tensors
from dure.torchcompat.compilation import without_compilation
from dure.torchcompat.modes import without_overrides
from dure.torchcompat.tensors import give_data

_METADATA = frozenset(
    (
        *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "get_device"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_pinned", "is_shared"),
        *("data_ptr", "is_same_size", "__hash__", "__len__", "register_hook", "register_post_accumulate_grad_hook"),
        *("as_subclass", "is_set_to", "untyped_storage", "requires_grad_"),
    )
)
"""Methods that read no values."""
_ALIASES = frozenset(("detach", "alias", "data"))
"""Methods and attributes whose result is as absent as the tensor."""
_VALUE_ATTRIBUTES = frozenset(("data", "T", "H", "mT", "mH", "real", "imag"))


class _Guard:
    """Counts of running calls of the task, in each thread and in all of them.

    Autograd recomputes checkpoints in its own threads. Therefore calls in other threads count everywhere except in the
    main one: there a rank may copy its state while a thread of RPC computes its section.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_all = 0
        self._own = threading.local()

    def add(self, number: int) -> None:
        """Count the begin (1) or the end (-1) of a call in this thread."""
        if not (own := getattr(self._own, "number", 0)):
            self._own.used = None
        self._own.number = own + number
        with self._lock:
            self._num_all += number

    def note(self, name: str) -> None:
        """Note that a call in this thread has used an absent tensor: its code may catch the error."""
        self._own.used = name

    @property
    def used(self) -> str | None:
        """Name of the absent tensor that calls in this thread have used last; None if they have used none."""
        return getattr(self._own, "used", None)

    @property
    def is_on(self) -> bool:
        """True if this thread may be running code of the task."""
        if not self._num_all:
            return False
        return getattr(self._own, "number", 0) > 0 or threading.current_thread() is not threading.main_thread()


_guard = _Guard()


@contextmanager
def guarded() -> Iterator[None]:
    """Run code of the task, without compilation: a use of absent values raises `TaskInvalid`, even if code catches it.

    Raises:
        TaskInvalid: The code has used absent values.
    """
    _guard.add(1)
    try:
        with without_compilation():
            yield
    except TaskInvalid:
        raise
    except Exception as error:
        _refuse_use(error)
        raise
    else:
        _refuse_use()
    finally:
        _guard.add(-1)


def _refuse_use(error: Exception | None = None) -> None:
    """Refuse a use of absent values that code has caught, or of which it has raised another error."""
    if (used := _guard.used) is not None:
        raise _absent_used(used) from (error or AbsentUsed(used))


def _absent_used(name: str) -> TaskInvalid:
    return TaskInvalid(
        f"the weights of {name} are on another rank, and the task's code, or the model's between its blocks, uses "
        "them now: let the model's forward use them on every batch, or use ddp"
    )


class AbsentUsed(Exception):
    """Cause of a `TaskInvalid`: code used the values of a tensor that is on another rank, of the name in `args`."""


class _Absent:
    """Behaviour of absent parameters and buffers."""

    absent_name: str
    """Name in the model."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute if dure calls, or if no values are read; otherwise raise."""
        name, is_attribute = _name_of(function)
        with without_overrides():
            if not _guard.is_on or (is_attribute and name not in _VALUE_ATTRIBUTES) or name in _METADATA:
                return function(*args, **(kwargs or {}))
            first = _first_absent((args, kwargs))
            if name in _ALIASES and len(args) == 1:
                return made_absent(function(*args, **(kwargs or {})), first)
        _guard.note(first)
        raise _absent_used(first) from AbsentUsed(first)

    def __repr__(self) -> str:
        """Return the name, because there are no values."""
        return f"<{self.absent_name}, on another rank>"


class UsedTensors(TorchFunctionMode):
    """Context that records the tensors whose values operations use, and can restore them."""

    def __init__(self, tensors: Mapping[str, Tensor], *, of_any_gradient: bool = True) -> None:
        """Take the tensors by their names.

        Args:
            tensors: Tensors whose values are watched.
            of_any_gradient: Whether a use of the gradient of any tensor is recorded, and not only of these.
        """
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._of_any_gradient = of_any_gradient
        self._before: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        """Used tensors, by name: the tensors themselves, their memory, and a copy of it."""
        self.has_used_gradients = False
        """True if `.grad` of a tensor was read or set."""
        self.has_gone_back = False
        """True if a backward pass was run."""
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing within the context."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @property
    def names(self) -> set[str]:
        """Names of the tensors that were used."""
        return {*self._before}

    def watches(self, value: object) -> bool:
        """Return whether a value is one of the tensors."""
        return id(value) in self._names

    def put_back(self) -> None:
        """Restore the memory and the values of the tensors."""
        with torch.no_grad():
            for tensor, memory, values in self._before.values():
                give_data(tensor, memory.copy_(values))

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record the tensors among the arguments, unless only metadata such as the shape is read."""
        if self._is_paused:
            return function(*args, **(kwargs or {}))
        name, is_attribute = _name_of(function)
        if is_attribute and name == "grad":
            self.has_used_gradients |= self._of_any_gradient or id(args[0]) in self._names
        self.has_gone_back |= name == "backward"
        if name in _VALUE_ATTRIBUTES if is_attribute else name not in _METADATA:
            map_tensors((args, dict(kwargs or {})), self._note)
        return function(*args, **(kwargs or {}))

    def _note(self, tensor: Tensor) -> Tensor:
        if (name := self._names.get(id(tensor))) is not None and name not in self._before:
            memory = tensor.data
            self._before[name] = tensor, memory, memory.clone()
        return tensor


class UsedState(TorchFunctionMode):
    """Context that records whether operations use values of an optimiser's state.

    Operations in place that only change each element by itself, such as `zero_()` or `mul_(0.5)`, have the same effect
    on parts as on the whole, and do not count as a use.
    """

    def __init__(self, optimizer: Optimizer, *, has_numbers: bool) -> None:
        """Watch the state of an optimiser.

        Args:
            optimizer: Optimiser whose state may be replaced inside the context.
            has_numbers: True if tensors of one number, such as a count of steps, are the same on all ranks.
        """
        super().__init__()
        self._optimizer = optimizer
        self._has_numbers = has_numbers
        self._tensors: dict[int, Tensor] | None = None
        """Tensors of the state, by id; None before the first operation."""
        self.is_used = False
        """True if an operation used values."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Search the arguments for tensors of the state."""
        if not self.is_used:
            name, is_attribute = _name_of(function)
            is_elementwise = not is_attribute and name.strip("_").removeprefix("foreach_") in _ELEMENTWISE
            if is_elementwise and name.endswith("_"):
                read: Any = (args[1:], dict(kwargs or {}))
            elif (is_attribute and name not in _VALUE_ATTRIBUTES) or name in _METADATA or name in _LIKE:
                read = ()
            else:
                read = (args, dict(kwargs or {}))
            map_tensors(read, self._note)
        return function(*args, **(kwargs or {}))

    def _note(self, tensor: Tensor) -> Tensor:
        if self._tensors is None:
            self._tensors = {}
            with without_overrides():
                map_tensors([*getattr(self._optimizer, "state", {}).values()], self._add)
        self.is_used |= id(tensor) in self._tensors
        return tensor

    def _add(self, tensor: Tensor) -> Tensor:
        if self._tensors is not None and (tensor.dim() or not self._has_numbers):
            self._tensors[id(tensor)] = tensor
        return tensor


_ELEMENTWISE = frozenset({
    "abs", "add", "clamp", "clamp_max", "clamp_min", "div", "fill", "iadd", "idiv", "imul", "isub", "itruediv", "mul",
    "nan_to_num", "neg", "pow", "sign", "sqrt", "sub", "zero",
})  # fmt: skip
"""Names of in-place operations, without `_foreach_` and underscores."""
_LIKE = frozenset({
    "empty_like", "full_like", "ones_like", "zeros_like", "new_empty", "new_full", "new_ones", "new_zeros",
})  # fmt: skip
"""Operations that use only the shape and dtype of a tensor."""


class AbsentParameter(_Absent, nn.Parameter):  # type: ignore[misc]
    """Parameter of another rank."""


class AbsentTensor(_Absent, Tensor):  # type: ignore[misc]
    """Buffer of another rank."""


def made_absent(tensor: Tensor, name: str) -> Tensor:
    """Mark a tensor as absent; the object stays the same."""
    if not isinstance(tensor, _Absent):
        tensor.__class__ = AbsentParameter if isinstance(tensor, nn.Parameter) else AbsentTensor
        tensor.absent_name = name  # type: ignore[attr-defined]
    return tensor


def hollow(tensor: Tensor, device: torch.device) -> Tensor:
    """Return one number expanded to the shape of a tensor: NaN if its dtype has it."""
    value = torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)


def _name_of(function: Callable[..., Any]) -> tuple[str, bool]:
    """Return the name of an operation, and whether it reads or sets an attribute."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(function, "__self__", None), "__name__", ""), True
    return name, False


def _first_absent(values: Any) -> str:
    found: list[str] = []

    def look(tensor: Tensor) -> Tensor:
        if isinstance(tensor, _Absent):
            found.append(tensor.absent_name)
        return tensor

    map_tensors(values, look)
    return found[0] if found else "a tensor"
