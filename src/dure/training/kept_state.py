"""Plain state of the task, its modules and the optimiser, for checkpoints: counters and the like that change.

What a module or an optimiser has in its `state_dict` is kept there. Here is the rest: attributes that are no longer as
they were when the session was built.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.errors import CheckpointMismatch, TaskInvalid
from dure.strategies.namespaces import Namespace
from dure.strategies.object_state import ObjectState, is_inside
from dure.strategies.used_globals import used_globals
from dure.torchcompat import MODULE_CONTENTS
from dure.training.kept_objects import CannotKeep, kept, restored
from dure.training.state_tree import NamedTensors, decode, encode
from dure.training.task import Task

PREFIX = "kept."
"""Beginning of the names under which this state stands among a rank's own."""
_TREE = f"{PREFIX}tree"
_ABSENT = "absent"
_FLAGS = "requires_grad"
_MOST_SHOWN = 80
"""Characters of a path that a sentence shows."""


class KeptState:
    """The attributes of a session's objects that have changed since it was built."""

    def __init__(self, task: Task, model: nn.Module, optimizer: Optimizer) -> None:
        """Note how everything is before anything is restored or trained."""
        modules = {f"model.{name}" if name else "model": module for name, module in model.named_modules()}
        self._owners: dict[str, Any] = {"task": task, "optimizer": optimizer, **modules}
        self._globals = used_globals(type(task), *dict.fromkeys(type(module) for module in model.modules()))
        self._owners |= {name: value for name, value in self._globals.items() if isinstance(value, Namespace)}
        self._saves_itself = type(task).state_dict is not Task.state_dict
        roots = {"optimizer": optimizer, "model": model, **self._globals}
        watched = roots if self._saves_itself else {"task": task, **roots}
        self._built = ObjectState(watched, sees_data=True)
        self._owners |= self._built.functions
        self._model = model
        self._trained = _trained(model)
        self._parameters = [MODULE_CONTENTS(module)[0] for module in model.modules()]
        self._flags = self._flags_now()
        self._changed: set[tuple[str, str]] = set()
        self.lost = {path: f"{path} is an iterator, whose position cannot be kept" for path in self._built.opaque}
        """State that cannot be kept, by its path, and why."""
        if (unseen := self._built.unseen) is not None:
            shown = unseen if len(unseen) < _MOST_SHOWN else f"{unseen[:_MOST_SHOWN]}..."
            self.lost[unseen] = (
                f"{shown} lies too deep, or behind more objects than are looked into, so its changes are not kept"
            )

    def look(self) -> None:
        """Find the attributes that have changed; those found once are kept from then on."""
        self._changed |= {self._attribute_of(path) for path in self._built.take_changed()}

    def changed_since(self, known: Iterable[str]) -> list[str]:
        """Return the attributes that have changed, without those that lie on the way to known paths of plain state.

        Attributes of the optimiser are left out: its own steps change them.
        """
        named = ((owner, name) for owner, name in self._changed if owner.partition(".")[0] != "optimizer")
        found = sorted(name if owner == "globals" else f"{owner}.{name}" for owner, name in named)
        paths = list(known)
        return [path for path in found if not any(is_inside(path, other) for other in paths)]

    def _attribute_of(self, path: str) -> tuple[str, str]:
        """Return the owner and the attribute that a path leads through; a global variable is its own."""
        if path.startswith("global ") and not any(path.startswith(f"{owner}.") for owner in self._built.functions):
            name = path.removeprefix("global ").partition(".")[0].partition("[")[0]
            return "globals", f"global {name}"
        owner = max((owner for owner in self._owners if path.startswith(f"{owner}.")), key=len)
        return owner, path.removeprefix(f"{owner}.").partition(".")[0].partition("[")[0]

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as tensors by name: none as long as nothing has changed."""
        self.look()
        flags: dict[str, bool] = {}
        if self._flags_now() != self._flags:
            flags = {name: flag for name, flag in _trained(self._model).items() if flag != self._trained.get(name)}
        if not self._changed and not self._saves_itself and not flags:
            return {}
        state: dict[str, Any] = {_FLAGS: kept(flags, _FLAGS)} if flags else {}
        if self._saves_itself:
            own = self._owners["task"].state_dict()
            try:
                state["task"] = kept(dict(own), "the task's state_dict()")
            except (CannotKeep, RecursionError, TypeError, ValueError) as error:
                raise TaskInvalid(
                    f"the task's state_dict() cannot be kept ({error}): let it return a dict of numbers, strings, "
                    "tensors, lists and dicts"
                ) from error
        for owner, name in sorted(self._changed):
            path = f"{owner}.{name}"
            try:
                state[path] = self._kept(owner, name, path)
            except CannotKeep as error:
                self.lost[path] = str(error)
            except RecursionError:
                self.lost[path] = f"{path} leads to itself"
        found = NamedTensors()
        text = json.dumps(encode(state, "tree", found), allow_nan=False).encode()
        # of a length that seldom changes, so that snapshots need not be laid out anew for every digit
        room = 1 << (len(text) - 1).bit_length()
        tree = torch.frombuffer(bytearray(text.ljust(room)), dtype=torch.uint8)
        return {_TREE: tree, **{f"{PREFIX}{name}": value for name, value in found.items() if isinstance(value, Tensor)}}

    def _flags_now(self) -> list[bool]:
        return [p.requires_grad for parameters in self._parameters for p in parameters.values() if p is not None]

    def _kept(self, owner: str, name: str, path: str) -> Any:
        values = self._globals if owner == "globals" else vars(self._owners[owner])
        where = name if owner == "globals" else path
        return kept(values[name], where, self._built.first) if name in values else _ABSENT

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` returned.

        Raises:
            CheckpointMismatch: It is of another task: an object that had state is not there.
        """
        if _TREE not in tensors:
            return
        own = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        state = decode(json.loads(bytes(own.pop("tree").tolist())), own.__getitem__)
        try:
            if "task" in state:
                self._owners["task"].load_state_dict(restored(state.pop("task"), None, "the task's state_dict()"))
            flags = restored(state.pop(_FLAGS), None, _FLAGS) if _FLAGS in state else {}
            for name, parameter in self._model.named_parameters():
                if name in flags:
                    parameter.requires_grad_(flags[name])
            for path, value in state.items():
                self._restore(path, value)
        except (CannotKeep, LookupError, AttributeError) as error:
            raise CheckpointMismatch(f"the checkpoint holds state that does not fit this task: {error}") from error
        self.look()

    def _restore(self, path: str, value: Any) -> None:
        owner, _, name = path.rpartition(".")
        if owner == "globals":
            if restored(value, self._globals[name], name) is not self._globals[name]:
                raise CannotKeep(f"{name} has another shape or type now, and cannot be filled where it is")
            return
        target = self._owners[owner]
        if value == _ABSENT:
            vars(target).pop(name, None)
        else:
            setattr(target, name, restored(value, vars(target).get(name), path))


def _trained(model: nn.Module) -> dict[str, bool]:
    """Return which parameters are trained: a task may freeze and unfreeze them on the way."""
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}
