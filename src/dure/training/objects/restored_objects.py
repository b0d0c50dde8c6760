"""Plain Python state restored from the tensors and plain values that `kept_objects` made of it."""

import copy
import io
import threading
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dure.strategies.state.objects.generator_state import set_generator_state
from dure.strategies.state.objects.namespaces import with_dict
from dure.strategies.state.objects.tensor_places import memory_of
from dure.training.objects.kept_objects import FACTORIES, MAPPINGS, SEQUENCES, CannotKeep


class Restorer:
    """Finder and creator of values from the entries of a `Keeper`."""

    def __init__(
        self, objects: Mapping[str, Any], there: Mapping[str, Any] | None = None, device: torch.device | None = None
    ) -> None:
        """Prepare; nothing is restored yet.

        Args:
            objects: `Keeper.objects`.
            there: Known objects of this session by their paths.
            device: Device for tensors that were not on the CPU.
        """
        self._objects = objects
        self._there = there or {}
        self._device = device
        self._done: dict[str, Any] = {}

    def value(self, entry: Any) -> Any:
        """Return the value of an entry; a known object is filled with the content that it had.

        Raises:
            CannotKeep: An object that had state does not exist now, or is of another type.
        """
        match entry:
            case {"ref": name, "held": held}:
                self.value(held)
                return self._known(name)
            case {"ref": name}:
                return self._done[name] if name in self._done else self._object(name)
            case {"items": items, "type": kind}:
                return SEQUENCES[kind](map(self.value, items))
            case {"bytes": content}:
                return _as_bytes(content)
            case {"complex": [real, imaginary]}:
                return complex(real, imaginary)
            case {"scalar": content}:
                return _array(content)[()]
            case {"value": value, "of": path}:
                return type(self._known(path))(value)
            case {"enum": name, "of": path}:
                return type(self._known(path))[name]
            case {"method": name, "of": owner}:
                return getattr(self.value(owner), name)
            case {"device": name}:
                return torch.device(name)
            case {"range": bounds}:
                return range(*bounds)
        return entry

    def _known(self, path: str) -> Any:
        if self._there.get(path) is None:
            raise CannotKeep(f"{path} had state in the run that is gone on with, and is not there now")
        return self._there[path]

    def _object(self, name: str) -> Any:
        content: Any = self._objects.get(name)
        target = self._empty(content) if name.startswith("#") else self._known(name)
        self._done[name] = target
        if content is not None:
            for kind, fill in _FILLS.items():
                if kind in content:
                    try:
                        fill(self, target, content)
                    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
                        raise CannotKeep(f"{name} is another object now: {error}") from error
        return target

    def _empty(self, content: Mapping[str, Any]) -> Any:
        """Return a new object, to be filled."""
        match content:
            case {"tensor": _, "requires_grad": flag}:
                device = self._device if content.get("is_on_device") else None
                made = _saved_tensor(content).to(device)
                return nn.Parameter(made, flag) if "is_parameter" in content else made.requires_grad_(flag)
            case {"view": base, "size": size, "stride": stride, "begin": begin}:
                known = self.value(base).detach()
                return known.as_strided(size, stride, known.storage_offset() + begin)
            case {"items": _, "type": kind}:
                return deque(maxlen=content["maxlen"]) if kind == "deque" else SEQUENCES[kind]()
            case {"pairs": _, "type": "defaultdict"}:
                named = {name: factory for factory, name in FACTORIES.items()} | {None: None}
                like = content.get("like")
                return defaultdict(self._known(like).default_factory if like else named[content["factory"]])
            case {"pairs": _, "type": kind}:
                return MAPPINGS[kind]()
            case {"array": _}:
                return _array(content)
            case {"buffer": _, "type": kind}:
                return bytearray() if kind == "bytearray" else array(kind)
            case {"stream": text, "at": _}:
                return io.StringIO() if isinstance(text, str) else io.BytesIO()
            case {"flag": _}:
                return threading.Event()
            case {"partial": [function, args, keywords]}:
                return partial(self.value(function), *self.value(args), **self.value(keywords))
            case {"parts": _, "like": path}:
                return copy.deepcopy(self._known(path))
            case {"state_dict": _, "like": path}:
                return self._known(path)
            case {"object": _, "like": path}:
                return copy.copy(self._known(path))
        raise CannotKeep(f"state of an unknown kind: {[*content]}")

    def _fill_tensor(self, target: Tensor, content: Mapping[str, Any]) -> None:
        saved = _saved_tensor(content)
        if target.shape == saved.shape and target.dtype == saved.dtype:
            # expanded tensors have several elements in one place
            at = tuple(slice(0, 1) if step == 0 else slice(None) for step in target.stride())
            target.detach()[at].copy_(saved[at])
        else:
            target.data = saved.to(target.device)
        if target.is_leaf:
            target.requires_grad_(content["requires_grad"])
            grad = self.value(content.get("grad"))
            target.grad = None if grad is None else grad.to(target.device)

    def _fill_sequence(self, target: Any, content: Mapping[str, Any]) -> None:
        items = [self.value(item) for item in content["items"]]
        target.clear()
        (target.extend if hasattr(target, "extend") else target.update)(items)

    def _fill_mapping(self, target: Any, content: Mapping[str, Any]) -> None:
        pairs = [(self.value(key), self.value(item)) for key, item in content["pairs"]]
        target.clear()
        for key, item in pairs:
            target[key] = item

    def _fill_array(self, target: Any, content: Mapping[str, Any]) -> None:
        target[...] = _array(content)

    def _fill_buffer(self, target: Any, content: Mapping[str, Any]) -> None:
        kind, values = content["type"], _as_bytes(content["buffer"])
        target[:] = values if kind == "bytearray" else array(kind, values)

    def _fill_stream(self, target: Any, content: Mapping[str, Any]) -> None:
        target.seek(0)
        target.truncate()
        target.write(content["stream"] if isinstance(content["stream"], str) else _as_bytes(content["stream"]))
        target.seek(content["at"])

    def _fill_position(self, target: Any, content: Mapping[str, Any]) -> None:
        target.seek(content["position"])

    def _fill_event(self, target: Any, content: Mapping[str, Any]) -> None:
        if content["flag"]:
            target.set()
        else:
            target.clear()

    def _fill_memory(self, target: Any, content: Mapping[str, Any]) -> None:
        memory = memory_of(target)
        assert memory is not None
        memory[:] = _as_bytes(content["memory"])

    def _fill_generator(self, target: Any, content: Mapping[str, Any]) -> None:
        set_generator_state(target, content["generator"])

    def _fill_partial(self, target: Any, content: Mapping[str, Any]) -> None:
        for each in content["partial"]:
            self.value(each)

    def _fill_parts(self, target: nn.Module, content: Mapping[str, Any]) -> None:
        modules = dict(target.named_modules())
        for name, part in content["parts"].items():
            if name not in modules:
                raise CannotKeep(f"a module that the task holds has no {name} now")
            module = modules[name]
            module.training = part["training"]
            for kind in ("_parameters", "_buffers"):
                tensors = {n: self.value(entry) for n, entry in part[kind].items()}
                vars(module)[kind].clear()
                vars(module)[kind].update(tensors)
            self._set(module, part["plain"])
            if "extra" in part:
                module.set_extra_state(unpacked(part["extra"]))

    def _fill_state_dict(self, target: Any, content: Mapping[str, Any]) -> None:
        target.load_state_dict(unpacked(content["state_dict"]))

    def _fill_object(self, target: Any, content: Mapping[str, Any]) -> None:
        for name in [name for name in vars(with_dict(target)) if name not in content["object"]]:
            del vars(with_dict(target))[name]
        self._set(target, content["object"])

    def _set(self, target: Any, entries: Mapping[str, Any]) -> None:
        attributes = vars(with_dict(target))
        for name, entry in entries.items():
            attributes[name] = self.value(entry)


