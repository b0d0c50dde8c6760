"""Plain state of the task, its modules and the optimiser, for checkpoints: counters and similar state that changes.

State in the `state_dict` of a module or an optimiser is kept there. This module keeps the rest: attributes that have
changed since the session was built.
"""

import functools
import json
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.documents import parse_json
from dure.errors import CheckpointMismatch, TaskInvalid
from dure.strategies.state.checksum import checksum
from dure.strategies.state.objects.namespaces import UnsavedBuffers
from dure.strategies.state.objects.object_state import Holder, ObjectState, is_inside
from dure.strategies.state.objects.used_globals import state_outside
from dure.torchcompat.modules import MODULE_CONTENTS
from dure.training.checkpoints.state_tree import NamedTensors, decode, encode
from dure.training.objects.hook_watch import HookWatch
from dure.training.objects.kept_objects import CannotKeep, Keeper, KnownObjects, packed
from dure.training.objects.restored_objects import Restorer, unpacked
from dure.training.task.task import Task

PREFIX = "kept."
"""Prefix of the names of this state among a rank's own."""
_TREE = f"{PREFIX}tree"
_ABSENT = "absent"
_FLAGS = "requires_grad"
_MOST_SHOWN = 80
"""Maximum characters of a path in a sentence."""


class KeptState:
    """Attributes of a session's objects that have changed since it was built."""

    def __init__(self, task: Task, model: nn.Module, optimizer: Optimizer) -> None:
        """Record the initial state, before anything is restored or trained."""
        modules = {f"model.{name}" if name else "model": module for name, module in model.named_modules()}
        used = state_outside(task, model)
        self._task = task
        self._saves_itself = type(task).state_dict is not Task.state_dict
        roots = {"optimizer": optimizer, "model": model, **used}
        self._watched: dict[str, object] = roots if self._saves_itself else {"task": task, **roots}
        self._built = self.state_now()
        self._owners = self._built.owners
        self.generators = self._built.generators()
        """Paths of the random number generators."""
        self._model = model
        self._unsaved = {f"{path}._buffers": UnsavedBuffers(module) for path, module in modules.items()}
        self._unsaved_names = [*map(_NON_PERSISTENT, modules.values())]
        self._num_unsaved = self._count_unsaved()
        self._first_unsaved = self._unsaved_holders()
        self._known = self._known_objects()
        self._trained = _trained(model)
        self._parameters = [MODULE_CONTENTS(module)[0] for module in model.modules()]
        self._flags = self._flags_now()
        self._hooks = HookWatch(
            {**modules, "optimizer": optimizer}, {f"model.{name}": each for name, each in model.named_parameters()}
        )
        self._changed: set[Holder] = set()
        self.lost = self._unseen()
        """Reasons why state cannot be kept, by its path."""

    def holds(self, container: object) -> bool:
        """Return whether a container is a part of the state, so that what it contains is kept."""
        return any(value is container for value in self._built.first.values())

    def add_schedule(self, schedule: object) -> None:
        """Include the state of a schedule, such as weights that it stores; what building it has set counts as changed.

        Args:
            schedule: Schedule as the task built it; None for no schedule.
        """
        if schedule is None:
            return
        self.look()
        self._watched = {**self._watched, "schedule": schedule}
        self._built = self.state_now()
        self._owners, self.generators = self._built.owners, self._built.generators()
        self._known = self._known_objects()
        self.lost = {**self._unseen(), **self.lost}

    def _unseen(self) -> dict[str, str]:
        """Return the reasons why changes of some state cannot be detected, by its path."""
        lost = {path: f"{path} is an iterator, whose position cannot be kept" for path in self._built.opaque}
        lost |= {path: f"{path} is an object whose changes cannot be seen" for path in self._built.hidden}
        if (unseen := self._built.unseen) is not None:
            shown = unseen if len(unseen) < _MOST_SHOWN else f"{unseen[:_MOST_SHOWN]}..."
            lost[unseen] = (
                f"{shown} lies too deep, or behind more objects than are looked into, so its changes are not kept"
            )
        return lost

    def state_now(self) -> ObjectState:
        """Return the state of all watched objects, for a later comparison."""
        return ObjectState(
            self._watched,
            sees_data=True,
            sees_unsaved_buffers=True,
            without=self._task if self._saves_itself else None,  # a schedule may hold it
        )

    def _known_objects(self) -> KnownObjects:
        """Return the objects that an attribute may reference; the contents of model and owners are kept elsewhere."""
        buffers = {f"model.{name}": buffer for name, buffer in self._model.named_buffers()}
        owners = [owner for owner in self._owners.values() if not isinstance(owner, Tensor)]
        own = [*self._model.modules(), *self._model.parameters(), *buffers.values(), *owners]
        unsaved = {id(buffer) for each in self._unsaved.values() for buffer in each.values()}
        objects = {"task": self._task, **self._built.first, **buffers}
        return KnownObjects(objects, {id(self._task), id(self._built.first["optimizer"]), *map(id, own)} - unsaved)

    def look(self, *, is_thorough: bool = False) -> None:
        """Find the attributes that have changed; once found, an attribute stays included.

        Args:
            is_thorough: Whether to compare large values completely.
        """
        self._changed |= self._built.take_changed(is_thorough=is_thorough)
        if self._count_unsaved() != self._num_unsaved:
            self._changed |= self._unsaved_holders() - self._first_unsaved
        for path in self._hooks.changed(is_thorough=is_thorough):
            self.lost[path] = (
                f"{path} changed on the way: the task registered or removed a hook, or replaced a function"
            )

    def _unsaved_holders(self) -> set[Holder]:
        return {(path, name) for path, buffers in self._unsaved.items() for name in buffers}

    def _count_unsaved(self) -> int:
        return sum(map(len, self._unsaved_names))

    def changed_since(self, known: Iterable[str]) -> list[str]:
        """Return the changed attributes, except those that are, or contain, known paths of plain state.

        Attributes of the optimiser are omitted, because its own steps change them; buffers are omitted as well.
        """
        elsewhere = {"optimizer", *self._unsaved}
        paths, found = list(known), sorted(_path(holder) for holder in self._changed if holder[0] not in elsewhere)
        return [path for path in found if not any(is_inside(path, other) for other in paths)]

    def tensors(self, *, is_thorough: bool = False) -> dict[str, Tensor]:
        """Return the state as tensors by name; empty as long as nothing has changed.

        Args:
            is_thorough: Passed to `look`.
        """
        self.look(is_thorough=is_thorough)
        flags: dict[str, bool] = {}
        if self._flags_now() != self._flags:
            flags = {name: flag for name, flag in _trained(self._model).items() if flag != self._trained.get(name)}
        if not self._changed and not self._saves_itself and not flags:
            return {}
        state: dict[str, Any] = {_FLAGS: flags, **self._of_task()}
        keeper, entries = Keeper(self._known), []
        for holder in sorted(self._changed):
            path = _path(holder)
            try:
                entries.append([*holder, self._entry(keeper, holder)])
            except CannotKeep as error:
                self.lost[path] = str(error)
            except RecursionError:
                self.lost[path] = f"{path} holds too many objects within one another"
        state |= {"attributes": entries, "objects": keeper.objects}
        found = NamedTensors()
        text = json.dumps(encode(state, "tree", found), allow_nan=False).encode()
        # padded to a length that seldom changes, so that snapshots are not laid out again for every digit
        room = 1 << (len(text) - 1).bit_length()
        tree = torch.frombuffer(bytearray(text.ljust(room)), dtype=torch.uint8)
        return {_TREE: tree, **{f"{PREFIX}{name}": value for name, value in found.items() if isinstance(value, Tensor)}}

    def checksums(self, owner: str) -> dict[str, int]:
        """Return the checksums of changed attributes, by their paths, except those that cannot be kept.

        Args:
            owner: Path of the object that has the attributes, or is at the top of those that have them.
        """
        self.look(is_thorough=True)
        found = {}
        for holder in sorted(holder for holder in self._changed if is_inside(owner, holder[0])):
            keeper, tensors = Keeper(self._known), NamedTensors()
            with suppress(CannotKeep, RecursionError):
                entry = self._entry(keeper, holder)
                text = json.dumps(encode([entry, keeper.objects], "tree", tensors))
                values = [value for value in tensors.values() if isinstance(value, Tensor)]
                found[_path(holder)] = zlib.crc32(text.encode(), checksum(values))
        return found

    def _of_task(self) -> dict[str, Any]:
        if not self._saves_itself:
            return {}
        own: Any = self._task.state_dict()
        try:
            return {"task": packed(dict(own), "the task's state_dict()")}
        except (CannotKeep, RecursionError, TypeError, ValueError) as error:
            raise TaskInvalid(
                f"the task's state_dict() cannot be kept ({error}): let it return a dict of numbers, strings, "
                "tensors, lists and dicts"
            ) from error

    def _flags_now(self) -> list[bool]:
        return [p.requires_grad for parameters in self._parameters for p in parameters.values() if p is not None]

    def _entry(self, keeper: Keeper, holder: Holder) -> Any:
        owner, name = holder
        values = self._attributes_of(owner) if owner else self._built.first
        if name not in values:
            return {_ABSENT: True}
        if isinstance(values[name], functools._lru_cache_wrapper):
            raise CannotKeep(f"{_path(holder)} has changed a value in its cache, which cannot be kept")
        return keeper.entry(values[name], _path(holder))

    def _attributes_of(self, owner: str) -> Any:
        if owner in self._unsaved:
            return self._unsaved[owner]
        if owner not in self._owners:
            raise CannotKeep(f"{owner} had state in the run that is gone on with, and is not there now")
        return vars(self._owners[owner])

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned.

        Raises:
            CheckpointMismatch: The state is of another task: an object that had state does not exist.
        """
        if _TREE not in tensors:
            return
        own = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        state = decode(
            parse_json(bytes(own.pop("tree").tolist()), may_repeat_keys=True, most_depth=None), own.__getitem__
        )
        self._known = self._known_objects()  # buffers may be other objects now
        device = next((parameter.device for parameter in self._model.parameters()), None)
        restorer = Restorer(state["objects"], self._known.objects, device)
        try:
            if "task" in state:
                self._task.load_state_dict(unpacked(state["task"]))
            for name, parameter in self._model.named_parameters():
                if name in state[_FLAGS]:
                    parameter.requires_grad_(state[_FLAGS][name])
            for owner, name, entry in state["attributes"]:
                self._restore(restorer, owner, name, entry)
        except (CannotKeep, LookupError, AttributeError) as error:
            raise CheckpointMismatch(f"the checkpoint holds state that does not fit this task: {error}") from error
        self.look()

    def _restore(self, restorer: Restorer, owner: str, name: str, entry: Any) -> None:
        if not owner:
            restorer.value(entry)
        elif entry == {_ABSENT: True}:
            self._attributes_of(owner).pop(name, None)
        else:
            self._attributes_of(owner)[name] = restorer.value(entry)


_NON_PERSISTENT = attrgetter("_non_persistent_buffers_set")


def _path(holder: Holder) -> str:
    return ".".join(filter(None, holder))


def _trained(model: nn.Module) -> dict[str, bool]:
    """Return whether each parameter is trained; a task may freeze and unfreeze parameters during the run."""
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}
