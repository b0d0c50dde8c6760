"""State of data sets that no checkpoint holds: tensors that change, and random values that samples keep."""

import copy
import time
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
            self._unread = copied(data), copied(data), copied(data)
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
            read_one, unread, other = copies
            started = time.monotonic()
            read(read_one, 0, 0)
            if time.monotonic() - started < _MOST_SECONDS:
                kept = digest(read(read_one, 0, 1))
                fresh = digest(read(unread, 0, 1))
                return kept != fresh == digest(read(other, 0, 1))
        return False

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
