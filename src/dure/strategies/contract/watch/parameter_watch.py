"""Watch over a model's parameters while the task's loss runs: frozen, unfrozen, written to, or replaced."""

import functools
import math
import operator
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from dure.errors import TaskInvalid
from dure.strategies.state.checksum import checksums
from dure.terminal import few

_WRITTEN_PLACEHOLDER = "more than one element of the written-to tensor refers to a single memory location"
"""Part of torch's error for a write to a parameter of another rank, which is expanded from one number here."""

_requires_grad = operator.attrgetter("requires_grad")
_NO_BYTES = torch.empty(0)
"""Tensor in place of one that is on another rank."""
_SUM_INTERVAL = 200
"""Time between two comparisons of checksums, as a multiple of one computation; a comparison takes two."""

NamedParameters = Iterable[tuple[str, nn.Parameter]]


class Freezing(NamedTuple):
    """Names of parameters that a loss has frozen and unfrozen."""

    frozen: list[str]
    unfrozen: list[str]


class ParameterWatch:
    """Context of every call of the loss, which compares the parameters before and after it."""

    def __init__(
        self,
        model: nn.Module,
        strategy: str,
        *,
        sees_writes: bool = False,
        named: Callable[[], NamedParameters] | None = None,
    ) -> None:
        """Start with the current parameters.

        Args:
            model: Model whose modules may not be replaced.
            strategy: Name of the strategy, for messages.
            sees_writes: Whether writes are detected too, for strategies that would undo them.
            named: Lists the parameters before each call, if their objects change; None if they stay the same.
        """
        self._strategy = strategy
        self._named = named
        self._sees_writes = sees_writes
        self._list(named() if named is not None else model.named_parameters())
        self._flags = list(map(_requires_grad, self._parameters))
        self._num_calls = 0
        self._versions: list[int] = []
        self._sums: list[int] | None = None
        """Checksums of the parameters when the call began; None if they are not compared after it."""
        self._sum_seconds = 0.0
        self._summed_at = -math.inf
        self._modules = {id(vars(module)): name for name, module in model.named_modules()}
        """Names of the modules, which are identified by their attributes, because a proxy of the model shares these."""
        self.is_light = not sees_writes and named is None
        """True if the context does no more than to note that a call runs, in `calls`."""
        self.calls: list[None] = []
        """One entry per call in progress: replicas on threads call their losses at the same time."""
        # registered for the lifetime of this object: to register at each call would take a fiftieth of a small step
        refuse = weakref.WeakMethod(self._refuse_replacing)
        for register in (register_module_module_registration_hook, register_module_parameter_registration_hook):
            weakref.finalize(self, register(functools.partial(_call_if_alive, refuse)).remove)

    def _list(self, named: NamedParameters) -> None:
        pairs = list(named)
        self._names, self._parameters = [name for name, _ in pairs], [parameter for _, parameter in pairs]

    def _refuse_replacing(self, module: nn.Module, name: str, new: Any) -> None:
        """Refuse a parameter or module that is registered during the run; called by torch for any module."""
        path = self._modules.get(id(vars(module)))
        if not self.calls or path is None:
            return
        if module._parameters.get(name) is new or module._modules.get(name) is new:
            return
        raise TaskInvalid(
            f"the task's loss puts a new {type(new).__name__} into the model as {f'{path}.{name}' if path else name} "
            "during the run, and a resumed run, which begins with build_model, would not have it: build the whole "
            "model in build_model"
        )

    def __enter__(self) -> None:
        """Record the parameters before a call of the loss.

        A write through `.data` changes no version counter. Checksums detect such writes. They are compared at every
        call whose number is a power of two, and otherwise so often that it takes a hundredth of the time.
        """
        self.calls.append(None)
        if self._named is not None:
            self._list(self._named())
        if not self._sees_writes:
            return
        self._num_calls += 1
        self._versions = [parameter._version for parameter in self._parameters]
        is_due = time.monotonic() - self._summed_at > _SUM_INTERVAL * self._sum_seconds
        self._sums = self._sums_now() if is_due or not self._num_calls & (self._num_calls - 1) else None

    def _sums_now(self) -> list[int]:
        began = time.monotonic()
        local = (p.to_local() if isinstance(p, DTensor) else p for p in self._parameters)
        # a parameter of another rank is one expanded number here, and torch refuses writes to it
        sums = checksums(_NO_BYTES if 0 in tensor.stride() else tensor for tensor in local)
        self._summed_at = time.monotonic()
        self._sum_seconds = self._summed_at - began
        return sums

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Compare the parameters after the call.

        Raises:
            TaskInvalid: The loss wrote to parameters, which the strategy would undo.
        """
        self.calls.pop()
        if not self._sees_writes:
            return
        if isinstance(error, RuntimeError) and _WRITTEN_PLACEHOLDER in str(error):
            raise TaskInvalid(write_fault(["one of another rank"], self._strategy)) from error
        if error is None and (written := self._written()):
            raise TaskInvalid(write_fault(written, self._strategy))

    def _written(self) -> list[str]:
        """Return the parameters that were written to since the call began."""
        found = [
            name
            for name, parameter, version in zip(self._names, self._parameters, self._versions, strict=True)
            if parameter._version != version
        ]
        if not found and self._sums is not None:
            triples = zip(self._names, self._sums, self._sums_now(), strict=True)
            found = [name for name, before, now in triples if before != now]
        return found

    def freezing(self) -> Freezing | None:
        """Return the parameters that were frozen or unfrozen since the last call of this method, or None."""
        now = list(map(_requires_grad, self._parameters))
        if now == self._flags:
            return None
        triples = list(zip(self._names, self._flags, now, strict=True))
        self._flags = now
        return Freezing(
            frozen=[name for name, was, is_ in triples if was and not is_],
            unfrozen=[name for name, was, is_ in triples if is_ and not was],
        )


def _call_if_alive(method: "weakref.WeakMethod[Callable[..., None]]", *arguments: Any) -> None:
    if (alive := method()) is not None:
        alive(*arguments)


def write_fault(names: Sequence[str], strategy: str) -> str:
    """Return the message about a loss that writes to parameters."""
    return (
        f"the task's loss writes to parameters ({few(names)}), which {strategy} would undo: change them in "
        "an optimiser of your own, compute with a changed copy (torch.nn.utils.parametrize), or use ddp"
    )


def freezing_fault(names: Sequence[str], what: str, strategy: str) -> str:
    """Return the message about a task that froze or unfroze parameters."""
    return (
        f"the task {what} {few(names)} during the run, and {strategy} divided the work when the run "
        "began: use ddp or naive_ddp, also to go on with this run, or decide in build_model what is trained"
    )
