"""Tensors and attributes of data sets."""

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dure.strategies.state.kept_modules import put_back_entries

LEVELS = 4
"""Maximum nesting of containers and data sets that are searched."""
_MOST_HELD = 100
"""Maximum number of items of a container that are searched."""


def tensors_of(path: str, data: object, levels: int = LEVELS) -> dict[str, Tensor]:
    """Return the dense tensors of a data set, including those in containers and nested data sets, by path."""
    if isinstance(data, Tensor):
        return {path: data} if data.layout == torch.strided else {}
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
    """Current attributes of data sets, and of the data sets that they hold as attributes."""

    def __init__(self, found: Iterable[object]) -> None:
        """Record the attributes.

        Args:
            found: Data sets; other objects are ignored.
        """
        self._attributes = [(data, dict(vars(data))) for each in found for data in _with_inner(each, LEVELS)]

    def put_back(self) -> None:
        """Restore the objects that were the attributes; the state inside these objects is not restored."""
        for data, attributes in self._attributes:
            put_back_entries(vars(data), attributes)


def _with_inner(data: object, levels: int) -> Iterator[object]:
    if isinstance(data, Dataset) and levels:
        yield data
        for item in vars(data).values():
            yield from _with_inner(item, levels - 1)
