"""State in Python that a model sets while it runs, and of which each replica would have its own version.

A module may set an attribute in its forward pass, for the loss to read or for the next pass. A hook may write to a
dictionary that it shares with the loss. One device sees all samples there, but a replica only its own.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from dure.errors import TaskInvalid
from dure.strategies.state.containers import (
    are_same,
    attributes_of,
    is_container,
    items_of,
    map_leaves,
    set_attribute,
    tensors_in,
)
from dure.strategies.state.module_replicas import INTERNAL, Intercepted, Replica
from dure.strategies.state.not_gathered import NotGathered


class _Missing:
    """Value of a missing attribute."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()

Attributes = dict[str, Any]
"""Values of modules' attributes by their names in the model, such as `blocks.0.last`."""


class ForwardAttributes:
    """Attributes of a model's modules before a forward pass on several devices, and the changes by the pass."""

    def __init__(self, model: nn.Module) -> None:
        """Record the attributes.

        Args:
            model: Model on the first device; its replicas are made afterwards.
        """
        self._model = model
        self._members = _members(model)
        before = _attributes(model)
        copied = map_leaves(tuple(before.values()), lambda leaf: leaf, copies=True)
        self._copies: Attributes = dict(zip(before, copied, strict=True))

    def changes(self, replicas: Sequence[Replica | None]) -> list[Attributes]:
        """Return for each device the attributes that the forward pass changed on any of them.

        Args:
            replicas: Replica of each device; None for the model itself.

        Raises:
            TaskInvalid: The forward pass added or replaced modules or parameters.
        """
        if not _are_one(_members(self._model), self._members):
            raise TaskInvalid(
                "the model adds or replaces modules or parameters while it runs, which each device would do for "
                "itself: build them in build_model, or use ddp"
            )
        now = [_attributes(self._model) if one is None else _attributes_of_replica(one) for one in replicas]
        known: dict[tuple[int, int], bool] = {}
        names = {name: None for attributes in now for name in attributes} | dict.fromkeys(self._copies)
        changed = [
            name
            for name in names
            if any(not are_same(of.get(name, MISSING), self._copies.get(name, MISSING), known) for of in now)
        ]
        return [{name: of.get(name, MISSING) for name in changed} for of in now]

    def names_of_tensors(self) -> frozenset[str]:
        """Return the names of the attributes that held a tensor."""
        return frozenset(name for name, value in self._copies.items() if _may_hold(value) and tensors_in(value))

    def put(self, name: str, value: Any) -> None:
        """Set an attribute on a module of the model."""
        if value is MISSING:
            return
        prefix, _, attribute = name.rpartition(".")
        set_attribute(self._model.get_submodule(prefix), attribute, value)

    def disowned(self, name: str, value: Any, reason: str) -> Any:
        """Return an attribute's value in which all new content is replaced by a `NotGathered`."""
        return disowned(value, self._copies.get(name, MISSING), reason)


def _attributes(model: nn.Module) -> Attributes:
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        for name, value in attributes_of(module).items()
        if name not in INTERNAL
    }


def _may_hold(value: Any) -> bool:
    return type(value) is not NotGathered and (isinstance(value, Tensor) or is_container(value))


def _attributes_of_replica(replica: Replica) -> Attributes:
    own = _attributes(replica.model)
    return dict(zip(own, replica.originals_in(tuple(own.values())), strict=True))


def _members(model: nn.Module) -> list[Any]:
    return [*model.modules(), *model.parameters()]


def disowned(value: Any, before: Any, reason: str) -> Any:
    """Return a value with all new content replaced by a `NotGathered`; lists and dictionaries change in place."""
    if are_same(value, before):
        return value
    items = None if isinstance(value, Tensor) else items_of(value)
    others = items_of(before) if type(before) is type(value) else None
    if items is None or others is None or not isinstance(value, list | dict):
        return NotGathered(reason)
    for (_, key), item in items.items():
        value[key] = disowned(item, others.get(("item", key), MISSING), reason)
    return value


# objects that hooks write to


