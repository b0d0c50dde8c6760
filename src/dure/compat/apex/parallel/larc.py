"""`apex.parallel.LARC`: learning rates by layer, from the norms of weights and gradients (You et al. 2017)."""

from typing import Any

import torch
from torch.optim import Optimizer


class LARC:
    """Optimiser whose gradients are scaled for each parameter by the ratio of the weight's norm to the gradient's.

    The rate of a parameter is `trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)`. It multiplies the
    optimiser's, or, with `clip`, replaces it where it is smaller. Weight decay is added to the gradient before it is
    scaled.

    Source: You, Gitman and Ginsburg 2017, "Large Batch Training of Convolutional Networks".
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        """Wrap an optimiser, whose interface stays.

        Args:
            optimizer: Optimiser that steps.
            trust_coefficient: Factor of the ratio of norms.
            clip: Whether the optimiser's rate is an upper limit.
            eps: Added to the denominator.
        """
        self.optim = optimizer
        self.trust_coefficient, self.eps, self.clip = trust_coefficient, eps, clip

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the optimiser, such as `param_groups` or `state`."""
        if name == "optim":  # before it is set, as while it is unpickled
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        """Return the text of the optimiser."""
        return repr(self.optim)

    def step(self, closure: Any = None) -> Any:
        """Scale the gradients, and take a step; the settings of the groups stay."""
        decays = [group.get("weight_decay", 0.0) for group in self.optim.param_groups]
        with torch.no_grad():
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0  # it is in the gradients now
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._scale(parameter, group["lr"], decay)
        try:
            return self.optim.step() if closure is None else self.optim.step(closure)
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay

    def _scale(self, parameter: Any, rate: float, decay: float) -> None:
        weight, gradient = torch.norm(parameter), torch.norm(parameter.grad)
        if not weight or not gradient:
            return
        adaptive = self.trust_coefficient * weight / (gradient + decay * weight + self.eps)
        factor = torch.clamp(adaptive / rate, max=1.0) if self.clip else adaptive
        parameter.grad.add_(parameter, alpha=decay).mul_(factor)
