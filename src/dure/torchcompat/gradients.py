"""Backward, and hooks on gradients."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn


def gradient_hooks_of(tensor: Tensor) -> list[Any]:
    """Return the hooks on a tensor's gradient (private in torch)."""
    hooks: Any = tensor
    return [*(hooks._backward_hooks or {}).values(), *(hooks._post_accumulate_grad_hooks or {}).values()]


def has_accumulation_hooks(tensor: Tensor) -> bool:
    """Return whether a tensor has hooks that are called once its `.grad` has been added to (private in torch)."""
    hooks: Any = tensor
    return bool(hooks._post_accumulate_grad_hooks)


def keep_gradient_hooks(tensor: Tensor) -> Callable[[], None]:
    """Return a function that removes hooks on a tensor's gradient that are registered later (private in torch)."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    before = {name: dict(getattr(tensor, name) or {}) for name in names}

    def undo() -> None:
        for name, hooks in before.items():
            now = getattr(tensor, name)  # the engine keeps this same dictionary
            if now is not None and now != hooks:
                now.clear()
                now.update(hooks)

    return undo


@contextmanager
def without_gradient_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Call no hooks on the gradients of the tensors inside the context (private in torch)."""
    taken: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for tensor in tensors:
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(tensor, name):
                taken.append((hooks, dict(hooks)))
                hooks.clear()  # the engine keeps this same dictionary
    try:
        yield
    finally:
        for hooks, before in taken:
            hooks.update(before)


def copy_gradient_hooks(source: Tensor, target: Tensor) -> None:
    """Register the hooks on one tensor's gradient on another's (private in torch)."""
    hooks: Any = source
    for hook in (hooks._backward_hooks or {}).values():
        target.register_hook(hook)
    for hook in (hooks._post_accumulate_grad_hooks or {}).values():
        target.register_post_accumulate_grad_hook(hook)


_ones: dict[torch.dtype, Tensor] = {}


class BackwardObserver(Protocol):
    """Observer of `run_backward`."""

    @property
    def is_over(self) -> bool:
        """Return whether it has seen enough: it is no longer called then."""

    def begin(self) -> None:
        """Observe the begin of a backward."""

    def end(self) -> None:
        """Observe its end."""


_observers: tuple[BackwardObserver, ...] = ()


@contextmanager
def observed_backwards(observer: BackwardObserver) -> Iterator[None]:
    """Let an observer see the backwards of this process in the context."""
    global _observers
    _observers = (*_observers, observer)
    try:
        yield
    finally:
        _observers = tuple(each for each in _observers if each is not observer)


def run_backward(loss: Tensor, *others: tuple[Tensor, Tensor]) -> None:
    """Accumulate gradients from a scalar loss, and from other tensors with given gradients, in one backward.

    It does what `torch.autograd.backward` does, on the CPU by the engine's own entry point (private in torch). The
    checks before it, and the context that 2.13 keeps for the threads of other devices, cost 25 to 45 us of every step
    there.

    Args:
        loss: Scalar; its gradient is one.
        others: Tensors and their gradients.
    """
    global _observers
    observers = _observers
    for observer in observers:
        observer.begin()
    try:
        _run_backward(loss, *others)
    finally:
        for observer in reversed(observers):
            observer.end()
    for observer in observers:
        if observer.is_over:
            _observers = tuple(each for each in _observers if each is not observer)


def _run_backward(loss: Tensor, *others: tuple[Tensor, Tensor]) -> None:
    tensors, gradients = zip(*others, strict=True) if others else ((), ())
    if loss.device.type != "cpu":
        torch.autograd.backward((loss, *tensors), (None, *gradients))
        return
    if loss.dtype not in _ones:
        _ones[loss.dtype] = torch.ones((), dtype=loss.dtype)
    torch.autograd.Variable._execution_engine.run_backward(
        (loss, *tensors),
        (_ones[loss.dtype], *gradients),
        False,  # keep_graph
        False,  # create_graph
        (),  # inputs
        allow_unreachable=True,
        accumulate_grad=True,
    )


def call_after_backward(function: Callable[[], None]) -> Callable[[], bool]:
    """Call a function at the end of the backward that is running; its errors end that backward.

    Returns:
        Function that tells whether that backward still runs: one that failed never calls the function.
    """

    def call() -> None:
        function()

    torch.autograd.Variable._execution_engine.queue_callback(call)
    is_kept = weakref.ref(call)  # by the engine alone
    return lambda: is_kept() is not None


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""

_NOT_CHANGED = ("torch.", "dure.")
"""Beginnings of the names of modules whose autograd functions get their arguments as they are."""


@contextmanager
def arguments_of_functions(change: Callable[[type, Arguments], Arguments]) -> Iterator[None]:
    """Enter the context in which the arguments of a task's autograd functions are changed, which no mode sees.

    Args:
        change: Receives the class of the function and the arguments of its `apply`; returns those to call it with.
    """
    own = vars(torch.autograd.Function)["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith(_NOT_CHANGED):
            args, kwargs = change(cls, (args, kwargs))
        return own.__get__(None, cls)(*args, **kwargs)  # from torch 2.14 on it is written in C, and has no __func__

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]


def settle_engine() -> None:
    """Prepare autograd's engine for forward and backward from several threads at once. Before the threads.

    In a child of a process that had run a backward itself, the first operation that saves a tensor for backward
    destroys the engine and builds another, without a lock (`PythonEngine::get_python_engine`, 2.13). Threads that did
    so at the same time crashed: 15 of 800 runs in which each ran a backward, 6 of 540 with forward alone; after this
    call none.
    """
    torch.zeros(1, requires_grad=True).sum().backward()


@contextmanager
def modes_in_backward(is_handled: Callable[[Iterable[Any]], bool] = lambda tensors: False) -> Iterator[None]:
    """Enter the context in which a function mode sees what a backward computes: checkpoints, hooks (private in torch).

    torch takes `backward` and `grad` for functions that a mode handles, and leaves the mode while it does so.

    Args:
        is_handled: Tells by their tensors the calls that the mode handles nonetheless.
    """
    own = torch.autograd.has_torch_function
    torch.autograd.has_torch_function = lambda args: is_handled(args)
    try:
        yield
    finally:
        torch.autograd.has_torch_function = own


def clip_to_norm(parameters: Sequence[nn.Parameter], most: float, square: Tensor) -> None:
    """Scale gradients down as `clip_grad_norm_` does, by a norm that was computed elsewhere.

    Args:
        parameters: Parameters with the gradients, or without.
        most: Norm above which gradients are scaled down.
        square: Square of the norm, a real scalar.
    """
    first = next((parameter.grad for parameter in parameters if parameter.grad is not None), None)
    if first is not None:
        norm = square.sqrt().to(device=first.device, dtype=first.dtype.to_real())
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
