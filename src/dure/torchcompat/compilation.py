"""Code that `torch.compile` has compiled, as such or as it is written."""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the names of modules that the task itself has compiled, with `torch.compile` or `compile()`."""
    return [
        name
        for name, module in model.named_modules()
        if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    ]


def as_written(value: Any) -> Any:
    """Return the function of which `torch.compile` made another, or the value itself (private in torch)."""
    return vars(value).get("_torchdynamo_orig_callable", value) if isinstance(value, FunctionType) else value


class _WithoutCompilation:
    """Context of `without_compilation`; torch's stance is one for all threads, so the last one to leave restores it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            # unless it was imported nothing is compiled, and the import takes a second
            if not self._num_inside and "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside and self._stance is not None:
                stance, self._stance = self._stance, None
                stance.__exit__(None, None, None)


_without_compilation = _WithoutCompilation()


def without_compilation() -> AbstractContextManager[None]:
    """Return a context in which functions and models that `torch.compile` made run as they are written.

    Compiled code does not see modes of `__torch_function__`, nor calls of modules that were replaced.
    """
    return _without_compilation


_as_written = threading.local()


def _is_all_as_written() -> bool:
    return bool(getattr(_as_written, "is_set", False))


@contextmanager
def all_as_written() -> Iterator[None]:
    """Let this thread run compiled code as it is written, that of `with_compilation` too."""
    before = _is_all_as_written()
    _as_written.is_set = True
    try:
        with without_compilation():
            yield
    finally:
        _as_written.is_set = before


def with_compilation(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs compiled code as such, even inside of `without_compilation`."""

    @functools.wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _is_all_as_written():
            return compiled(*args, **kwargs)
        with torch.compiler.set_stance("default"):
            return compiled(*args, **kwargs)

    return run
