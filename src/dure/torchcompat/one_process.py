"""Code of a task as in a run of one process."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_OF_ONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "NODE_RANK": "0",
    "GROUP_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
}
"""Environment variables of ranks, with their values for the only process of a run."""
_COUNTS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
_READERS = ("os", "_collections_abc", "collections.abc", "torch.distributed", "torch.distributed.distributed_c10d")
"""Modules through which other code reads the number of ranks."""


@contextmanager
def as_one_process() -> Iterator[None]:
    """Run code with the environment of a run of one process, without a process group (private in torch)."""
    member: Any = dist.GroupMember
    group, before = member.WORLD, {name: os.environ[name] for name in _OF_ONE if name in os.environ}
    os.environ.update((name, _OF_ONE[name]) for name in before)
    member.WORLD = None
    try:
        yield
    finally:
        member.WORLD = group
        os.environ.update(before)


@contextmanager
def reads_of_world_size() -> Iterator[list[str]]:
    """Record where code that is neither dure's nor torch's own reads the number of ranks (private in torch and `os`).

    Yields:
        `file:line` of each read, of the environment or by `torch.distributed`; filled during the context.
    """
    found: list[str] = []
    environ: Any = type(os.environ)
    torch_collectives: Any = torch.distributed.distributed_c10d
    read_variable, group_size = environ.__getitem__, torch_collectives._get_group_size

    def note() -> None:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__") in _READERS:
            frame = frame.f_back
        if not str(frame.f_globals.get("__name__")).startswith(("dure.", "torch.")):
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    def noted_variable(self: Any, key: Any) -> Any:
        value = read_variable(self, key)
        if key in _COUNTS:
            note()
        return value

    def noted_size(group: Any) -> Any:
        note()
        return group_size(group)

    environ.__getitem__, torch_collectives._get_group_size = noted_variable, noted_size
    try:
        yield found
    finally:
        environ.__getitem__, torch_collectives._get_group_size = read_variable, group_size
