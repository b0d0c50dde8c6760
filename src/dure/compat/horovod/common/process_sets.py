"""Process sets: groups of ranks with collectives of their own."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from dure.compat.horovod.common import basics
from dure.compat.horovod.engine.entries import Entry
from dure.compat.horovod.engine.requests import GLOBAL_SET, Request

_NOT_DYNAMIC = "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow process sets to be added or removed after hvd.init()."
_num_changes = 0


class ProcessSet:
    """Set of ranks. It has a number once it is registered by `init` or `add_process_set`."""

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        """Describe a set; nothing is registered yet.

        Args:
            ranks_or_comm: Global ranks.

        Raises:
            ValueError: They are no ranks.
        """
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(f"a process set is made of a list of ranks, not of a {type(ranks_or_comm).__name__}")
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"a process set is made of a list of ranks, not of {ranks}")
        self.ranks = sorted(ranks)

    def _invalidate(self) -> None:
        self.process_set_id = None

    def size(self) -> int | None:
        """Return the number of ranks; None if the set is not registered."""
        members = self._members()
        return None if members is None else len(members)

    def rank(self) -> int | None:
        """Return this process's rank within the set; None if the set is not registered.

        Raises:
            ValueError: This process is not in the set.
        """
        members = self._members()
        if members is None:
            return None
        if basics.rank() not in members:
            raise ValueError(f"rank {basics.rank()} is not in {self}")
        return members.index(basics.rank())

    def included(self) -> bool | None:
        """Return whether this process is in the set."""
        return None if self.ranks is None else basics.rank() in self.ranks

    def _members(self) -> tuple[int, ...] | None:
        if self.process_set_id is None:
            return None
        members = basics.engine().members_of(self.process_set_id)
        if members is None:
            raise ValueError(f"{self} does not exist any more")
        return members

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
"""Set of all ranks."""
global_process_set.process_set_id = GLOBAL_SET


def _reset() -> None:
    global _num_changes
    _num_changes = 0


basics.on_init.append(_reset)


def setup(process_sets: Any = None) -> None:
    """Start Horovod's process sets after the engine.

    Args:
        process_sets: Sets to register now, or `dynamic` to allow them later.

    Raises:
        ValueError: A set occurs twice.
    """
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f"process_sets is {process_sets!r} but must be a list of ProcessSet, or 'dynamic'")
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        process_sets = None
    global_process_set.ranks = list(range(basics.size()))
    for index, process_set in enumerate(process_sets or []):
        number = _register(process_set)
        if number is None:
            raise ValueError(f"process_sets entry number {index} is a duplicate: {process_set}")
        process_set.process_set_id = number


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set; all ranks call this. `HOROVOD_DYNAMIC_PROCESS_SETS=1` is needed, as with Horovod.

    Raises:
        ValueError: There is one of these ranks, they are invalid, or sets cannot be added.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _refuse_unless_dynamic()
    number = _register(process_set)
    if number is None:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    process_set.process_set_id = number
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set; all ranks call this. Return whether there was one.

    Raises:
        ValueError: Sets cannot be removed.
    """
    number = process_set.process_set_id
    if number is None or number == GLOBAL_SET:
        return False
    _refuse_unless_dynamic()
    process_set._invalidate()
    return _change("remove_process_set", root=number) >= 0


def _refuse_unless_dynamic() -> None:
    basics.engine()
    if os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") in ("", "0"):
        raise ValueError(_NOT_DYNAMIC)


def _register(process_set: ProcessSet) -> int | None:
    ranks = process_set.ranks or []
    if not ranks or len(set(ranks)) != len(ranks) or not 0 <= ranks[0] <= ranks[-1] < basics.size():
        raise ValueError(f"{process_set} must have different ranks from 0 to {basics.size() - 1}")
    number = _change("add_process_set", ranks=tuple(ranks))
    return None if number < 0 else number


def _change(kind: str, ranks: tuple[int, ...] = (), root: int = -1) -> int:
    """Add or remove a set on all ranks, and return its number; -1 if that is not possible."""
    global _num_changes
    name = f"process_set.{_num_changes}"
    _num_changes += 1
    entry = Entry(Request(name=name, kind=kind, ranks=ranks, root=root), [])
    basics.engine().enqueue(entry)
    basics.engine().wait(entry)
    if entry.error is not None:
        raise entry.error
    return entry.value
