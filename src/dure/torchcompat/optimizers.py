"""Optimisers: division over ranks, hooks on their step, and loss scaling."""

import functools
import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from dure.torchcompat.imports import import_distributed_optim


def divide_optimizer(
    groups: list[dict[str, Any]], take_part: Callable[[list[dict[str, Any]]], Optimizer], *, in_one_message: bool
) -> Optimizer:
    """Assign parameters to the ranks of the default group by torch's ZeroRedundancyOptimizer.

    Importing it raises 67 DeprecationWarnings about `torch.jit` (2.11 and 2.13), so it is imported only here, with
    these warnings suppressed.

    Args:
        groups: Parameter groups with every option of the optimiser, of trainable dense parameters.
        take_part: Function from the groups with only this rank's parameters to the optimiser of these.
        in_one_message: Move the parameters into one buffer per rank, so that a step sends one message of each; they
            must have one dtype and be contiguous. Otherwise each parameter is a message.

    Returns:
        An optimiser with all groups. Its `step` steps this rank's part and sends it to the others. Its state, and
        attributes that are not its own, are those of this rank's part.
    """
    whole = _whole_optimizer_class()(groups, optimizer_class=take_part, parameters_as_bucket_view=in_one_message)
    whole.state = whole.optim.state
    return cast(Optimizer, whole)


@functools.cache
def _whole_optimizer_class() -> type[Any]:
    """Return torch's ZeroRedundancyOptimizer with attributes forwarded to and from the task's own optimiser."""
    engine: Any = import_distributed_optim().ZeroRedundancyOptimizer

    class WholeOptimizer(engine):  # type: ignore[misc]
        __module__ = engine.__module__  # searches of a task's objects skip classes of torch

        def __getattr__(self, name: str) -> Any:
            if "optim" not in vars(self):  # `part` does not exist yet
                raise AttributeError(name)
            return getattr(self.optim, name)

        def __setattr__(self, name: str, value: Any) -> None:
            is_whole = name in vars(self) or hasattr(type(self), name) or not vars(self).get("initialized", False)
            if is_whole:
                super().__setattr__(name, value)
            if not is_whole or (name == "state" and "optim" in vars(self)):
                setattr(self.optim, name, value)

        def __delattr__(self, name: str) -> None:
            if name in vars(self):
                super().__delattr__(name)
            else:
                delattr(self.optim, name)

    return WholeOptimizer


_OPTIMIZERS: Any = importlib.import_module("torch.optim.optimizer")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Registries of an optimiser's hooks, which are missing if it does not call `Optimizer.__init__`."""


def step_hook_registries(optimizer: Optimizer) -> tuple[Mapping[int, Any], ...]:
    """Return the mappings in which hooks on an optimiser's step are registered (private in torch)."""
    own = [getattr(optimizer, name) for name in _STEP_HOOKS if hasattr(optimizer, name)]
    return (*own, _OPTIMIZERS._global_optimizer_pre_hooks, _OPTIMIZERS._global_optimizer_post_hooks)


def step_hooks(optimizer: Optimizer) -> list[Any]:
    """Return the hooks before and after an optimiser's step, without torch's own (private in torch)."""
    hooks = [hook for registry in step_hook_registries(optimizer) for hook in registry.values()]
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("torch.")]


def is_step_replaced(optimizer: Optimizer) -> bool:
    """Return whether an optimiser has its own step instead of its class's, except for that of torch's schedulers."""
    return "step" in vars(optimizer) and not getattr(optimizer.step, "_wrapped_by_lr_sched", False)


def is_of_torch(optimizer: Optimizer) -> bool:
    """Return whether an optimiser steps as torch's own classes do."""
    return type(optimizer).__module__.startswith("torch.optim") and not is_step_replaced(optimizer)


def step_without_hooks(optimizer: Optimizer) -> Callable[..., Any]:
    """Return an optimiser's step without its hooks (private in torch)."""
    step = optimizer.step
    places = [
        *((optimizer, name) for name in _STEP_HOOKS),
        *((_OPTIMIZERS, name) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")),
    ]

    def step_alone(*args: Any, **kwargs: Any) -> Any:
        kept = [getattr(holder, name, OrderedDict()) for holder, name in places]
        for holder, name in places:
            setattr(holder, name, OrderedDict())
        try:
            return step(*args, **kwargs)
        finally:
            for (holder, name), hooks in zip(places, kept, strict=True):
                setattr(holder, name, hooks)

    return step_alone


def share_step_hooks(
    optimizer: Optimizer, part: Optimizer, merge: Callable[[dict[int, Any], dict[int, Any]], dict[int, Any]]
) -> None:
    """Make an optimiser run the hooks of its part's step around its own step, and the part none (private in torch).

    Args:
        optimizer: Optimiser whose step calls that of `part`.
        part: Keeps its hooks, for code that registers and removes them.
        merge: Function from the hooks of the optimiser and those of the part to the hooks that run.
    """
    for name in _STEP_HOOKS:
        setattr(optimizer, name, merge(getattr(optimizer, name), getattr(part, name, {})))
    part.step = step_without_hooks(part)  # type: ignore[method-assign]


@contextmanager
def kept_global_hooks() -> Iterator[None]:
    """Remove hooks on the steps of all optimisers and the calls of all modules that are registered inside the context.

    They are in dictionaries that are private in torch.
    """
    modules: Any = torch.nn.modules.module
    hooks: list[dict[int, Any]] = [
        _OPTIMIZERS._global_optimizer_pre_hooks,
        _OPTIMIZERS._global_optimizer_post_hooks,
        modules._global_forward_pre_hooks,
        modules._global_forward_hooks,
        modules._global_backward_pre_hooks,
        modules._global_backward_hooks,
    ]
    before = [dict(registered) for registered in hooks]
    try:
        yield
    finally:
        for registered, kept in zip(hooks, before, strict=True):
            registered.clear()
            registered.update(kept)


def found_overflows(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, device: torch.device | None = None
) -> list[Tensor]:
    """Return the overflow flags of a scaler after unscaling: one number per device, above 0 if a gradient overflowed.

    They are the live tensors: ranks with other parts of the gradients add theirs in them (private in torch).

    Args:
        scaler: Scaler after `unscale_`.
        optimizer: Unscaled optimiser.
        device: Device of the number for an optimiser without any gradient; without a number no step is taken.
    """
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    if device is not None and not found:
        found[device] = torch.zeros((), dtype=torch.float32, device=device)
    return list(cast(dict[torch.device, Tensor], found).values())


def has_plain_optimizer_state(optimizer: Optimizer) -> bool:
    """Return whether an optimiser's `state_dict` has its unchanged `state` and `param_groups`, and nothing else."""
    if type(optimizer).state_dict is not Optimizer.state_dict or "state_dict" in vars(optimizer):
        return False  # a wrapper that did not call the constructor may lack the hooks
    return not (optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks)
