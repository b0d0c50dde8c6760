"""Modules: their contents, calls and places."""

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, cast

import torch
from torch import nn

from dure.torchcompat.tensors import give_data

_MODULE_CALL = "_compiled_call_impl"
BatchNorm = nn.modules.batchnorm._BatchNorm
"""Base class of every BatchNorm, including torch's own SyncBatchNorm (private in torch)."""
Dropout = nn.modules.dropout._DropoutNd
"""Base class of every dropout module (private in torch)."""
MODULE_CONTENTS = attrgetter("_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks")
"""Dictionaries of a module on which its `state_dict` depends, in addition to its class (private in torch)."""
_PLAIN_STATE = ("state_dict", "_save_to_state_dict", "get_extra_state")


def has_plain_state(module: nn.Module) -> bool:
    """Return whether a module's `state_dict` contains its parameters and persistent buffers and nothing else.

    Hooks of torch itself are considered harmless: those of `fully_shard` convert the parameters into shards.
    """
    hooks = [*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()]
    return (
        all(getattr(type(module), name) is getattr(nn.Module, name) for name in _PLAIN_STATE)
        and not any(name in vars(module) for name in _PLAIN_STATE)
        and all(str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)
    )


def move_module(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Move a module to a device, as `module.to(device)` does; parameters stay the same objects.

    By itself torch makes other parameters of those that it moves to kinds of devices from outside, and tied ones would
    be tied no longer.
    """
    there = torch.empty(0, device=device)
    for parameter in module.parameters():
        if not torch._has_compatible_shallow_copy_type(parameter, there):
            gradient = parameter.grad
            give_data(parameter, parameter.detach().to(device))
            parameter.grad = None if gradient is None else gradient.to(device)
    return module.to(device)


def module_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the function that a call of a module runs, including hooks (private in torch)."""
    given: Any = module.__dict__.get(_MODULE_CALL)
    return module._call_impl if given is None else cast(Callable[..., Any], given)


def replace_module_call(module: torch.nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Make calls of a module run another function, as `nn.Module.compile` does (private in torch).

    Returns:
        Function that restores the original one.
    """
    before = module.__dict__.get(_MODULE_CALL)
    module.__dict__[_MODULE_CALL] = call

    def undo() -> None:
        if before is None:
            module.__dict__.pop(_MODULE_CALL, None)
        else:
            module.__dict__[_MODULE_CALL] = before

    return undo


def reduce_unused_too(module: Any) -> bool:
    """Make a sharded module send zeros for parameters that got no gradient on this rank.

    Without it, ranks that used different parameters send messages of different lengths. 2.11 does not support it.

    Args:
        module: Result of `fully_shard`; modules inside it are included.

    Returns:
        Whether it does so from now on.
    """
    if not hasattr(module, "set_reduce_scatter_unused_params"):
        return False
    module.set_reduce_scatter_unused_params(True)
    return True


@contextmanager
def watched_parametrizations(cached: Callable[[], Any]) -> Iterator[None]:
    """Call a function on each look-up in the cache of `torch.nn.utils.parametrize.cached` (private in torch)."""
    parametrize: Any = nn.utils.parametrize

    class Watched(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            cached()
            return super().get(key, default)

    before, parametrize._cache = parametrize._cache, Watched()
    try:
        yield
    finally:
        parametrize._cache = before


@contextmanager
def transforms_in_turn() -> Iterator[None]:
    """Let one thread at a time compute a `torch.func.functional_call`, or with `torch.func.jvp` (private in torch).

    The first puts the given tensors into its module for as long as it lasts, where another thread would use them.
    Derivatives in forward mode have one level in a process, which another thread would leave too early.
    """
    stateless: Any = importlib.import_module("torch.nn.utils.stateless")
    transforms: Any = importlib.import_module("torch._functorch.eager_transforms")
    level: Any = torch.autograd.forward_ad.dual_level
    original, nested, entered, left = (
        stateless._reparametrize_module,
        transforms.jvp_increment_nesting,
        level.__enter__,
        level.__exit__,
    )
    lock = threading.RLock()  # calls inside of calls

    @contextmanager
    def in_turn(*args: Any, **kwargs: Any) -> Iterator[None]:
        with lock, original(*args, **kwargs):
            yield

    @contextmanager
    def nested_in_turn() -> Iterator[int]:
        with lock, nested() as depth:
            yield depth

    def enter(self: Any) -> Any:
        lock.acquire()
        try:
            return entered(self)
        except BaseException:
            lock.release()
            raise

    def leave(self: Any, *error: Any) -> None:
        try:
            left(self, *error)
        finally:
            lock.release()

    stateless._reparametrize_module, transforms.jvp_increment_nesting = in_turn, nested_in_turn
    level.__enter__, level.__exit__ = enter, leave
    try:
        yield
    finally:
        stateless._reparametrize_module, transforms.jvp_increment_nesting = original, nested
        level.__enter__, level.__exit__ = entered, left
