"""Hooks on a model's parameters and modules that see gradients."""

from torch import nn

from dure.torchcompat import num_gradient_hooks


def gradient_hooks(model: nn.Module) -> dict[str, int]:
    """Return the parameters, and modules, with hooks that see gradients, and how many each has."""
    found = {name: num_gradient_hooks(parameter) for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        found[name or type(module).__name__] = len(module._backward_hooks) + len(module._backward_pre_hooks)
    return {name: number for name, number in found.items() if number}