_FILLS: dict[str, Callable[[Restorer, Any, Mapping[str, Any]], None]] = {
    "tensor": Restorer._fill_tensor,
    "items": Restorer._fill_sequence,
    "pairs": Restorer._fill_mapping,
    "array": Restorer._fill_array,
    "buffer": Restorer._fill_buffer,
    "stream": Restorer._fill_stream,
    "position": Restorer._fill_position,
    "flag": Restorer._fill_event,
    "memory": Restorer._fill_memory,
    "generator": Restorer._fill_generator,
    "partial": Restorer._fill_partial,
    "parts": Restorer._fill_parts,
    "state_dict": Restorer._fill_state_dict,
    "object": Restorer._fill_object,
    "some": lambda self, target, content: self._set(target, content["some"]),
}


def unpacked(state: Mapping[str, Any]) -> Any:
    """Return the value that was passed to `packed`."""
    return Restorer(state["objects"]).value(state["value"])


def _saved_tensor(content: Mapping[str, Any]) -> Tensor:
    saved: Tensor = content["tensor"].clone()
    return torch.view_as_complex(saved) if "is_complex" in content else saved


def _as_bytes(content: Tensor) -> bytes:
    return bytes(content.numpy().astype(np.uint8))


def _array(content: Mapping[str, Any]) -> Any:
    dtype = np.lib.format.descr_to_dtype(_as_descr(content["dtype"]))
    return np.frombuffer(content["array"].numpy().tobytes(), dtype).reshape(content["shape"]).copy()


def _as_descr(descr: Any) -> Any:
    """Convert a description of a dtype back from JSON to the form that NumPy gave it."""
    if not isinstance(descr, list):
        return descr
    return [tuple(_as_descr(part) if i == 1 else _as_shape(part) for i, part in enumerate(field)) for field in descr]


def _as_shape(part: Any) -> Any:
    return tuple(_as_shape(each) for each in part) if isinstance(part, list) else part
