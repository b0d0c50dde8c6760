"""Refusal of collectives that an optimiser's step, or a hook on it, calls itself: ranks have exchanged gradients."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dure.errors import TaskInvalid
from dure.torchcompat import replaced_collectives


@contextmanager
def no_collectives_of_users(optimizer_name: str) -> Iterator[None]:
    """Refuse collectives that are called by code that is neither dure's nor torch's.

    Args:
        optimizer_name: Class of the optimiser whose step is taken inside, for the sentence.

    Raises:
        TaskInvalid: One was called; it has sent nothing.
    """

    def refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _is_called_by_user():
                raise TaskInvalid(
                    f"the step of the optimiser {optimizer_name}, or a hook on it, calls {name} of torch.distributed: "
                    "gradients are those of the whole batch there already, on every rank; leave the exchange out"
                )
            return function(*args, **kwargs)

        return call

    with replaced_collectives(refusing):
        yield


def _is_called_by_user() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and not frame.f_globals.get("__name__", "").startswith("dure.")
