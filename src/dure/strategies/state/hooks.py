"""Hooks on a model's parameters and modules."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from dure.torchcompat.gradients import gradient_hooks_of, keep_gradient_hooks
from dure.torchcompat.optimizers import kept_global_hooks

_REGISTERS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_STEPS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def gradient_hooks(model: nn.Module) -> dict[str, int]:
    """Return the parameters and modules with hooks that receive gradients, with the number of hooks of each."""
    found = {name: len(gradient_hooks_of(parameter)) for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        found[name or type(module).__name__] = len(module._backward_hooks) + len(module._backward_pre_hooks)
    return {name: number for name, number in found.items() if number}


@contextmanager
def without_new_hooks(model: nn.Module, *optimizers: Optimizer) -> Iterator[None]:
    """Remove hooks on gradients, calls of modules and optimisers' steps that are registered inside the context."""
    undo = [keep_gradient_hooks(parameter) for parameter in model.parameters()]
    # only these: FSDP registers the hooks of its state_dict in its first forward pass
    registers = [
        (hooks, hooks.copy()) for module in model.modules() for hooks in (vars(module)[name] for name in _REGISTERS)
    ]
    # an optimiser that wraps another may leave out Optimizer.__init__, which makes them
    own = [vars(each)[name] for each in optimizers for name in _OF_STEPS if name in vars(each)]
    registers += [(hooks, hooks.copy()) for hooks in own]
    try:
        with kept_global_hooks():
            yield
    finally:
        for remove_new in undo:
            remove_new()
        for hooks, before in registers:
            hooks.clear()
            hooks.update(before)
