"""Nested state (an optimiser's, a scaler's) as JSON plus named tensors, and back, exactly and without pickle.

Dictionaries with string keys, lists, strings, finite numbers, truth values and None are themselves in JSON. What JSON
cannot say is an object with one key that begins with `$`: `$tensor`, `$tuple`, `$float`, `$pairs`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy
from torch import Tensor


def encode(value: Any, place: str, tensors: dict[str, Any] | None = None, is_tensor: Any = Tensor) -> Any:
    """Return `value` as plain JSON values and put its tensors into `tensors`.

    Args:
        value: Nested dictionaries, lists, tuples, numbers, strings, None and tensors.
        place: Where the value stands; the tensors' names begin with it and errors name it.
        tensors: Receives the tensors under their names; None where a tensor has no business.
        is_tensor: The type, or types, that count as a tensor.

    Raises:
        TypeError: Something in it is of another kind, named with its place.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | numpy.integer):
        return int(value)
    if isinstance(value, float | numpy.floating):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, is_tensor):
        if tensors is None:
            raise TypeError(f"{place} is a tensor where only plain values can be kept")
        return {"$tensor": _name_tensor(value, place, tensors)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, place, tensors, is_tensor)
    if isinstance(value, list | tuple):
        items = [encode(item, f"{place}.{index}", tensors, is_tensor) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    raise TypeError(f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept")


def _encode_mapping(value: Mapping[Any, Any], place: str, tensors: dict[str, Any] | None, is_tensor: Any) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, f"{place}.{key}", tensors, is_tensor) for key, item in value.items()}
    return {
        "$pairs": [
            [encode(key, f"{place} (a key)"), encode(item, f"{place}.{key}", tensors, is_tensor)]
            for key, item in value.items()
        ]
    }


def _name_tensor(tensor: Any, place: str, tensors: dict[str, Any]) -> str:
    # names of modules and keys both contain dots, so two places can read the same
    name, count = place, 1
    while name in tensors:
        count += 1
        name = f"{place}~{count}"
    tensors[name] = tensor
    return name


def decode(value: Any, tensor: Callable[[str], Tensor] | None = None) -> Any:
    """Return what `encode` was given.

    Args:
        value: The answer of `encode`.
        tensor: Gives the tensor of a name.

    Raises:
        ValueError: The value is none that `encode` writes.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("$float", str(text))]:
            return float(text)
        case [("$tuple", list(items))]:
            return tuple(decode(item, tensor) for item in items)
        case [("$pairs", list(pairs))]:
            return {decode(key): decode(item, tensor) for key, item in pairs}
        case [("$tensor", str(name))] if tensor is not None:
            return tensor(name)
        case [(str(key), _)] if key.startswith("$"):
            raise ValueError(f"unknown or misplaced mark {key}")
    return {key: decode(item, tensor) for key, item in value.items()}
