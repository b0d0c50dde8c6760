"""Replicas of a model: new modules around copies of its parameters and buffers.

torch's `nn.DataParallel` also makes them for every forward pass, but it does not support the CPU, and it hides the
parameters of a replica from the model's own code.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dure.errors import TaskInvalid
from dure.strategies.device_threads import BroadcastParameters
from dure.strategies.state.containers import attributes_of, map_leaves, set_attribute
from dure.torchcompat.tensors import own_attributes

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that torch keeps in every module."""

_OWN = frozenset({"_parameters", "_buffers", "_modules"})


class Intercepted:
    """Replacement of a module's `forward`, through which other code intercepts it."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any], *, in_copies: bool = False) -> None:
        """Set both functions.

        Args:
            original: The module's own.
            call: Function of `original` and the arguments.
            in_copies: Whether a deep copy of the module is intercepted too. Otherwise it gets its own `forward`.
        """
        self.original = original
        self.call = call
        self._in_copies = in_copies
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the interceptor."""
        return self.call(self.original, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the `forward` of a copy of the module."""
        original = copy.deepcopy(self.original, memo)
        return Intercepted(original, self.call, in_copies=True) if self._in_copies else original


def replicate(model: nn.Module, devices: Sequence[torch.device], *, linked: bool) -> "list[Replica]":
    """Return a replica of a model for each device.

    A replica is the model in its current state: including flags, hooks, attributes, shared modules and weights. It
    holds its copies for as long as it lives, so that a backward pass finds the tensors of the forward pass.

    Args:
        model: Model, which is not changed.
        devices: One for each replica.
        linked: Compute the copies from the model's parameters, so that gradients flow there. Otherwise they are
            separate parameters.

    Raises:
        TaskInvalid: Part of the model is TorchScript, whose modules live outside Python.

    Communication: the bytes of parameters and buffers, from the model's device to each other one.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TaskInvalid(
                f"{name or 'the model'} is a TorchScript module, of which there can be no replicas in one process: "
                "build it as a torch.nn.Module, or use ddp"
            )
    parameters, buffers = list(model.parameters()), list(model.buffers())
    copies = (_linked_copies if linked else _own_copies)(devices, parameters)
    replicas = []
    for index, device in enumerate(devices):
        own = copies[index * len(parameters) : (index + 1) * len(parameters)]
        of_buffers = [buffer.to(device, copy=True, non_blocking=True) for buffer in buffers]
        replicas.append(Replica(model, device, [*parameters, *buffers], [*own, *of_buffers]))
    return replicas


def _linked_copies(devices: Sequence[torch.device], parameters: list[nn.Parameter]) -> list[Tensor]:
    if not parameters or not devices:
        return []
    copies: list[Any] = list(BroadcastParameters.apply(devices, *parameters))  # type: ignore[no-untyped-call]
    for copied in copies:
        copied._is_param = True  # models check whether something is an nn.Parameter
    for copied, parameter in zip(copies, [*parameters] * len(devices), strict=True):
        vars(copied).update(own_attributes(parameter))
    return copies


def _own_copies(devices: Sequence[torch.device], parameters: list[nn.Parameter]) -> list[Tensor]:
    copies: list[Tensor] = []
    for device in devices:
        for parameter in parameters:
            values = parameter.detach().to(device, copy=True, non_blocking=True)
            copies.append(nn.Parameter(values, parameter.requires_grad))
            vars(copies[-1]).update(own_attributes(parameter))
    return copies


