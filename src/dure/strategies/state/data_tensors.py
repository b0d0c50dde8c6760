"""Tensors, attributes and contents of data sets."""

import copy
import itertools
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from dure.strategies.state.kept_modules import has_same_entries, put_back_entries
from dure.strategies.state.objects.namespaces import ATOMS, is_users
from dure.strategies.state.objects.state_places import comparable

LEVELS = 4
"""Maximum nesting of containers and data sets that are searched."""
_MOST_HELD = 100
"""Maximum number of items of a container that are searched for tensors and data sets."""
_MOST_CONTENTS = 200
"""Maximum number of containers and arrays of data sets whose contents are recorded."""
_MOST_ITEMS = 1 << 16
"""Maximum number of items of a container whose contents are recorded: labels of many samples, which takes 1 ms."""
_MOST_BYTES = 1 << 20
"""Maximum size of an array whose contents are recorded."""
_CONTAINERS = (list, dict, set, deque, array, bytearray)


def tensors_of(path: str, data: object, levels: int = LEVELS) -> dict[str, Tensor]:
    """Return the dense tensors of a data set, including those in containers and nested data sets, by path.

    Parameters are none of them: a data set that reads the model's weights does not have them.
    """
    if isinstance(data, Tensor):
        is_own = not isinstance(data, nn.Parameter) and type(data) is not DTensor
        return {path: data} if data.layout == torch.strided and is_own else {}
    if isinstance(data, list | tuple):
        held: list[tuple[str, object]] = [(str(number), item) for number, item in enumerate(data[:_MOST_HELD])]
    elif isinstance(data, dict):
        held = [(str(key), item) for key, item in itertools.islice(data.items(), _MOST_HELD)]
    else:
        held = list(vars(data).items()) if isinstance(data, Dataset) else []
    found: dict[str, Tensor] = {}
    for name, item in held if levels else ():
        found |= tensors_of(f"{path}.{name}", item, levels - 1)
    return found


class KeptDataSets:
    """Current attributes of data sets and of those within them, and the contents of their containers and arrays."""

    def __init__(self, found: Mapping[str, object]) -> None:
        """Record the attributes and the contents.

        Args:
            found: Data sets by their paths; other objects are ignored.
        """
        self._found = found
        self._attributes = [(path, data, dict(vars(data))) for path, data in _data_sets(found)]
        self.contents = _contents_of({path: attributes for path, _, attributes in self._attributes})
        """Contents of containers and arrays."""
        self._other: list[Contents] | None = None

    def is_record_of(self, found: Mapping[str, object]) -> bool:
        """Return whether this is a record of the same data sets, and still true."""
        if found is not self._found or any(each.has_changed() for each in self.contents):
            return False
        return all(has_same_entries(vars(data), attributes) for _, data, attributes in self._attributes)

    def changed(self) -> dict[str, Any]:
        """Return what was replaced or has other contents, with the current values, by path.

        Plain values of attributes are not compared.
        """
        found: dict[str, Any] = {}
        for path, data, attributes in self._attributes:
            now = vars(data)
            found |= {
                f"{path}.{name}": comparable(now.get(name))
                for name, value in attributes.items()
                if now.get(name) is not value and not isinstance(value, ATOMS)
            }
        self._other = [each for each in self.contents if each.has_changed()]
        return {**found, **{each.path: comparable(each.held) for each in self._other}}

    def put_back(self) -> None:
        """Restore the attributes, and what containers and arrays held; right after `changed`, nothing is compared."""
        for _, data, attributes in self._attributes:
            put_back_entries(vars(data), attributes)
        for each in [each for each in self.contents if each.has_changed()] if self._other is None else self._other:
            each.put_back()
        self._other = None


