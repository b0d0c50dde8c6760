"""Task's loss on several devices of one process: each device has its own task, as each rank has under ddp."""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from dure.errors import TaskInvalid
from dure.strategies.division.gathering import Gathering
from dure.strategies.state.containers import are_same, attributes_of, set_attribute
from dure.strategies.state.forward_state import MISSING, SharedState, cell_contents, disowned

Loss = Callable[[nn.Module, Any], Any]


_MOST_WRAPPERS = 8
"""Maximum nesting of functions around a loss; a function may contain itself."""


class LossReplicas:
    """Losses of one step, one per device.

    The first device's task is the run's own. State that the losses set on the others is compared with it and dropped.
    """

    def __init__(self, loss: Loss, model: nn.Module, num_devices: int) -> None:
        """Create them.

        Args:
            loss: The task's bound method, or any function.
            model: Model of the run.
            num_devices: At least one.
        """
        method = _method_of(loss)
        self.losses: list[Loss] = [loss] * num_devices
        self._tasks: list[Any] = []
        if method is not None:
            self._tasks = [method.__self__, *(_shallow_copy(method.__self__) for _ in range(num_devices - 1))]
            self.losses = [loss, *(_bound_to(task, loss) for task in self._tasks[1:])]
        self._before = {name: _own(value) for task in self._tasks[:1] for name, value in attributes_of(task).items()}
        self._shared = SharedState(model, loss, method)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Attribute a failure to objects that several devices change at the same time, if there are any.

        Raises:
            TaskInvalid: A loss changed an object that all devices have in common.
        """
        try:
            yield
        except Exception:
            self._check_shared()
            raise

    def _check_shared(self) -> None:
        if (change := self._shared.first_changed()) is not None:
            raise TaskInvalid(
                f"{change}, which under balanced_dp each device would do: use dp, which computes one loss, or ddp"
            )

    def settle(self, devices: Sequence[int]) -> None:
        """Compare the state that the losses of a step have set, and keep on the run's task what is equal on all."""
        if len(devices) > 1:
            self._check_shared()
        if not self._tasks:
            return
        now = [attributes_of(self._tasks[device]) for device in devices]
        for name in dict.fromkeys(name for attributes in now for name in attributes):
            values = [attributes.get(name, MISSING) for attributes in now]
            before = self._before.get(name, MISSING)
            if not all(are_same(value, before) for value in values):
                set_attribute(self._tasks[0], name, _settled(name, values, before))


def _method_of(loss: Any, depth: int = _MOST_WRAPPERS) -> MethodType | None:
    """Return the task's method, which may be wrapped in functions."""
    if isinstance(loss, MethodType):
        return loss
    if not isinstance(loss, FunctionType) or not depth:
        return None
    found = (_method_of(cell_contents(cell), depth - 1) for cell in loss.__closure__ or ())
    return next((method for method in found if method is not None), None)


def _bound_to(task: Any, loss: Any, depth: int = _MOST_WRAPPERS) -> Any:
    """Return the same loss with another task."""
    if isinstance(loss, MethodType):
        return MethodType(loss.__func__, task)
    if _method_of(loss, depth) is None:
        return loss
    # state of the function other than the method is shared by all devices
    cells = tuple(
        cell
        if (held := cell_contents(cell)) is MISSING or _method_of(held) is None
        else CellType(_bound_to(task, held))
        for cell in loss.__closure__ or ()
    )
    wrapped = FunctionType(loss.__code__, loss.__globals__, loss.__name__, loss.__defaults__, cells)
    wrapped.__kwdefaults__ = loss.__kwdefaults__
    return wrapped


def same_everywhere(name: str, device: torch.device) -> Gathering:
    """Return a join of the state that each device's loss or forward pass keeps; it must be equal on all of them."""
    cure = "balanced_dp computes a loss on each device; use dp, which computes one, or ddp"
    return Gathering(device=device, counts=(), subject="the loss or the model keeps", name=name, cure=cure)


def _settled(name: str, values: list[Any], before: Any) -> Any:
    try:
        return same_everywhere(f"self.{name} of the task", torch.device("cpu")).of(values)
    except TaskInvalid as error:
        return disowned(values[0], before, str(error))


def _shallow_copy(task: Any) -> Any:
    new: Any = object.__new__(type(task))
    for name, value in attributes_of(task).items():
        set_attribute(new, name, _own(value))
    return new


def _own(value: Any) -> Any:
    """Return a copy of a value to which a loss may add; of data, which may be large, only the outermost container."""
    return copy.copy(value) if issubclass(type(value), list | dict | set | deque) else value
