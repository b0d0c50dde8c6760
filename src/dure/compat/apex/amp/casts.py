"""Types in which operations compute with O1, and functions that ask for one."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dure.host.devices import accelerator


def kinds() -> list[str]:
    """Return the kinds of devices here, the CPU first."""
    kind = accelerator()
    return ["cpu"] if kind is None else ["cpu", kind]


def choose_types(*, enabled: bool) -> None:
    """Let operations choose their type everywhere, or no longer."""
    for device in kinds():
        torch.set_autocast_dtype(device, torch.float16)
        torch.set_autocast_enabled(device, enabled)


def converted(values: Any, kind: torch.dtype) -> Any:
    """Return nested values with all floating-point tensors in one type."""
    return pytree.tree_map(lambda each: each.to(kind) if _is_floating(each) else each, values)


@contextmanager
def disable_casts() -> Iterator[None]:
    """Compute in the types of the operands, as without O1."""
    before = {device: torch.is_autocast_enabled(device) for device in kinds()}
    choose_types(enabled=False)
    try:
        yield
    finally:
        for device, was in before.items():
            torch.set_autocast_enabled(device, was)


def half_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gets float16 in place of other floating-point tensors, if O1 is in use."""
    return _casting(fn, lambda values: torch.float16)


def bfloat16_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gets bfloat16 in place of other floating-point tensors, if O1 is in use."""
    return _casting(fn, lambda values: torch.bfloat16)


def float_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gets float32 in place of other floating-point tensors, if O1 is in use."""
    return _casting(fn, lambda values: torch.float32)


def promote_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gets all floating-point tensors in their widest type, if O1 is in use."""
    return _casting(fn, _widest)


def register_half_function(module: ModuleType | Any, function_name: str) -> None:
    """Replace a function of a module by one that gets float16. Raises ValueError if there is none."""
    _replace(module, function_name, half_function)


def register_bfloat16_function(module: ModuleType | Any, function_name: str) -> None:
    """Replace a function of a module by one that gets bfloat16. Raises ValueError if there is none."""
    _replace(module, function_name, bfloat16_function)


def register_float_function(module: ModuleType | Any, function_name: str) -> None:
    """Replace a function of a module by one that gets float32. Raises ValueError if there is none."""
    _replace(module, function_name, float_function)


def register_promote_function(module: ModuleType | Any, function_name: str) -> None:
    """Replace a function of a module by one that gets the widest type. Raises ValueError if there is none."""
    _replace(module, function_name, promote_function)


def _replace(module: Any, name: str, cast: Callable[..., Any]) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    setattr(module, name, cast(getattr(module, name)))


def _casting(fn: Callable[..., Any], kind_of: Callable[[Any], torch.dtype | None]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(map(torch.is_autocast_enabled, kinds())) and (kind := kind_of((args, kwargs))) is not None:
            args, kwargs = converted((args, kwargs), kind)
        return fn(*args, **kwargs)

    return call


def _widest(values: Any) -> torch.dtype | None:
    found = [each.dtype for each in pytree.tree_leaves(values) if _is_floating(each)]
    return functools.reduce(torch.promote_types, found) if found else None


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
