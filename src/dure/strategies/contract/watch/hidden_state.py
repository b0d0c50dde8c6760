"""State of an optimiser that code of the task must not read, because this rank has only a part of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.optim import Optimizer

from dure.errors import TaskInvalid


class HiddenState(dict[Any, Any]):
    """Mapping in place of an optimiser's state; any use of it raises `TaskInvalid`."""

    def __init__(self, strategy: str) -> None:
        super().__init__()
        self._strategy = strategy

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TaskInvalid(
            f"the task's loss or metrics use the state of the optimiser, of which a rank of {self._strategy} has a "
            "part only: let the task keep what it needs in a buffer of its own, or use ddp"
        )

    # the names of `dict` that read or change entries
    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __bool__ = __eq__ = _refuse
    get = setdefault = pop = popitem = clear = update = copy = keys = values = items = _refuse
    __hash__ = None


@contextmanager
def hidden_state(optimizer: Optimizer, strategy: str) -> Iterator[None]:
    """Hide an optimiser's state while code of the task runs.

    Raises:
        TaskInvalid: The code uses the state.
    """
    if "state" not in vars(optimizer):  # a wrapper that has the state of another
        yield
        return
    state = optimizer.state
    optimizer.state = HiddenState(strategy)  # type: ignore[assignment]
    try:
        yield
    finally:
        optimizer.state = state
