"""State of data sets that no checkpoint holds: tensors that change, and random values that samples keep."""

import copy
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from dure.strategies.state.data_tensors import LEVELS, tensors_of
from dure.training.task.digests import digest

_MOST_SECONDS = 0.2
"""Seconds of one sample beyond which no further one is read."""


class DataState:
    """State of the data sets since they were made."""

    def __init__(self, data: Any, eval_data: Any = None) -> None:
        """Keep copies of the data set, in which nothing has been read.

        Args:
            data: Training data before any sample is read.
            eval_data: Evaluation data whose tensors are watched too; None for none.
        """
        self._data = data
        self._eval_data = eval_data
        self._unread: tuple[Any, ...] = ()
        with suppress(Exception):  # it may be of a class that cannot be copied
            self._unread = copied(data), copied(data), copied(data), copied(data)
        self._left_out: set[str] = set()
        self._first: dict[str, tuple[Tensor, int]] = {}
        self.record()

    def keeps_random_values(self, read: Callable[[Any, int, int], Any]) -> bool:
        """Return whether a sample keeps the random values drawn at its first read; called once.

        Args:
            read: Returns a sample of a data set, by its index and an epoch.
        """
        copies, self._unread = self._unread, ()
        with suppress(Exception):  # training will raise it
            read_one, unread, other, _ = copies
            started = time.monotonic()
            read(read_one, 0, 0)
            if time.monotonic() - started < _MOST_SECONDS:
                kept = digest(read(read_one, 0, 1))
                fresh = digest(read(unread, 0, 1))
                return kept != fresh == digest(read(other, 0, 1))
        return False

    def changed_by_reading(self, read: Callable[[Any, int, int], Any]) -> list[str]:
        """Return the paths of numbers and queues that change with each read of a sample; called first, and once.

        A container that reading fills is a cache: the samples in it would be read again.

        Args:
            read: As that of `keeps_random_values`.
        """
        if not self._unread:
            return []
        data = self._unread[3]
        numbers, queues = _values_of("data", data, int | float), _values_of("data", data, deque)
        before = {path: copy.copy(queue) for path, queue in queues.items()}
        with suppress(Exception):  # training will raise it
            started = time.monotonic()
            for _ in range(2):
                if time.monotonic() - started < _MOST_SECONDS:
                    read(data, 0, 0)
        now = _values_of("data", data, int | float)
        found = [path for path, number in numbers.items() if repr(now.get(path, number)) != repr(number)]
        found += [path for path, queue in queues.items() if [*map(id, queue)] != [*map(id, before[path])]]
        for path, queue in queues.items():  # the copy shares them with the data set
            queue.clear()
            queue.extend(before[path])
        return found

    def record(self) -> None:
        """Record the current tensors."""
        tensors = self._tensors()
        self._first = {path: (each, each._version) for path, each in tensors.items() if not each.is_inference()}

    def leave_out_changed(self) -> None:
        """Leave out tensors that have changed so far: reading a sample changes them, so they are no state."""
        self._left_out |= {*self.changed()}

    def changed(self) -> list[str]:
        """Return the paths of tensors that were replaced, or written to by torch, since they were recorded."""
        now = self._tensors()
        return [
            path
            for path, (tensor, version) in self._first.items()
            if path not in self._left_out and path in now and (now[path] is not tensor or tensor._version != version)
        ]

    def _tensors(self) -> dict[str, Tensor]:
        of_evaluation = {} if self._eval_data is None else tensors_of("eval_data", self._eval_data)
        return {**of_evaluation, **tensors_of("data", self._data)}


def _values_of(path: str, data: object, kinds: Any, levels: int = LEVELS) -> dict[str, Any]:
    """Return the attributes of some kinds of a data set and of those that it holds, by path."""
    if not isinstance(data, Dataset) or not levels:
        return {}
    found = {f"{path}.{name}": item for name, item in vars(data).items() if isinstance(item, kinds)}
    for name, item in vars(data).items():
        found |= _values_of(f"{path}.{name}", item, kinds, levels - 1)
    return found


def copied(data: Any, levels: int = LEVELS) -> Any:
    """Return a copy of a data set with its own containers and data sets, but the same tensors and other objects."""
    if isinstance(data, dict | list | set):
        return copy.copy(data)
    if not isinstance(data, Dataset) or not levels:
        return data
    other = copy.copy(data)
    for name, item in vars(data).items():
        vars(other)[name] = copied(item, levels - 1)
    return other