class SharedState:
    """Objects outside a model that its hooks may write to: variables of their functions, and objects they belong to.

    Replicas share them, because a hook is one function on all devices.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[..., Any] | None = None, method: MethodType | None = None
    ) -> None:
        """Record their contents.

        Args:
            model: Model of the run, with the hooks.
            loss: Further function that runs on each device.
            method: Method that is the loss, or is wrapped by it; each device has a copy of its object.
        """
        self._modules = {id(module) for module in model.modules()}
        readers = [
            (f"a hook of {name or 'the model'} changes what is outside of the model", read)
            for name, module in model.named_modules()
            for hook in _hooks_of(module)
            for read in self._readers(hook)
        ]
        readers += [] if loss is None else self._readers_of_loss(loss, method)
        self._watched = [(name, read, read()) for name, read in readers]

    def first_changed(self) -> str | None:
        """Return a clause about the first object whose contents have changed; None if there is none."""
        return next((name for name, read, before in self._watched if not _are_one(read(), before)), None)

    def _readers_of_loss(
        self, loss: Callable[..., Any], method: MethodType | None
    ) -> list[tuple[str, Callable[[], Sequence[Any]]]]:
        if method is not None:
            kept = attributes_of(method.__self__).items()
            objects = [
                (f"the task's loss changes self.{name}", functools.partial(_state_of, value))
                for name, value in kept
                if id(value) not in self._modules
            ]
            return [*objects, ("a function around the task's loss changes its variables", lambda: _variables_of(loss))]
        # a wrapper of a task's loss for which the task was not copied
        held = _variables_of(loss) if isinstance(loss, FunctionType) else list(attributes_of(loss).values())
        methods = [value for value in held if isinstance(value, MethodType)]
        return [("the task's loss changes the task", read) for method in methods for read in self._readers(method)]

    def _readers(self, hook: Any, depth: int = 3) -> Iterator[Callable[[], Sequence[Any]]]:
        """Yield functions that read the objects to which a hook may write."""
        if isinstance(hook, MethodType):
            if id(hook.__self__) not in self._modules:
                yield lambda: _contents(hook.__self__)
            yield from self._readers(hook.__func__, depth)
        elif isinstance(hook, FunctionType):
            yield from self._readers_of_function(hook, depth)
        elif callable(hook) and not isinstance(hook, type | nn.Module):
            yield lambda: _contents(hook)
            yield from (found for part in _contents(hook) if depth for found in self._readers(part, depth - 1))

    def _readers_of_function(self, hook: FunctionType, depth: int) -> Iterator[Callable[[], Sequence[Any]]]:
        code: CodeType = hook.__code__
        variables = hook.__globals__
        names = [name for name in code.co_names if _is_data(variables.get(name))]
        yield lambda: [part for name in names for part in (variables.get(name), *_contents(variables.get(name)))]
        cells = [cell for cell in hook.__closure__ or () if cell is not None]
        values = [cell_contents(cell) for cell in cells]
        yield lambda: [part for cell in cells for part in (cell_contents(cell), *_contents(cell_contents(cell)))]
        if depth:
            functions = [value for value in (*values, *(hook.__defaults__ or ())) if callable(value)]
            yield from (found for function in functions for found in self._readers(function, depth - 1))


_HOOKS = (*("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),)


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    for kind in _HOOKS:
        yield from getattr(module, kind).values()
    own = vars(module).get("forward")
    if own is not None and not isinstance(own, Intercepted):
        yield own


def _is_data(value: Any) -> bool:
    return (
        value is not None
        and type(value) is not NotGathered
        and not isinstance(value, ModuleType | FunctionType | type | nn.Module)
    )


def _variables_of(function: Any, depth: int = 3) -> list[Any]:
    """Return the variables in the closure of a function, and in closures of functions among them."""
    held = [cell_contents(cell) for cell in getattr(function, "__closure__", None) or ()]
    inner = (_variables_of(value, depth - 1) for value in held if depth and isinstance(value, FunctionType))
    return held + [value for values in inner for value in values]


def cell_contents(cell: Any) -> Any:
    """Return a closure variable of a function; `MISSING` if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _state_of(value: Any) -> list[Any]:
    """Return state that shows in-place changes of an object; nothing for objects of which devices have copies."""
    if type(value) is NotGathered:
        return []
    if isinstance(value, nn.Module):
        return [tensor._version for tensor in (*value.parameters(), *value.buffers())]
    return [] if isinstance(value, list | dict | set) else _contents(value)


def _contents(value: Any) -> list[Any]:
    """Return the contents of an object; for tensors their version, which counts changes in place."""
    if type(value) is NotGathered:
        return [value]
    if isinstance(value, Tensor):
        return [value._version]
    if isinstance(value, nn.Module | type | FunctionType | ModuleType):
        return []
    items = items_of(value)
    found = list(attributes_of(value).values()) if items is None else [*items, *items.values()]
    found += sorted(map(id, value)) if isinstance(value, set) else []
    return found + [one._version for one in found if type(one) is not NotGathered and isinstance(one, Tensor)]


def _are_one(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(map(are_same, now, before))
