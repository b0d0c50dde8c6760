"""Optimiser state and parameters that code of the task must not read, because this rank has only a part of them."""

import sys
import threading
from collections.abc import Iterator
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


class HiddenParameters(list[Any]):
    """List in place of the parameters of an optimiser's group; any use of it raises `TaskInvalid`.

    The loss uses others than those: gathered or divided ones, or those of all ranks. So it would find no gradients, or
    parts of the weights, and would go on with them. Clearing gradients does no harm.
    """

    def __init__(self, parameters: Any, strategy: str) -> None:
        super().__init__()
        self.parameters = parameters
        self._strategy = strategy

    def __iter__(self) -> Iterator[Any]:
        if sys._getframe(1).f_code.co_name == Optimizer.zero_grad.__name__:
            return iter(self.parameters)
        return self._refuse()

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TaskInvalid(
            "the task's loss or metrics use parameters that they take from the groups of the optimiser, where "
            f"{self._strategy} has parts of them, or those of one rank: take them from the model, as "
            "model.parameters(), or use ddp"
        )

    # methods of `list` that read or change items
    __getitem__ = __setitem__ = __delitem__ = __contains__ = __len__ = __bool__ = __eq__ = __reversed__ = _refuse
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __iadd__ = __mul__ = __rmul__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = copy = count = index = reverse = sort = _refuse
    __hash__ = None


class StateGuard:
    """Context for calls of the task, in one thread or several, in which the optimiser's state is hidden."""

    def __init__(self, optimizer: Optimizer, strategy: str, *, hides_parameters: bool = False) -> None:
        """Prepare to hide the state.

        Args:
            optimizer: Optimiser as the task built it; a wrapper that has the state of another one is left unchanged.
            strategy: Name of the strategy, for the message.
            hides_parameters: Whether the parameters in its groups are hidden too.
        """
        self._optimizer = optimizer
        self._strategy = strategy
        self._hides_parameters = hides_parameters
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
            if self._num_calls == 1 and self._hides_parameters:
                for group in self._optimizer.param_groups:
                    group["params"] = HiddenParameters(group["params"], self._strategy)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the state after the last call."""
        with self._lock:
            self._num_calls -= 1
            if self._num_calls == 0 and vars(self._optimizer).get("state") is self._hidden:
                self._optimizer.state = self._state
            if self._num_calls == 0 and self._hides_parameters:
                for group in self._optimizer.param_groups:
                    if isinstance(group["params"], HiddenParameters):
                        group["params"] = group["params"].parameters
