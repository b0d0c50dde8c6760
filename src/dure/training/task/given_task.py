"""Tasks that a Python program passes: either this object is trained, or the record says why only that program can.

An object reaches ranks that are forked from this process, and a rank inside it. All others (spawned ranks, other hosts,
a later resume from the command line) build the task from the class and options in the run's record. The record
therefore says whether these suffice.
"""

import copy
import functools
import inspect
import os
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dure.data.randomness import kept_global_randomness
from dure.errors import TaskInvalid
from dure.training.seeds import seed_everything
from dure.training.task.digests import digest
from dure.training.task.hooks import check_names, check_task_class
from dure.training.task.load_task import load_task_class
from dure.training.task.options import build_task, is_same, options_of, task_options
from dure.training.task.task import Task

_ABSENT = "absent"


@dataclass(frozen=True, kw_only=True)
class GivenTask:
    """Task or task class that was passed to `dure.train`, and everything that a run's record can say about it."""

    cls: type[Task]
    task: Task | None
    """Passed object; None if only the class was passed."""
    reference: str
    options: Mapping[str, Any]
    """Options of the object, as JSON values."""
    attributes: Mapping[str, str | None]
    """Digests of attributes that the options do not restore; None for contents that cannot be seen."""
    reasons: tuple[str, ...]
    """Reasons why the record does not suffice to build the task again; empty if it does."""
    pid: int

    @property
    def is_only_here(self) -> bool:
        """Return whether only this process and its forks can train it."""
        return bool(self.reasons)

    @property
    def why(self) -> str:
        return " and ".join(self.reasons)

    def record(self) -> dict[str, Any] | None:
        """Return what the run's record needs in addition to class and options, or None if these suffice."""
        return {"because": self.why, "attributes": dict(self.attributes)} if self.reasons else None

    def faults_since(self, before: Mapping[str, Any] | None, options: Mapping[str, Any]) -> list[str]:
        """Compare the task with the one that the run was started with, and return the differences.

        Args:
            before: Result of `record()` at that time.
            options: Options of the resumed run, from which the task is built if only its class was passed.
        """
        if before is None and self.task is None:
            return []
        then = {} if before is None else before["attributes"]
        now = self.attributes if self.task is not None else _beyond(build_task(self.cls, options), options)
        return [
            f"{name} of the task that is passed is not what the run was begun with: pass that task again, or start a "
            "new run"
            for name in sorted({*then, *now})
            if (name in then) != (name in now) or (None not in (then[name], now[name]) and then[name] != now[name])
        ]


_given: ContextVar[GivenTask | None] = ContextVar("given task", default=None)
"""Task of the call of `dure.train` that this thread is in; forked ranks inherit it."""


def given_task() -> GivenTask | None:
    """Return the task that a Python program passed to the current call, or None."""
    return _given.get()


@contextmanager
def giving(task: "Task | type[Task] | str | None") -> Iterator[GivenTask | None]:
    """Make a task or its class available to this process and its forks without an import.

    Raises:
        TaskInvalid: dure cannot call the class.
    """
    given = None if task is None or isinstance(task, str) else _describe(task)
    token = _given.set(given)
    try:
        yield given
    finally:
        _given.reset(token)


def task_class(reference: str) -> type[Task]:
    """Return the class that was passed, or import the one that the reference names."""
    given = _given.get()
    return given.cls if given is not None and given.reference == reference else load_task_class(reference)


def make_task(reference: str, options: Mapping[str, Any], *, is_another: bool = False) -> Task:
    """Return the object that was passed, or build the task from its class and options.

    A rank inside the program's own process gets a copy. Changes by the run must not affect the next run, just as those
    of a forked rank do not.

    Args:
        reference: Reference of the task's class.
        options: Options of the task.
        is_another: Whether this process already uses the passed object, so that another one is needed.
    """
    given = _given.get()
    if given is None or given.task is None or given.reference != reference or (is_another and not given.is_only_here):
        return build_task(task_class(reference), options)
    return _copied(given.task) if is_another or os.getpid() == given.pid else given.task


