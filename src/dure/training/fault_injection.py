"""Fault injection: `--faults faults.toml` says which rank fails in which step, and how.

    [[fault]]
    rank = 1
    step = 12
    kind = "kill"

It shows how a run reacts to a failure before one happens by itself. Each fault happens once, even if the run is
restarted. Several faults of one rank in one step happen in the order of the file. Those after one that ends the rank
happen when that step begins again, if it does.
"""

import ctypes
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from dure.documents import DocumentInvalid, read_toml
from dure.errors import SpecInvalid
from dure.records import events
from dure.records.run_dir import RunDir
from dure.records.sums import Sum
from dure.spec.fields import MOST_SECONDS
from dure.terminal import few

MOST_FAULTS = 1000
_SHOW_IN_STEP = frozenset({"nan", "flip"})
_END_BEFORE_STEP = frozenset({"kill", "raise", "segv", "exit", "oom"})
_SHOWN_NAMES = 8


class Fault(BaseModel):
    """One fault."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    rank: int = Field(ge=0)
    step: int = Field(ge=1)
    """Step before which the fault happens, counted over the whole run, from 1."""
    kind: Literal["kill", "stop", "raise", "segv", "exit", "oom", "nan", "slow", "flip", "cut"]
    """Kind of fault. `stop` is SIGSTOP, `nan` makes the step's loss NaN, `slow` waits before the step, `flip` flips a
    bit.

    `cut` makes the rank's host silent, as if its cable were pulled: its ranks stop, and its launcher neither receives
    nor sends. It is not exact: in a real cut both sides continue and wait for each other, and packets are lost. Here
    the other hosts see no error, and data in transit is received afterwards.
    """
    seconds: float = Field(1.0, gt=0, le=MOST_SECONDS)
    """Seconds that `slow` waits, or that `cut` lasts."""
    tensor: str | None = None
    """Name of the parameter in which `flip` flips a bit; None for the rank's first one."""
    element: int = Field(0, ge=0)
    """Index of the flipped element in row-major order, from 0."""
    bit: int = Field(0, ge=0)
    """Index of the flipped bit in the element; 0 is the lowest bit of the mantissa."""


class PlannedFailure(RuntimeError):
    """Exception raised by the fault `raise`."""

    is_planned = True
    """Marker without which the exception would be taken for an error in dure."""


class PlannedOutOfMemory(torch.OutOfMemoryError):
    """Exception raised by the fault `oom`."""

    is_planned = True


def read_faults(path: Path, num_ranks: int, *, on_several_hosts: bool = True) -> list[Fault]:
    """Read a file of faults.

    Args:
        path: Path of the file.
        num_ranks: Number of ranks.
        on_several_hosts: Whether a host can be cut off.

    Raises:
        SpecInvalid: The file cannot be read or is invalid; the message lists all errors.
    """
    try:
        found = read_toml(path)
    except OSError as error:
        raise SpecInvalid([f"faults is {path}, which cannot be read: {error.strerror}"]) from None
    except DocumentInvalid as error:
        raise SpecInvalid([f"faults is {path}, which {error}"]) from None
    entries = found.get("fault")
    if found.keys() != {"fault"} or not isinstance(entries, list) or len(entries) > MOST_FAULTS:
        raise SpecInvalid([f"{path} must have nothing but tables [[fault]], at most {MOST_FAULTS} of them"])
    faults: dict[int, Fault] = {}
    wrong: list[str] = []
    for number, entry in enumerate(entries, 1):
        try:
            fault = Fault.model_validate(entry)
        except ValidationError as error:
            wrong += [f"{path}, fault {number}: {_where(detail)}{detail['msg']}" for detail in error.errors()]
            continue
        if fault.rank >= num_ranks:
            wrong.append(f"{path}, fault {number}: rank is {fault.rank} but the ranks are 0 to {num_ranks - 1}")
        if fault.kind == "cut" and not on_several_hosts:
            wrong.append(f"{path}, fault {number}: kind is cut, but the run is on one host (--nnodes)")
        faults[number] = fault
    wrong += [f"{path}, {reason}" for reason in _undone(faults)]
    if wrong:
        raise SpecInvalid(wrong)
    return list(faults.values())


def _undone(faults: Mapping[int, Fault]) -> Iterator[str]:
    """Yield a message for each fault without effect, because a later one ends the rank first."""
    for number, fault in faults.items():
        behind = (
            (other_number, other)
            for other_number, other in faults.items()
            if other_number > number
            and (other.rank, other.step) == (fault.rank, fault.step)
            and other.kind in _END_BEFORE_STEP
        )
        if fault.kind in _SHOW_IN_STEP and (end := next(behind, None)) is not None:
            yield (
                f"fault {number}: {fault.kind} at step {fault.step} of rank {fault.rank} cannot show, for fault "
                f"{end[0]}, {end[1].kind}, ends the rank before that step is computed: put it behind that"
            )


