"""State of data sets that no checkpoint holds: contents that change, and random values that samples keep."""

import copy
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dure.strategies.state.data_tensors import LEVELS, Contents, KeptDataSets, tensors_of
from dure.training.task.digests import digest

_MOST_SECONDS = 0.2
"""Seconds after which no further sample is read."""
_NUM_OTHERS, _NUM_DRAWS = 8, 4
"""Numbers of other samples that are read before one, and of the epochs for which that one is read."""
_NUM_COPIES = 7
_COPYING = ("__reduce__", "__reduce_ex__", "__getstate__")
_MOST_COPIED_BYTES, _MOST_COPIED_ITEMS = 1 << 16, 256


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
            self._unread = tuple(copied(data) for _ in range(_NUM_COPIES))
        self._left_out: set[str] = set()
        self._first: dict[str, tuple[Tensor, int]] = {}
        self._contents: list[Contents] = []
        self.record()

    def keeps_random_values(self, read: Callable[[Any, int, int], Any]) -> bool:
        """Return whether a sample keeps the random values drawn at its first read.

        Args:
            read: Returns a sample of a data set, by its index and an epoch.
        """
        with suppress(Exception):  # training will raise it
            read_one, unread, other = self._take_copies(3)
            started = time.monotonic()
            read(read_one, 0, 0)
            if time.monotonic() - started < _MOST_SECONDS:
                kept = digest(read(read_one, 0, 1))
                fresh = digest(read(unread, 0, 1))
                return kept != fresh == digest(read(other, 0, 1))
        return False

    def follows_from_other_reads(self, read: Callable[[Any, int, int], Any]) -> bool:
        """Return whether a sample is another one after reads of others, as with a running mean or a replay buffer.

        Args:
            read: As that of `keeps_random_values`.
        """
        with suppress(Exception):  # training will raise it
            used, unread, other = self._take_copies(3)
            deadline = time.monotonic() + _MOST_SECONDS
            for index in range(1, min(len(used), 1 + _NUM_OTHERS)):
                read(used, index, 0)
                if time.monotonic() > deadline:
                    break
            for epoch in range(_NUM_DRAWS):
                after_others, fresh = digest(read(used, 0, epoch)), digest(read(unread, 0, epoch))
                if fresh != digest(read(other, 0, epoch)) or time.monotonic() > deadline:
                    break
                if after_others != fresh:
                    return True
        return False

    def changed_by_reading(self, read: Callable[[Any, int, int], Any]) -> list[str]:
        """Return the paths of numbers and queues that change with each read of a sample.

        A container that reading fills is a cache: the samples in it would be read again.

        Args:
            read: As that of `keeps_random_values`.
        """
        if not self._unread:
            return []
        (data,) = self._take_copies(1)
        numbers, queues = _values_of("data", data, int | float), _values_of("data", data, deque)
        before = {path: copy.copy(queue) for path, queue in queues.items()}
        with suppress(Exception):  # training will raise it
            started = time.monotonic()
            for _ in range(2):
                if time.monotonic() - started < _MOST_SECONDS:
                    read(data, 0, 0)
        now = _values_of("data", data, int | float)
        found = [path for path, number in numbers.items() if repr(now.get(path, number)) != repr(number)]
        return found + [path for path, queue in queues.items() if [*map(id, queue)] != [*map(id, before[path])]]

    def _take_copies(self, count: int) -> tuple[Any, ...]:
        """Return copies in which nothing was read; each is given once."""
        taken, self._unread = self._unread[:count], self._unread[count:]
        return taken

    def record(self) -> None:
        """Record the current tensors, and the contents of containers and arrays of the training data."""
        tensors = self._tensors()
        self._first = {path: (each, each._version) for path, each in tensors.items() if not each.is_inference()}
        self._contents = KeptDataSets({"data": self._data}).contents

    def leave_out_changed(self) -> None:
        """Leave out what has changed so far: reading a sample changes it, so it is no state."""
        self._left_out |= {*self.changed(), *(each.path for each in self._contents if each.has_changed())}

    def changed(self) -> list[str]:
        """Return the paths of what has changed since it was recorded.

        These are tensors that were replaced, or written to by torch, and containers and arrays in which something was
        overwritten.
        """
        now = self._tensors()
        tensors = [
            path
            for path, (tensor, version) in self._first.items()
            if path not in self._left_out and path in now and (now[path] is not tensor or tensor._version != version)
        ]
        contents = [each for each in self._contents if each.path not in self._left_out and each.has_overwritten()]
        return [*tensors, *(each.path for each in contents)]

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
    """Return a copy of a data set with its own state: small arrays and tensors, containers, and objects of Python.

    What is large, made by a library, or ends something when it is freed, is shared with the data set.
    """
    if isinstance(data, Tensor):
        is_small = data.layout == torch.strided and data.numel() * data.element_size() <= _MOST_COPIED_BYTES
        return data.detach().clone() if is_small and not data.requires_grad else data
    if isinstance(data, np.ndarray | array | bytearray | deque):
        size = data.nbytes if isinstance(data, np.ndarray) else len(data)
        return copy.copy(data) if size <= _MOST_COPIED_BYTES else data
    if isinstance(data, dict | list | set):
        return _copied_container(data, levels)
    if not levels or not _has_own_state(data):
        return data
    other = copy.copy(data)
    for name, item in vars(data).items():
        vars(other)[name] = copied(item, levels - 1)
    return other


def _copied_container(data: Any, levels: int) -> Any:
    other = copy.copy(data)
    if not levels or len(data) > _MOST_COPIED_ITEMS or isinstance(data, set):
        return other
    for key, item in data.items() if isinstance(data, dict) else enumerate(data):
        other[key] = copied(item, levels - 1)
    return other


def _has_own_state(data: Any) -> bool:
    """Return whether an object is copied.

    Raises:
        TypeError: It is a data set that ends something when it is freed, such as an open file: a copy would end it.
    """
    cls = type(data)
    ends_something = hasattr(cls, "__del__")
    if isinstance(data, Dataset):
        if ends_something:
            raise TypeError(f"{cls.__name__} has __del__")
        return True
    if isinstance(data, type | nn.Module) or not hasattr(data, "__dict__") or ends_something:
        return False
    if cls.__module__.partition(".")[0] in sys.stdlib_module_names:  # a copy of a queue would never be filled
        return False
    is_copied_as_usual = all(getattr(cls, name) is getattr(object, name) for name in _COPYING)
    return is_copied_as_usual and not hasattr(cls, "__copy__")