def _describe(task: "Task | type[Task]") -> GivenTask:
    cls = task if isinstance(task, type) else type(task)
    if not issubclass(cls, Task):
        raise TaskInvalid(
            f"{task!r:.60} is no task: pass an object or a class derived from dure.Task, or file.py:Class"
        )
    check_task_class(cls)
    reference = _file_reference(cls)
    reasons = [] if reference else [f"the task's class {cls.__qualname__} is not at the top level of a file"]
    options: dict[str, Any] = {}
    attributes: dict[str, str | None] = {}
    if isinstance(task, Task):
        known = task_options(cls)
        check_names(cls, {name: value for name, value in vars(task).items() if name not in known})
        options, unwritten = options_of(task)
        attributes = _beyond(task, options)
        others = [name for name in unwritten if name in attributes]
        if others:
            reasons.append(f"JSON cannot hold the task's option{'s' * (len(others) > 1)} {', '.join(others)}")
        more = [name for name in attributes if name not in others]
        if more:
            reasons.append(f"the task's options do not make its attribute{'s' * (len(more) > 1)} {', '.join(more)}")
    return GivenTask(
        cls=cls,
        task=task if isinstance(task, Task) else None,
        reference=reference or f"{cls.__module__}:{cls.__qualname__}",
        options=options,
        attributes=attributes,
        reasons=tuple(reasons),
        pid=os.getpid(),
    )


def _file_reference(cls: type[Task]) -> str | None:
    """Return the `file.py:Class` by which another process finds this very class, or None."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if "." in cls.__qualname__ or getattr(module, cls.__name__, None) is not cls:
        return None
    if file is None or not file.endswith(".py") or not os.path.isfile(file):
        return None
    # a class typed into an interpreter that has run a script is not in the script's file
    functions = [part for part in vars(cls).values() if isinstance(part, types.FunctionType)]
    bodies = {f.__code__.co_filename for f in functions if f.__qualname__.startswith(f"{cls.__name__}.")}
    bodies.discard("<string>")  # generated
    if bodies and not any(_is_same_file(body, file) for body in bodies):
        return None
    return f"{Path(file).resolve()}:{cls.__name__}"


def _is_same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _beyond(task: Task, options: Mapping[str, Any]) -> dict[str, str | None]:
    """Return digests of the attributes that a task built from these options would not have, or not with equal values.

    Attributes that differ between two such tasks (a time, an id) are omitted, because no record could hold them.
    """
    cls, mine = type(task), _attributes(task)
    known = task_options(cls)
    if not cls._has_own_init and not hasattr(cls, "__post_init__") and set(mine) == set(known):
        others = [name for name in mine if name not in options and not is_same(mine[name], known[name].default)]
        return {name: digest(mine[name]) for name in others}
    first = _made_again(cls, options)
    if first is None:
        return {name: digest(value) for name, value in mine.items() if name not in options}
    differing = _differing(mine, first)
    if differing:
        second = _made_again(cls, options) or {}
        volatile = {*first} & {*second} & {*_differing(first, second)}
        differing = [name for name in differing if name not in volatile]
    return {name: digest(mine[name]) if name in mine else _ABSENT for name in differing}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    both = sorted({*one, *other})
    return [name for name in both if name not in one or name not in other or not _are_same(one[name], other[name])]


def _are_same(one: Any, other: Any) -> bool:
    found, wanted = digest(one), digest(other)
    if found is None and wanted is None:
        return type(one) is type(other)  # a lock or a connection that every such task creates for itself
    return found == wanted or is_same(one, other)


def _made_again(cls: type[Task], options: Mapping[str, Any]) -> dict[str, Any] | None:
    with kept_global_randomness():
        seed_everything(0)
        try:
            return _attributes(build_task(cls, options))
        except TaskInvalid:
            return None


def _attributes(task: Task) -> dict[str, Any]:
    """Return an object's own attributes, including slots, but without the values of cached properties."""
    slots = [name for base in type(task).__mro__ for name in _slots_of(base)]
    own = {name: value for name, value in vars(task).items() if not _is_cached_property(type(task), name)}
    return {**{name: getattr(task, name) for name in slots if hasattr(task, name)}, **own}


def _is_cached_property(cls: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _copied(task: Task) -> Task:
    """Copy a task as deeply as its attributes allow; those that cannot be copied (locks, files) are shared."""
    twin = object.__new__(type(task))
    memo: dict[int, Any] = {id(task): twin}
    for name, value in _attributes(task).items():
        try:
            own = copy.deepcopy(value, memo)
        except Exception:
            own = value
        object.__setattr__(twin, name, own)
    return twin
