"""Modes of functions and dispatch, autocast and transforms."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def without_overrides() -> AbstractContextManager[Any]:
    """Return a context in which operations treat subclasses of Tensor as plain tensors (private in torch)."""
    return torch._C.DisableTorchFunctionSubclass()


def without_function_modes() -> AbstractContextManager[Any]:
    """Return a context in which neither modes nor subclasses of Tensor see operations (private in torch)."""
    return torch._C.DisableTorchFunction()


class EagerDispatchMode(TorchDispatchMode):
    """Mode of `__torch_dispatch__` for use where nothing is compiled.

    Torch keeps the compiler away from `__torch_dispatch__`, which takes three times as long as a short operation.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_operator(func: object) -> bool:
    """Return whether a function is one of `torch.ops`, as public ones are below autograd (private in torch)."""
    return isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket)


def has_saved_tensors_hooks() -> bool:
    """Return whether hooks get what autograd saves now, as those of an activation checkpoint (private in torch)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def is_below_autograd() -> bool:
    """Return whether a call comes from within torch's dispatch, where no gradient is recorded (private in torch)."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


def schemas_of(operator: Any) -> list[Any]:
    """Return the schemas of one of `torch.ops`: of an overload its own, of a packet those of all (private in torch)."""
    if isinstance(operator, torch._ops.OpOverload):
        return [operator._schema]
    return [getattr(operator, name)._schema for name in operator.overloads()]


@contextmanager
def entered_autocasts(*, are_off: bool = False) -> Iterator[list[torch.autocast]]:
    """Record the autocasts that are entered and that change dtypes (private in torch).

    Args:
        are_off: Whether they change nothing, so that everything is computed in its own dtype.
    """
    found: list[torch.autocast] = []
    kind: Any = torch.autocast
    original = kind.__enter__

    def enter(autocast: Any) -> Any:
        if not autocast._enabled:
            return original(autocast)
        found.append(autocast)
        autocast._enabled = not are_off
        try:
            return original(autocast)
        finally:
            autocast._enabled = True

    kind.__enter__ = enter
    try:
        yield found
    finally:
        kind.__enter__ = original


def has_modes_of_thread() -> bool:
    """Return whether this thread has modes of functions or dispatch, or hooks on saved tensors (private in torch)."""
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._autograd._top_saved_tensors_default_hooks(True)
    )


def is_transforming() -> bool:
    """Return whether a function transform of `torch.func`, such as `vmap`, is active (private in torch)."""
    return torch._C._functorch.peek_interpreter_stack() is not None