class Contents:
    """Contents of a container or an array of a data set at one point in time."""

    def __init__(self, path: str, held: Any) -> None:
        """Record it.

        Args:
            path: Path of the container or array.
            held: The container or array.
        """
        self.path = path
        self.held = held
        self._before = copy.copy(held)

    def has_changed(self) -> bool:
        """Return whether it holds something else now."""
        now, before = self.held, self._before
        if isinstance(now, np.ndarray):
            return now.shape != before.shape or not _are_same_bytes(now, before)
        try:
            return bool(now != before)  # items that are the same object count as equal, and are told in nanoseconds
        except Exception:  # such as the truth of an array
            return True

    def has_overwritten(self) -> bool:
        """Return whether an item that was there is another one now; a cache that is being filled has not.

        What reading fills would be read again, so it is no state.
        """
        if not self.has_changed():
            return False
        if not isinstance(self.held, list | dict):
            return True
        if len(self.held) < len(self._before):
            return True
        with suppress(Exception):
            pairs: Any = zip(self.held, self._before, strict=False)
            if isinstance(self.held, dict):
                pairs = ((self.held.get(key), item) for key, item in self._before.items())
            return any(item is not None and now is not item and now != item for now, item in pairs)
        return True

    def put_back(self) -> None:
        """Restore what it held."""
        if isinstance(self.held, np.ndarray):
            if self.held.shape == self._before.shape and self.held.flags.writeable:
                np.copyto(self.held, self._before)
        elif isinstance(self.held, array | bytearray):
            self.held[:] = self._before
        else:
            self.held.clear()
            (self.held.extend if isinstance(self.held, list | deque) else self.held.update)(self._before)


def _are_same_bytes(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether arrays of one shape and dtype have the same bytes; of objects, whether they are the same ones."""
    if one.dtype.hasobject or not (one.flags.c_contiguous and other.flags.c_contiguous):
        return one.tobytes() == other.tobytes()
    return bool((one.reshape(-1).view(np.uint8) == other.reshape(-1).view(np.uint8)).all())


def _contents_of(attributes: Mapping[str, Mapping[str, Any]]) -> list[Contents]:
    """Return the contents of containers and arrays that data sets hold, also within containers and objects of Python.

    Those that are too large to be copied are left out.

    Args:
        attributes: Attributes of each data set, by its path.
    """
    found: dict[int, Contents] = {}

    def visit(path: str, value: Any, levels: int) -> None:
        if isinstance(value, (*ATOMS, Tensor, Dataset)) or id(value) in found or len(found) > _MOST_CONTENTS:
            return
        if isinstance(value, np.ndarray):
            if value.nbytes <= _MOST_BYTES and not isinstance(value, np.memmap):
                found[id(value)] = Contents(path, value)
            return
        if isinstance(value, _CONTAINERS):
            if len(value) <= _MOST_ITEMS:
                found[id(value)] = Contents(path, value)
            items = _some_items(value)
        elif isinstance(value, tuple):
            items = _some_items(value)
        else:
            items = [*vars(value).items()] if _is_of_python(value) else []
            if items:
                found[id(value)] = Contents(path, vars(value))
        for name, item in items if levels else ():
            visit(f"{path}.{name}", item, levels - 1)

    for path, named in attributes.items():
        for name, value in named.items():
            visit(f"{path}.{name}", value, LEVELS)
    return [*found.values()]


def _some_items(value: Any) -> list[tuple[Any, Any]]:
    """Return items of a container that may hold others; none of a long one whose first item holds nothing."""
    if isinstance(value, set | array | bytearray) or not value:
        return []
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    first = next(iter(value.values())) if isinstance(value, Mapping) else value[0]
    if len(value) > _MOST_HELD and isinstance(first, (*ATOMS, Tensor)):
        return []
    return [*itertools.islice(items, _MOST_HELD)]


def _is_of_python(value: object) -> bool:
    """Return whether an object is of a class of the user's own, with attributes."""
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type) and is_users(type(value))


def _data_sets(found: Mapping[str, object], levels: int = LEVELS) -> Iterator[tuple[str, Any]]:
    """Yield data sets, and those that they hold in attributes and in lists of attributes, with their paths."""
    for path, data in found.items():
        if not isinstance(data, Dataset) or not levels:
            continue
        yield path, data
        for name, item in vars(data).items():
            inner = item if isinstance(item, list | tuple) else [item]
            several = {f"{path}.{name}.{number}": each for number, each in enumerate(inner[:_MOST_HELD])}
            yield from _data_sets({f"{path}.{name}": item} if inner is not item else several, levels - 1)