class Replica:
    """Copy of a model's modules on another device."""

    def __init__(
        self, model: nn.Module, device: torch.device, tensors: Sequence[Tensor], copies: Sequence[Tensor]
    ) -> None:
        """Create the modules.

        Args:
            model: Model to replicate.
            device: Device of the replica.
            tensors: The model's parameters and buffers.
            copies: Those of the replica, in the same order.
        """
        self._device = device
        self._home = tensors[0].device if tensors else device
        originals = list(model.modules())
        replicas = [_empty_module(module) for module in originals]
        self.model = replicas[0]
        self._own: dict[int, Any] = dict(zip(map(id, (*tensors, *originals)), (*copies, *replicas), strict=True))
        """The replica's counterparts of the model's objects, by their ids."""
        self._originals: dict[int, Any] = dict(zip(map(id, (*copies, *replicas)), (*tensors, *originals), strict=True))
        pairs = list(zip(tensors, copies, strict=True))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._parameters = [
            (names[id(one)], one, one._version, other, other._version) for one, other in pairs if id(one) in names
        ]
        self._buffers = [pair for pair in pairs if id(pair[0]) not in names]
        self._members = list(zip(originals, replicas, strict=True))
        self._keep: list[Any] = []
        """Objects whose ids are in use."""
        # as one value, so that objects shared in the model are shared in the replica
        attributes = map_leaves(tuple(_attributes(module) for module in originals), self._counterpart, copies=True)
        for module, replica, own in zip(originals, replicas, attributes, strict=True):
            self._fill(module, replica, own)

    def _fill(self, module: nn.Module, replica: nn.Module, attributes: dict[str, Any]) -> None:
        for name, value in (_empty_internals(module) | attributes).items():
            set_attribute(replica, name, value)
        for kind in _OWN:
            members = vars(module)[kind]
            own = {name: None if one is None else self._own[id(one)] for name, one in members.items()}
            object.__setattr__(replica, kind, own)

    def _counterpart(self, value: Any) -> Any:
        """Return the replica's counterpart of a parameter, buffer or module of the model, or of a reference to one."""
        found = self._own.get(id(value))
        if found is not None:
            return found
        if type(value) is set:
            return set(value)
        found = self._made_counterpart(value)
        if found is not value:
            self._own[id(value)], self._originals[id(found)] = found, value
            self._keep.append((value, found))
        return found

    def _made_counterpart(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            # a table that the model keeps outside its buffers
            return value.to(self._device) if value.device == self._home else value
        if isinstance(value, MethodType):
            owner = self._own.get(id(value.__self__))
            return value if owner is None else MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            parts = [value.func, value.args, value.keywords]
            func, args, kwargs = map_leaves(parts, self._counterpart)
            is_same = func is value.func and args is value.args and kwargs is value.keywords
            return value if is_same else functools.partial(func, *args, **kwargs)
        if isinstance(value, weakref.ref):
            referent = self._own.get(id(value()))
            return value if referent is None else weakref.ref(referent)
        if isinstance(value, Intercepted):
            return Intercepted(self._counterpart(value.original), value.call)
        return value

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the model's parameters, each with its copy."""
        return [(original, copied) for _, original, _, copied, _ in self._parameters]

    def first_changed(self) -> str | None:
        """Return the name of a parameter that was changed in place and now differs from the model's."""
        for name, original, version, copied, own_version in self._parameters:
            is_changed = original._version != version or copied._version != own_version
            if is_changed and not torch.equal(original, copied.to(original.device)):
                return name
        return None

    def give_back(self) -> None:
        """Copy changes of the replica into the model: values and flags, but no attributes."""
        with torch.no_grad():
            for original, copied in self.pairs():
                original.copy_(copied)
                original.requires_grad_(copied.requires_grad)
        self.give_back_buffers()
        for module, replica in self._members:
            module.training = replica.training

    def give_back_buffers(self) -> None:
        """Copy the replica's buffers into the model's."""
        with torch.no_grad():
            for original, copied in self._buffers:
                original.copy_(copied)
                original.requires_grad_(copied.requires_grad)

    def originals_in(self, value: Any) -> Any:
        """Return a value of the replica with the model's own objects in place of their counterparts."""
        return map_leaves(value, lambda leaf: self._originals.get(id(leaf), leaf))


def _empty_module(module: nn.Module) -> nn.Module:
    replica: nn.Module = object.__new__(type(module))
    return replica


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, without its members and without those that torch leaves empty in most modules."""
    return {
        name: value
        for name, value in attributes_of(module).items()
        # a compiled call belongs to the model's own module, even if a replica uses it
        if name not in _OWN and name != "_compiled_call_impl" and (value is True or name not in INTERNAL or value)
    }


def _empty_internals(module: nn.Module) -> dict[str, Any]:
    empty = {name: value for name, value in vars(module).items() if name in INTERNAL - _OWN and not value}
    return {name: value if value in (False, None) else type(value)() for name, value in empty.items()}
