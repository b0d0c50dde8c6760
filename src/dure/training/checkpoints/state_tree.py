"""Nested state (an optimiser's, a scaler's) as JSON plus named tensors, and back, exactly and without pickle.

Dictionaries with string keys, lists, strings, finite numbers, truth values and None are encoded directly. All other
values are objects with one key that begins with `$`: `$tensor`, `$tuple`, `$float`, `$pairs`, and for types of other
libraries `$ordered`, `$size`, `$dtype` and `$numpy`. Values of any other type, including subclasses, are refused: code
that checks the type would behave differently with another one.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from dure.strategies.state.tensor_shard import TensorShard, as_shard, memory_of

_AS_IT_IS = (type(None), bool, int, str)
_NUMPY_FLOATS = ("float16", "float32", "float64")
_NUMPY = {
    numpy.dtype(name).type: name
    for name in ("bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)), *_NUMPY_FLOATS)
}
_NUMPY_TYPES = {name: kind for kind, name in _NUMPY.items()}


class NamedTensors(dict[str, Tensor | TensorShard]):
    """Tensors, and pieces of tensors, by their names in a state."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[Any, str] = {}
        """Names by tensor memory."""

    def name(self, tensor: Any, place: str) -> str:
        """Add a tensor and return its name; a tensor whose memory has a name already keeps that one."""
        kept = as_shard(tensor)
        memory = memory_of(kept)
        if memory in self._names:
            return self._names[memory]
        # names of modules and keys both contain dots, so two places can have the same name
        name, count = place, 1
        while name in self:
            count += 1
            name = f"{place}~{count}"
        self[name] = kept
        if memory is not None:
            self._names[memory] = name
        return name


def encode(value: Any, place: str, tensors: "NamedTensors | None" = None, is_tensor: Any = Tensor) -> Any:
    """Return `value` as plain JSON values, and add its tensors to `tensors`.

    Args:
        value: Nested dictionaries, lists, tuples, numbers, strings, None and tensors.
        place: Path of the value; the names of its tensors begin with it, and error messages name it.
        tensors: Receives the tensors under their names; None to allow no tensors.
        is_tensor: Type, or types, that count as a tensor.

    Raises:
        TypeError: A value is of another type; the message names its path.
    """
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, is_tensor):
        if tensors is None:
            raise TypeError(f"{place} is a tensor where only plain values can be kept")
        return {"$tensor": tensors.name(value, place)}
    if kind is dict:
        return _encode_dict(value, place, tensors, is_tensor)
    if kind is OrderedDict:
        return {"$ordered": _encode_pairs(value, place, tensors, is_tensor)}
    if kind in (list, tuple):
        items = [encode(item, f"{place}.{index}", tensors, is_tensor) for index, item in enumerate(value)]
        return {"$tuple": items} if kind is tuple else items
    if kind is torch.Size:
        return {"$size": list(value)}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if kind in _NUMPY:
        return {"$numpy": [_NUMPY[kind], encode(value.item(), place)]}
    raise TypeError(f"{place} is a {kind.__module__}.{kind.__qualname__}, which cannot be kept")


def _encode_dict(value: Mapping[Any, Any], place: str, tensors: "NamedTensors | None", is_tensor: Any) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{place}.{key}", tensors, is_tensor) for key, item in value.items()}
    return {"$pairs": _encode_pairs(value, place, tensors, is_tensor)}


def _encode_pairs(
    value: Mapping[Any, Any], place: str, tensors: "NamedTensors | None", is_tensor: Any
) -> list[list[Any]]:
    return [
        [encode(key, f"{place} (a key)"), encode(item, f"{place}.{key}", tensors, is_tensor)]
        for key, item in value.items()
    ]


def decode(value: Any, tensor: Callable[[str], Any] | None = None) -> Any:
    """Return the value that was passed to `encode`.

    Args:
        value: Result of `encode`.
        tensor: Returns the tensor of a name.

    Raises:
        ValueError: `encode` never writes such a value.
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
            return dict(_decode_pairs(pairs, tensor))
        case [("$ordered", list(pairs))]:
            return OrderedDict(_decode_pairs(pairs, tensor))
        case [("$tensor", str(name))] if tensor is not None:
            return tensor(name)
        case [("$size", list(sizes))]:
            return torch.Size(sizes)
        case [("$dtype", str(name))] if isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        case [("$numpy", [str(name), number])] if name in _NUMPY_TYPES:
            return _NUMPY_TYPES[name](decode(number))
        case [(str(key), _)] if key.startswith("$"):
            raise ValueError(f"unknown or misplaced mark {key}")
    return {key: decode(item, tensor) for key, item in value.items()}


def _decode_pairs(pairs: Iterable[Any], tensor: Callable[[str], Any] | None) -> list[tuple[Any, Any]]:
    return [(decode(key), decode(item, tensor)) for key, item in pairs]


def tensor_names(value: Any) -> set[str]:
    """Return the names of all tensors in a result of `encode`."""
    names: set[str] = set()
    decode(value, names.add)
    return names
