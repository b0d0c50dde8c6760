"""`apex.optimizers`: torch's optimisers with Apex's arguments, as far as torch has them."""

from collections.abc import Iterable
from typing import Any

from torch import optim


class FusedAdam(optim.Adam):
    """`torch.optim.Adam`, by default with decoupled weight decay, as in Apex."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        """Create the optimiser; `set_grad_none` has no effect, as torch drops gradients by default.

        Raises:
            RuntimeError: An option has no counterpart in torch, or none in Apex either (`amsgrad`).
        """
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        _refuse("FusedAdam", "bias_correction=False", is_asked=not bias_correction)
        _refuse("FusedAdam", "master_weights=True", is_asked=master_weights)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            capturable=capturable,
            decoupled_weight_decay=adam_w_mode,
        )


class FusedSGD(optim.SGD):
    """`torch.optim.SGD` with Apex's arguments."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        """Create the optimiser; the last two options have no effect.

        Raises:
            RuntimeError: Weight decay is wanted after momentum, which torch does not offer.
        """
        _refuse("FusedSGD", "wd_after_momentum=True", is_asked=wd_after_momentum)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


class FusedAdagrad(optim.Adagrad):
    """`torch.optim.Adagrad` with Apex's arguments."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        """Create the optimiser; `set_grad_none` has no effect.

        Raises:
            RuntimeError: Decoupled weight decay is wanted, which torch does not offer.
        """
        _refuse("FusedAdagrad", "adagrad_w_mode=True", is_asked=adagrad_w_mode)
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay)


def _refuse(optimizer: str, option: str, *, is_asked: bool) -> None:
    if is_asked:
        raise RuntimeError(f"{optimizer} does not support {option} here: torch's optimizer has nothing like it")


class _NotHere:
    """Optimiser of Apex that torch does not have: scripts may import it, and choose another."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Refuse to be built. Raises RuntimeError."""
        raise RuntimeError(f"{type(self).__name__} is not part of dure's Apex: torch has no such optimizer")


class FusedLAMB(_NotHere):
    """`apex.optimizers.FusedLAMB`, which is refused."""


class FusedMixedPrecisionLamb(_NotHere):
    """`apex.optimizers.FusedMixedPrecisionLamb`, which is refused."""


class FusedNovoGrad(_NotHere):
    """`apex.optimizers.FusedNovoGrad`, which is refused."""


__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]
