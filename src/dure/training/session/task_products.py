"""Model and optimiser as a task builds them, and checks that they can be trained."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dure.errors import TaskInvalid, message_of
from dure.training.task.task import Task


def built_model(task: Task) -> nn.Module:
    """Build a task's model.

    Raises:
        TaskInvalid: The result is not a module, or is of a kind that cannot be trained here.
    """
    model = task.build_model()
    name = f"{type(task).__name__}.build_model"
    if not isinstance(model, nn.Module):
        raise TaskInvalid(f"{name} returned {type(model).__name__}: return a torch.nn.Module")
    refuse_lazy(model, name)
    _refuse_scripted(model, name)
    _refuse_divided(model, name)
    try:
        model.train(model.training)
    except NotImplementedError as error:
        raise TaskInvalid(
            f"{name} returned a model that has no modes for training and evaluation ({message_of(error)}), as those of "
            "torch.export have: return the module from which it was made"
        ) from error
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TaskInvalid(f"{name} returned a model without trainable parameters: leave some with requires_grad=True")
    return model


def refuse_lazy(model: nn.Module, name: str) -> None:
    """Refuse a model with lazy modules, whose parameters get their shapes from the first batch.

    Args:
        model: Model as a task built it.
        name: Name of the method that built it.

    Raises:
        TaskInvalid: The model has lazy modules; the message names the first such parameter.
    """
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise TaskInvalid(
            f"{name} returned a model whose {lazy[0]} has no shape yet (a lazy module): call the model once on a few "
            "samples in build_model, which gives it one"
        )


_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Torch classes that divide work themselves; by name, because importing some of them is slow."""


def _refuse_scripted(model: nn.Module, name: str) -> None:
    """Refuse TorchScript, whose attributes and hooks live outside Python; the message names the first such module."""
    scripted = [
        path or "the model" for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)
    ]
    if scripted:
        raise TaskInvalid(
            f"{name} returned a model with TorchScript ({scripted[0]}), whose changes cannot be seen: build it of "
            "torch.nn.Modules, and script what is exported"
        )


def _refuse_divided(model: nn.Module, name: str) -> None:
    """Refuse a model that is divided over ranks or devices already; the message names the wrapper or the parameter."""
    found = [
        f"{path or 'the model'} is wrapped in {cls.__name__}"
        for path, module in model.named_modules()
        for cls in type(module).__mro__
        if cls.__module__.startswith("torch.") and cls.__name__ in _WRAPPERS
    ]
    found += [f"{path} is a DTensor" for path, each in model.named_parameters() if hasattr(each, "device_mesh")]
    if found:
        raise TaskInvalid(
            f"{name} returned a model that is divided over ranks or devices already ({found[0]}): return the plain "
            "module, which dure divides itself"
        )


def checked_optimizer(task: Task) -> Callable[[nn.Module], Optimizer]:
    """Return a function that builds a task's optimiser and refuses an invalid one."""

    def build(model: nn.Module) -> Optimizer:
        is_divided = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
        try:
            optimizer: Any = task.build_optimizer(model)
        except RuntimeError as error:
            if not is_divided:
                raise
            raise TaskInvalid(
                f"{type(task).__name__}.build_optimizer failed ({message_of(error)[:150]}) with weights that the "
                "strategy has divided over the ranks: compute with them in build_model, where they are whole, or use "
                "ddp"
            ) from error
        if not isinstance(optimizer, Optimizer):
            raise TaskInvalid(
                f"{type(task).__name__}.build_optimizer returned {type(optimizer).__name__}: "
                "return a torch.optim.Optimizer"
            )
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TaskInvalid(
                f"{type(task).__name__}.build_optimizer returned {type(optimizer).__name__}, whose step asks for a "
                "closure that computes the loss again: use one that takes a step from gradients, such as AdamW or SGD"
            )
        return optimizer

    return build
