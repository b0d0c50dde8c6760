"""Tensors that data sets hold."""

import itertools

import torch
from torch import Tensor
from torch.utils.data import Dataset

LEVELS = 4
"""Number of containers and data sets within each other that are searched."""
_MOST_HELD = 100
"""Number of items of a container that are searched."""


def tensors_of(path: str, data: object, levels: int = LEVELS) -> dict[str, Tensor]:
    """Return the dense tensors that a data set holds, also in containers and in other data sets in it, by path."""
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
