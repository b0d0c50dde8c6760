"""Layers that are left out of a comparison, because ranks cannot compute them as one does: dropout, BatchNorm."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

NORMS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout",
)  # fmt: skip


def observe_dropout(found: Callable[[], None]) -> None:
    """Call a function whenever a dropout is about to drop something."""
    for owner in (nn.functional, torch):
        for name in _DROPOUTS:
            if hasattr(owner, name):
                setattr(owner, name, _observed(getattr(owner, name), found))
    attention = nn.functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def attending(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any, **rest: Any
    ) -> Any:
        if dropout_p > 0 and not torch.compiler.is_compiling():
            found()
        return attention(query, key, value, attn_mask, dropout_p, *more, **rest)

    nn.functional.scaled_dot_product_attention = attending


def _observed(function: Any, found: Callable[[], None]) -> Any:
    has_own_defaults = function.__module__ == "torch.nn.functional"  # p=0.5 and training=True; those of torch have none

    @functools.wraps(function)
    def observed(*args: Any, **settings: Any) -> Any:
        if not torch.compiler.is_compiling():
            rate = args[1] if len(args) > 1 else settings.get("p", 0.5 if has_own_defaults else 0.0)
            is_training = args[2] if len(args) > 2 else settings.get("training", settings.get("train", True))
            if rate > 0 and is_training:
                found()
        return function(*args, **settings)

    return observed


def leave_out_dropout() -> None:
    """Let every dropout return its input."""

    def same(input: Tensor, *_: Any, **__: Any) -> Tensor:
        return input

    for owner in (nn.functional, torch):
        for name in _DROPOUTS:
            if hasattr(owner, name):
                setattr(owner, name, same)
    attention = nn.functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def without(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any, **rest: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *more, **rest)

    nn.functional.scaled_dot_product_attention = without


def leave_out_statistics() -> None:
    """Let BatchNorm normalise by its running statistics in training, too, and not change them."""
    forward = nn.functional.batch_norm

    @functools.wraps(forward)
    def with_running(
        input: Tensor, mean: Any, variance: Any, weight: Any = None, bias: Any = None, *_: Any, **__: Any
    ) -> Tensor:
        if mean is None or variance is None:
            shape = (1, -1) + (1,) * (input.dim() - 2)
            return input if weight is None else input * weight.view(shape) + bias.view(shape)
        eps = __.get("eps", _[2] if len(_) > 2 else 1e-5)
        return forward(input, mean, variance, weight, bias, False, 0.0, eps)

    nn.functional.batch_norm = with_running  # type: ignore[assignment]