def _where(detail: Any) -> str:
    place = ".".join(map(str, detail["loc"]))
    return f"{place}: " if place else ""


def _missed(faults: Iterable[Fault], run: RunDir) -> Iterator[Fault]:
    """Yield the faults missing from the run's events; a fault planned twice counts twice."""
    happened = Counter((e.rank, e.step, e.kind) for e in run.events() if isinstance(e, events.FaultHappened))
    for fault in faults:
        this = fault.rank, fault.step, fault.kind
        if happened[this]:
            happened[this] -= 1
        else:
            yield fault


class PlannedFaults:
    """Faults of one rank that have not happened yet."""

    def __init__(self, faults: list[Fault], rank: int, run: RunDir, cut: Callable[[float], None] = time.sleep) -> None:
        """Select the faults of a rank; `cut` makes its host silent for a number of seconds."""
        self._faults = faults
        self._run = run
        self._cut = cut
        self._due: dict[int, deque[Fault]] = {}
        """Faults of each step, in order."""
        for fault in _missed((fault for fault in faults if fault.rank == rank), run):
            self._due.setdefault(fault.step, deque()).append(fault)
        self._makes_nan = False
        self._tensors: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the rank's parameters, for faults in them.

        Raises:
            SpecInvalid: A fault names a parameter or a bit that does not exist.
        """
        self._tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        flips = [fault for due in self._due.values() for fault in due if fault.kind == "flip"]
        wrong = [reason for fault in flips if (reason := self._fault_of(fault)) is not None]
        if wrong:
            raise SpecInvalid(wrong)

    def _fault_of(self, fault: Fault) -> str | None:
        where = f"fault flip at step {fault.step} of rank {fault.rank}"
        tensor = self._flipped(fault)
        if tensor is None:
            there = ", ".join(list(self._tensors)[:_SHOWN_NAMES]) or "none"
            return f"{where}: tensor is {fault.tensor} but the rank has no such parameter; it has {there}"
        if fault.element >= tensor.numel() or fault.bit >= 8 * tensor.element_size():
            size = f"{tensor.numel()} elements of {8 * tensor.element_size()} bits"
            return f"{where}: element {fault.element}, bit {fault.bit} is not in its {size}"
        return None

    def _flipped(self, fault: Fault) -> Tensor | None:
        if fault.tensor is None:
            return next(iter(self._tensors.values()), None)
        return self._tensors.get(fault.tensor)

    def begin_step(self, step: int) -> None:
        """Inject the faults planned for a step."""
        self._makes_nan = False
        due = self._due.get(step)
        while due:
            fault = due.popleft()
            self._run.append_event(events.FaultHappened(rank=fault.rank, step=step, kind=fault.kind))
            self._makes_nan = self._makes_nan or fault.kind == "nan"
            if fault.kind == "flip" and (tensor := self._flipped(fault)) is not None:
                flip(tensor, fault.element, fault.bit)
            if fault.kind == "cut":
                self._cut(fault.seconds)
            _happen(fault)

    def never_came(self, last_step: int) -> str | None:
        """Return a message on the faults of all ranks that did not happen in a completed run; None if all did."""
        missed = [
            f"{fault.kind} at step {fault.step} of rank {fault.rank}" for fault in _missed(self._faults, self._run)
        ]
        if not missed:
            return None
        return (
            f"{len(missed)} of the planned faults never happened, and the run is complete with step {last_step}: "
            f"{few(missed, _SHOWN_NAMES)}"
        )

    def around(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a loss so that it is NaN in the steps planned for it."""

        def planned(model: Any, batch: Any) -> Any:
            value = loss(model, batch)
            if not self._makes_nan or not torch.is_grad_enabled():
                return value
            return Sum(value.total * torch.nan, value.count) if isinstance(value, Sum) else value * torch.nan

        return planned


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip a bit of a tensor in place, as a memory fault does."""
    with torch.no_grad():
        place = tensor.reshape(-1)[element : element + 1].clone()
        place.view(torch.uint8)[bit // 8] ^= 1 << bit % 8  # all machines supported by torch are little-endian
        index = torch.unravel_index(torch.tensor(element), tensor.shape)
        tensor[index] = place[0]


def _happen(fault: Fault) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "segv":
        ctypes.string_at(0)
    elif fault.kind == "exit":
        os._exit(3)
    elif fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind in ("oom", "raise"):
        kind = PlannedOutOfMemory if fault.kind == "oom" else PlannedFailure
        raise kind(f"planned for step {fault.step} of rank {fault.rank}")
