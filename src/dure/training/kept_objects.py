"""Plain Python state as tensors and plain values, and back: counters and the like that no `state_dict` knows."""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dure.strategies.namespaces import ATOMS, SEALED
from dure.strategies.object_state import GENERATORS, generator_state, plain_attributes, set_generator_state


class CannotKeep(TypeError):
    """State of a kind that cannot be written without pickle; the message says where it is and of which kind."""


def kept(value: Any, path: str) -> Any:
    """Return a value as tensors and plain values, from which `restored` makes it again.

    Raises:
        CannotKeep: It holds something of a kind that cannot be kept.
    """
    if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter):
        raise CannotKeep(f"{path} is a {type(value).__name__}, as which it cannot be kept (divided over ranks, say)")
    if isinstance(value, Tensor):
        return {"tensor": value.detach(), "requires_grad": value.requires_grad}
    if value is None or type(value) in _JSON:
        return value
    if type(value) in _CONTAINERS:
        return {"items": [kept(item, f"{path}[{i}]") for i, item in enumerate(value)], "type": type(value).__name__}
    if type(value) in _MAPPINGS:
        pairs = [[kept(key, f"{path} (a key)"), kept(item, f"{path}[{key!r}]")] for key, item in value.items()]
        return {"pairs": pairs, "type": type(value).__name__}
    if isinstance(value, (*_CONTAINERS, *_MAPPINGS)):
        raise CannotKeep(f"{path} is a {type(value).__qualname__}, a container of its own kind, which cannot be kept")
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return {"array": torch.from_numpy(np.ascontiguousarray(value).reshape(-1).copy()), "shape": list(value.shape)}
    if isinstance(value, GENERATORS):
        return {"generator": generator_state(value)}
    if isinstance(value, Dataset):
        names = plain_attributes(value)
        atoms = {name: vars(value)[name] for name in names}
        return {"object": {n: v for n, v in atoms.items() if v is None or type(v) in _JSON}}
    if isinstance(value, nn.Module):
        plain = kept(_plain_of_modules(value), path)
        return {"state_dict": kept(dict(value.state_dict()), f"{path}.state_dict()"), "plain": plain}
    if _has_state_dict(value):
        own = value.state_dict()
        if not isinstance(own, Mapping):
            raise CannotKeep(f"{path} is a {type(value).__qualname__}, whose state_dict() is none")
        return {"state_dict": kept(dict(own), f"{path}.state_dict()")}
    if type(value).__module__ != "builtins" and hasattr(value, "__dict__") and not isinstance(value, (*SEALED, Enum)):
        return {"object": {name: kept(item, f"{path}.{name}") for name, item in vars(value).items()}}
    raise CannotKeep(f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept")


def _plain_of_modules(root: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the plain attributes of a module and those inside it that have any, by their paths."""
    found = {}
    for path, module in root.named_modules():
        attributes = {name: vars(module)[name] for name in plain_attributes(module)}
        # sizes, dtypes and the like are definitions
        own = {n: v for n, v in attributes.items() if v is None or type(v) in _JSON or not isinstance(v, ATOMS)}
        if own:
            found[path] = own
    return found


_JSON = (bool, int, float, str)
_CONTAINERS = {kind: kind for kind in (list, tuple, set, frozenset, deque)}
_MAPPINGS = (dict, OrderedDict, defaultdict)


def _has_state_dict(value: Any) -> bool:
    is_class = isinstance(value, type)
    return not is_class and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def restored(state: Any, current: Any, path: str) -> Any:
    """Return what `kept` was given: objects are those that are there, with the state that they had.

    Raises:
        CannotKeep: An object that had state is not there now.
    """
    if not isinstance(state, Mapping):
        return state
    if "tensor" in state:
        return _restored_tensor(state["tensor"], current, requires_grad=state["requires_grad"])
    if "items" in state:
        # what is inside is paired by its place, where the container is of the same kind as before
        olds = list(current) if isinstance(current, list | tuple | deque) else []
        items = [restored(item, olds[i] if i < len(olds) else None, path) for i, item in enumerate(state["items"])]
        return _refilled(current, items, {kind.__name__: kind for kind in _CONTAINERS}[state["type"]])
    if "pairs" in state:
        before = current if isinstance(current, Mapping) else {}
        pairs = [(restored(key, None, path), item) for key, item in state["pairs"]]
        entries = {key: restored(item, before.get(key), f"{path}[{key!r}]") for key, item in pairs}
        return _refilled(current, entries, {kind.__name__: kind for kind in _MAPPINGS}[state["type"]])
    if "array" in state:
        values = state["array"].numpy().reshape(state["shape"]).copy()
        return values if state["shape"] or isinstance(current, np.ndarray) else values[()]
    if current is None:
        raise CannotKeep(f"{path} had state in the run that is gone on with, and is None now")
    if "generator" in state:
        set_generator_state(current, state["generator"])
    elif "state_dict" in state:
        current.load_state_dict(restored(state["state_dict"], None, path))
        modules = dict(current.named_modules()) if "plain" in state else {}
        attributes = {name: dict(vars(module)) for name, module in modules.items()}
        for name, own in restored(state.get("plain", {}), attributes, path).items():
            modules[name].__dict__.update(own)
    else:
        assign: Any = setattr
        if getattr(getattr(current, "__dataclass_params__", None), "frozen", False):
            current, assign = copy.copy(current), object.__setattr__  # it cannot be changed where it is
        for name, item in state["object"].items():
            assign(current, name, restored(item, getattr(current, name, None), f"{path}.{name}"))
    return current


def _restored_tensor(saved: Tensor, current: Any, *, requires_grad: bool) -> Tensor:
    if isinstance(current, Tensor) and current.shape == saved.shape and current.dtype == saved.dtype:
        current.detach().copy_(saved)  # others may refer to it
        return current
    device = current.device if isinstance(current, Tensor) else saved.device
    return saved.clone().to(device).requires_grad_(requires_grad)


def _refilled(current: Any, items: Any, kind: Any) -> Any:
    """Put items into the container that is there, to which others may refer; make one if it is of another kind."""
    if type(current) is kind and kind not in (tuple, frozenset):
        current.clear()
        (current.update if kind in (set, *_MAPPINGS) else current.extend)(items)
        return current
    return kind(None, items) if kind is defaultdict else kind(items)
