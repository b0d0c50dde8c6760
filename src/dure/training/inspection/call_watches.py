"""Watches over calls of a loss: which plain state changes inside the model's own calls, and which outside them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from dure.data.randomness import GeneratorStates
from dure.strategies.state.containers import tensors_in
from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.tensor_shard import memory_of, version_of
from dure.strategies.state.trial import is_equal, state_of
from dure.torchcompat.modes import is_transforming


class ChangesOutsideForward:
    """Context that records the plain state and buffers of a model changed outside the model's own calls."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: dict[str, Any] = {}

    def __enter__(self) -> "ChangesOutsideForward":
        self._begin()
        self._handles = [
            self._model.register_forward_pre_hook(lambda *_: self._take()),
            self._model.register_forward_hook(lambda *_: self._begin()),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._take()

    def _begin(self) -> None:
        self._before = ObjectState({"model": self._model})
        self._buffers = {name: (buffer, buffer.clone()) for name, buffer in self._model.named_buffers()}

    def _take(self) -> None:
        buffers = self._buffers.items()
        self._found |= self._before.changed()
        self._found |= {f"model.{name}": None for name, (now, before) in buffers if not is_equal(now, before)}

    def changed(self) -> dict[str, Any]:
        """Return the changed values by path."""
        return self._found


class ModuleCalls:
    """Context, entered once for each call of a loss, that counts the calls of a model's modules with parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {
            id(module): name for name, module in model.named_modules() if any(True for _ in module.parameters())
        }
        self._counts: list[Counter[str]] = []

    def __enter__(self) -> "ModuleCalls":
        counts = Counter[str]()
        self._counts.append(counts)

        def count(module: nn.Module, _: object) -> None:
            if (name := self._names.get(id(module))) is not None:
                counts[name] += 1

        self._handle = register_module_forward_pre_hook(count)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def varying(self) -> list[str]:
        """Return the modules that the loss calls in some of its calls more often than in others."""
        return [name for name in self._names.values() if len({counts[name] for counts in self._counts}) > 1]


class ChangesInForward:
    """Context that records what a model changes in its own calls: plain state outside it, buffers, generators."""

    def __init__(self, model: nn.Module, objects: Mapping[str, object]) -> None:
        self._model = model
        self._objects = objects
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.changed: dict[str, Any] = {}
        """Changed values of plain state by path."""
        self.buffers: dict[str, None] = {}
        """Names of the buffers that were written to or replaced."""
        self.has_drawn = False
        """True if random numbers were drawn."""
        self.is_inside = False
        """True within a call of the model, and after one that failed."""

    def __enter__(self) -> "ChangesInForward":
        # functions, which a deep copy of the model shares, and not methods, with which it would copy this object
        self._handles = [
            self._model.register_forward_pre_hook(lambda *_: self._begin()),
            self._model.register_forward_hook(lambda *_: self._end()),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self) -> None:
        self.is_inside = True
        self._before = state_of(self._objects, sees_data=False)
        self._versions = self._buffers_now()
        self._values = {name: buffer.clone() for name, buffer in self._model.named_buffers() if not buffer.is_meta}
        self._generators = GeneratorStates.now(self._device)
        self._own = ObjectState({"model": self._model})

    def _end(self) -> None:
        self.changed |= self._before.changed()
        self.buffers |= {name: None for name, each in self._buffers_now().items() if self._versions.get(name) != each}
        # a change through `.data` or a NumPy view does not count as a version
        kept = {name: value for name, value in self._values.items() if name not in self.buffers}
        now = dict(self._model.named_buffers())
        self.buffers |= {name: None for name, value in kept.items() if name in now and not is_equal(now[name], value)}
        self.has_drawn |= not self._generators.is_same_as(GeneratorStates.now(self._device))
        self.has_drawn |= bool(self._before.drawn()) or bool(self._own.drawn())
        self.is_inside = False

    def _buffers_now(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), version_of(buffer)) for name, buffer in self._model.named_buffers()}


class FedState:
    """Context that records tensors which calls of the loss left in objects, and which later calls pass to the model."""

    def __init__(self, model: nn.Module, objects: Mapping[str, object]) -> None:
        self._model = model
        self._objects = objects
        self._first = {memory: version for memory, (_, version) in self._held().items()}
        self.names: set[str] = set()

    def __enter__(self) -> "FedState":
        self._now = self._held()
        self._handle = self._model.register_forward_pre_hook(
            lambda _, args, kwargs: self._look((args, kwargs)), with_kwargs=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _look(self, call: Any) -> None:
        for tensor in tensors_in(call):
            memory = None if is_transforming() else memory_of(tensor)  # vmap's tensors have none
            if memory is not None and memory[:2] in self._now:
                name, version = self._now[memory[:2]]
                if self._first.get(memory[:2]) != version:
                    self.names.add(name)

    def _held(self) -> dict[Any, tuple[str, int]]:
        """Return the names and versions of tensors in attributes of the objects, by tensor memory."""
        return {
            memory[:2]: (f"{root}.{name}", version_of(tensor))
            for root, value in self._objects.items()
            if not isinstance(value, nn.Module | Optimizer)
            for name, attribute in getattr(value, "__dict__", {}).items()
            if not isinstance(attribute, nn.Module)
            for tensor in tensors_in(attribute)
            if (memory := memory_of(tensor)) is not None
        }
