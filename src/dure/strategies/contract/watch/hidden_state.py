"""Optimiser state that code of the task must not read, because this rank has only a part of it."""

import threading
from types import TracebackType
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
            f"the task's loss or metrics use the state of the optimiser, which {self._strategy} does "
            "not have whole at each call: let the task keep what it needs in a buffer of its own, or use ddp"
        )

    # methods of `dict` that read or change entries
    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __bool__ = __eq__ = _refuse
    get = setdefault = pop = popitem = clear = update = copy = keys = values = items = _refuse
    __hash__ = None


class StateGuard:
    """Context for calls of the task, in one thread or several, in which the optimiser's state is hidden."""

    def __init__(self, optimizer: Optimizer, strategy: str) -> None:
        """Prepare to hide the state.

        Args:
            optimizer: Optimiser as the task built it; a wrapper that has the state of another one is left unchanged.
            strategy: Name of the strategy, for the message.
        """
        self._optimizer = optimizer
        self._hidden = HiddenState(strategy)
        self._lock = threading.Lock()
        self._num_calls = 0
        self._state: Any = None

    def __enter__(self) -> None:
        """Hide the state."""
        with self._lock:
            self._num_calls += 1
            if self._num_calls == 1 and "state" in vars(self._optimizer):
                self._state = self._optimizer.state
                self._optimizer.state = self._hidden  # type: ignore[assignment]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the state after the last call."""
        with self._lock:
            self._num_calls -= 1
            if self._num_calls == 0 and vars(self._optimizer).get("state") is self._hidden:
                self._optimizer.state = self._state
