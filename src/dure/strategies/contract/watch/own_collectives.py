"""Collectives that an optimiser's step, or a hook on it, calls itself, although gradients are already reduced."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dure.errors import TaskInvalid
from dure.torchcompat.collectives import replaced_collectives

_REDUCTIONS = ("all_reduce", "reduce")
"""Prefixes of the names of those that compute: their result depends on the number of ranks."""


@contextmanager
def watched_collectives(optimizer: Optimizer, called: list[str]) -> Iterator[None]:
    """Record reductions called by code that is neither dure's nor torch's, and refuse those of gradients.

    Other collectives pass: an optimiser whose ranks share the work sends its results by `broadcast` or `all_gather`.

    Args:
        optimizer: Optimiser whose step is taken inside the context.
        called: List to which names are appended.

    Raises:
        TaskInvalid: A gradient was about to be reduced; nothing has been sent.
    """
    gradients = {
        parameter.grad.untyped_storage().data_ptr()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and parameter.grad.layout == torch.strided
    }

    def watching(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _is_called_by_user() and name.startswith(_REDUCTIONS):
                tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
                if any(tensor.untyped_storage().data_ptr() in gradients for tensor in tensors):
                    raise TaskInvalid(
                        f"the step of the optimiser {type(optimizer).__name__}, or a hook on it, calls {name} of "
                        "torch.distributed on gradients, which are those of the whole batch there already, on every "
                        "rank: leave that out"
                    )
                called.append(name)
            return function(*args, **kwargs)

        return call

    with replaced_collectives(watching):
        yield


def _is_called_by_user() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and not frame.f_globals.get("__name__", "").startswith("dure.")
