"""Scaling of losses, and steps that are left out after an overflow."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dure.terminal import print_text

_FIRST_SCALE, _GROWTH_STEPS = 2.0**16, 2000


class LossScaler:
    """Scale of one loss: halved after an overflow, and doubled after 2,000 steps without one, if it is dynamic."""

    def __init__(self, loss_scale: float | str, least: float | None, most: float) -> None:
        """Begin with a fixed scale, or with `dynamic`.

        Args:
            loss_scale: Number or `dynamic`.
            least: Lower limit of a dynamic scale; None for none.
            most: Upper limit.
        """
        self.is_dynamic = loss_scale == "dynamic"
        self._least, self._most = least, most
        self.scale = min(most, _FIRST_SCALE) if self.is_dynamic else float(loss_scale)
        self.unskipped = 0

    def update(self, *, has_overflown: bool) -> None:
        """Change the scale after a step."""
        if not self.is_dynamic:
            return
        if has_overflown:
            self.scale = self.scale / 2 if self._least is None else max(self._least, self.scale / 2)
            self.unskipped = 0
            return
        self.unskipped += 1
        if self.unskipped == _GROWTH_STEPS:
            self.scale = min(self._most, self.scale * 2)
            self.unskipped = 0


class ScaledOptimizer:
    """Mixed precision of one optimiser: copies of its weights, and whether its next step is left out."""

    def __init__(self, optimizer: Optimizer, *, has_masters: bool) -> None:
        """Let the optimiser step float32 copies of its half weights, if asked, and skip steps."""
        self.optimizer = optimizer
        self.skips = False
        self.pairs: list[tuple[Tensor, Tensor]] = []
        """Weights of the model, and the copies that are stepped."""
        self._has_masters = has_masters
        self._is_begun = False
        self._scale = 1.0
        """Scale of the gradients that the weights have now."""
        for group in optimizer.param_groups:
            self._make_masters(group)
        self._step, self._zero, self._add = optimizer.step, optimizer.zero_grad, optimizer.add_param_group
        for name in ("step", "zero_grad", "add_param_group"):
            # a method of the optimizer itself, because learning-rate schedulers bind its function to the optimizer
            setattr(optimizer, name, MethodType(_calling(getattr(self, name)), optimizer))

    def _make_masters(self, group: dict[str, Any]) -> None:
        if not self._has_masters:
            return
        for place, weight in enumerate(group["params"]):
            if weight.dtype in (torch.float16, torch.bfloat16) and weight.requires_grad:
                master = torch.nn.Parameter(weight.detach().float())
                group["params"][place] = master
                self.pairs.append((weight, master))
                if weight in self.optimizer.state:
                    self.optimizer.state[master] = self.optimizer.state.pop(weight)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose half weights get copies too."""
        self._add(param_group)
        self._make_masters(self.optimizer.param_groups[-1])

    def take_weights(self, loaded: set[int] | None = None) -> None:
        """Copy the model's weights into the copies that are stepped.

        Args:
            loaded: Identities of the weights that were loaded; None for all.
        """
        with torch.no_grad():
            for weight, master in self.pairs:
                if loaded is None or id(weight) in loaded:
                    master.copy_(weight)

    def begin(self, scale: float) -> None:
        """Bring the gradients of backwards before to a scale, so that those of the next one can be added.

        Before the first, the copies get the weights, which may have been loaded or sent by another rank meanwhile.
        """
        if not self._is_begun:
            self._is_begun = True
            self.take_weights()
        if scale != self._scale:
            with torch.no_grad():
                for gradient in self._added_to():
                    gradient.mul_(scale / self._scale)
            self._scale = scale

    def _added_to(self) -> list[Tensor]:
        """Return the gradients to which a backward adds, of the model's own weights."""
        masters = {id(master): weight for weight, master in self.pairs}
        weights = [masters.get(id(p), p) for group in self.optimizer.param_groups for p in group["params"]]
        return [weight.grad for weight in weights if weight.grad is not None]

    def unscale(self) -> bool:
        """Give the stepped weights the unscaled gradients; return whether one is not finite."""
        gradients = self._added_to()
        has_overflown = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        with torch.no_grad():
            for weight, master in self.pairs:
                if weight.grad is not None:
                    added = weight.grad.float() / self._scale
                    master.grad = added if master.grad is None else master.grad + added
                    weight.grad = None
            for gradient in self._added_to():  # of those without a copy
                gradient.mul_(1.0 / self._scale)
        self._scale = 1.0
        return has_overflown

    def step(self, closure: Any = None) -> Any:
        """Take a step, unless the last backward has overflown.

        Raises:
            RuntimeError: A closure is given, which would compute unscaled losses.
        """
        if closure is not None:
            raise RuntimeError("amp does not support closures: call optimizer.step() without one")
        if self.skips:
            self.skips = False
            self.zero_grad()
            return None
        if not self._is_begun:
            self.begin(self._scale)
        result = self._step()
        with torch.no_grad():
            for weight, master in self.pairs:
                weight.copy_(master)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients of the stepped weights and of the model's."""
        self._zero(set_to_none=set_to_none)
        self._scale = 1.0
        for weight, _ in self.pairs:
            weight.grad = None


def _calling(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return call


class Scaling:
    """Scalers and optimisers of `initialize`."""

    def __init__(self) -> None:
        """Begin without any."""
        self.is_enabled: bool | None = None
        """True if losses are scaled; None before `initialize`."""
        self.chooses_types = False
        """True if operations choose their types, as with O1."""
        self.scalers: list[LossScaler] = []
        self.optimizers: list[ScaledOptimizer] = []

    def of(self, optimizer: Optimizer) -> ScaledOptimizer:
        """Return what is kept of an optimiser.

        Raises:
            RuntimeError: `initialize` did not get it.
        """
        for each in self.optimizers:
            if each.optimizer is optimizer:
                return each
        raise RuntimeError("scale_loss was given an optimizer that amp.initialize did not get")


SCALING = Scaling()


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield a loss times its scale, for its backward; afterwards the gradients of the optimisers are unscaled.

    Args:
        loss: Loss, in any type.
        optimizers: Optimisers whose weights get gradients.
        loss_id: Number of the loss, each of which has a scale.
        model: Accepted, as in Apex.
        delay_unscale: Whether gradients stay scaled, for backwards whose gradients are accumulated.
        delay_overflow_check: Accepted; Apex checks at once as well.

    Raises:
        RuntimeError: `initialize` did not get this optimiser, or was told fewer losses.
    """
    if SCALING.is_enabled is None:
        raise RuntimeError("amp.scale_loss was entered before amp.initialize, which prepares models and optimizers")
    if not SCALING.is_enabled:
        yield loss
        return
    if loss_id >= len(SCALING.scalers):
        raise RuntimeError(f"loss_id is {loss_id}, but amp.initialize was told num_losses={len(SCALING.scalers)}")
    scaler = SCALING.scalers[loss_id]
    held = [SCALING.of(each) for each in (optimizers if isinstance(optimizers, Sequence) else [optimizers])]
    for each in held:
        each.begin(scaler.scale)
    yield loss.float() * scaler.scale
    torch.clear_autocast_cache()
    if delay_unscale:
        return
    overflows = [each.unscale() for each in held]  # of all, also after the first
    has_overflown = any(overflows)
    scaler.update(has_overflown=has_overflown)
    if has_overflown and scaler.is_dynamic:
        for each in held:
            each.skips = True
        print_text(f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scaler.scale}")
