"""Random collective calls of which some go wrong on some ranks, and what each rank may have got from them.

A call's inputs name the call and the rank, so that a value shows whose inputs it was made from.
"""

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dure.comm.algorithms import shm
from dure.comm.dure_shm import backend, collectives, group, tensors, work
from dure.comm.shared_memory import call_number, memory, rounds

KINDS = ("all_reduce", "all_reduce_async", "reduce", "broadcast", "all_gather", "all_gather_single", "reduce_scatter",
         "barrier", "gather", "scatter", "all_to_all_single")  # fmt: skip
FAULTS = ("interrupt", "interrupt", "wrong", "wrong everywhere", "left out")
INTERRUPTED_FILES = frozenset(
    module.__file__ for module in (memory, rounds, call_number, collectives, tensors, work, backend, group, shm)
)


class Interruption(BaseException):
    """Stands for what a signal handler raises."""


@dataclass(frozen=True)
class Call:
    """One call of a script, the same on all ranks but for its fault."""

    kind: str
    size: int
    fault: str = ""
    rank: int = 0
    """Rank on which it goes wrong."""
    line: int = 0
    """Lines of our own after which it is interrupted."""


def random_script(seed: int, world_size: int, num_calls: int = 6) -> list[Call]:
    """Return calls of which about one in four goes wrong somewhere."""
    draw = random.Random(seed)
    return [
        Call(
            kind=draw.choice(KINDS),
            size=draw.choice([1, 2, 2, 700]),
            fault=draw.choice(FAULTS) if draw.random() < 0.25 else "",
            rank=draw.randrange(world_size),
            line=int(10 ** draw.uniform(0, 2.3)),
        )
        for _ in range(num_calls)
    ]


def inputs_of(number: int, rank: int, size: int) -> torch.Tensor:
    """Return what a rank gives in a call: sums of these name all their terms."""
    return torch.full((size,), float(10**rank * (number + 1)), dtype=torch.float64)


def expected(call: Call, numbers: list[int], rank: int) -> list[float]:
    """Return what a rank gets if the ranks' calls of these numbers belong together."""
    everybodys = [inputs_of(number, other, call.size)[0].item() for other, number in enumerate(numbers)]
    if call.kind == "broadcast":
        return [everybodys[0]]
    if call.kind == "scatter":
        return [everybodys[0] + rank]
    if call.kind in ("all_gather", "all_gather_single", "all_to_all_single"):
        return everybodys
    if call.kind == "barrier":
        return []
    if call.kind == "gather":
        return everybodys if rank == 0 else []
    if call.kind == "reduce" and rank != 0:
        return [everybodys[rank]]
    return [sum(everybodys)]


def _collect(tensors: list[torch.Tensor]) -> list[float]:
    """Return one number for each tensor; None where its elements are not all the same."""
    return [tensor[0].item() if bool((tensor == tensor[0]).all()) else float("nan") for tensor in tensors]


def make(call: Call, number: int, group: dist.ProcessGroup, *, is_wrong: bool) -> list[float]:
    """Make a call, or one that must be refused, and return what it brought."""
    rank, world_size, size = dist.get_rank(), dist.get_world_size(), call.size
    own = inputs_of(number, rank, size)
    if is_wrong:
        outputs = [torch.zeros(size, dtype=torch.float64) for _ in range(world_size + 1)]
        if call.kind in ("all_reduce", "all_reduce_async", "reduce", "broadcast", "barrier"):
            dist.broadcast(own, group=group, group_src=world_size)
        else:  # not one that gloo refuses in its threads: its next barrier would fail
            dist.all_gather(outputs, own, group=group)
    if call.kind in ("all_reduce", "all_reduce_async"):
        work = dist.all_reduce(own, group=group, async_op=call.kind.endswith("async"))
        if work is not None:
            work.wait()
        return _collect([own])
    if call.kind == "reduce":
        dist.reduce(own, 0, group=group)
        return _collect([own])
    if call.kind == "broadcast":
        dist.broadcast(own, 0, group=group)
        return _collect([own])
    if call.kind == "barrier":
        dist.barrier(group=group)
        return []
    if call.kind == "reduce_scatter":
        output = torch.zeros(size, dtype=torch.float64)
        dist.reduce_scatter(output, [own] * world_size, group=group)
        return _collect([output])
    if call.kind == "scatter":
        output = torch.zeros(size, dtype=torch.float64)
        dist.scatter(output, [own + other for other in range(world_size)] if rank == 0 else None, 0, group=group)
        return _collect([output])
    outputs = [torch.zeros(size, dtype=torch.float64) for _ in range(world_size)]
    if call.kind == "gather":
        dist.gather(own, outputs if rank == 0 else None, 0, group=group)
        return _collect(outputs) if rank == 0 else []
    if call.kind == "all_to_all_single":
        long = torch.zeros(size * world_size, dtype=torch.float64)
        dist.all_to_all_single(long, own.repeat(world_size), group=group)
        return _collect([*long.view(world_size, size)])
    if call.kind == "all_gather_single":
        long = torch.zeros(size * world_size, dtype=torch.float64)
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(long, own, group=group)
        return _collect([*long.view(world_size, size)])
    dist.all_gather(outputs, own, group=group)
    return _collect(outputs)


def play(script: list[Call], group: dist.ProcessGroup, *, is_interrupted: bool = True) -> list[dict[str, Any]]:
    """Make a script's calls, catching whatever they raise.

    Returns:
        For each call what came of it, and whether other ranks can have noticed it.
    """
    rank, found = dist.get_rank(), []
    for number, call in enumerate(script):
        is_mine = call.rank == rank
        if call.fault == "left out" and is_mine:
            found.append({"is_counted": False})
            continue
        before = _progress(group)
        value, error = None, None
        try:
            if call.fault == "interrupt" and is_mine and is_interrupted:
                sys.settrace(_interrupt_after(call.line))
            is_wrong = call.fault == "wrong everywhere" or (call.fault == "wrong" and is_mine)
            value = make(call, number, group, is_wrong=is_wrong)
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
        finally:
            sys.settrace(None)
        found.append({"is_counted": _progress(group) != before, "value": value, "error": error})
    return found


def _progress(group: dist.ProcessGroup) -> tuple[int, bool]:
    """Return what a call changes that other ranks can notice; nothing is known of gloo."""
    memory = getattr(group, "_memory", None)
    return getattr(memory, "window", 0), bool(getattr(memory, "failure", ""))


def _interrupt_after(lines: int) -> Any:
    left = [lines]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in INTERRUPTED_FILES:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise Interruption("in the middle")
        return trace

    return trace


def wrong_values(script: list[Call], answers: list[list[dict[str, Any]]]) -> list[str]:
    """Return which values do not come from calls that belong together.

    Two calls belong together if they are the same of the script, or, as gloo has it, if both ranks had made as many
    before: one that was left out or refused on one rank alone is made up for by its next one.
    """
    counted = [[number for number, one in enumerate(answer) if one["is_counted"]] for answer in answers]
    wrong = []
    for rank, answer in enumerate(answers):
        for number, one in enumerate(answer):
            if one.get("value") is None:
                continue
            same = expected(script[number], [number] * len(answers), rank)
            ordinal = counted[rank].index(number) if number in counted[rank] else -1
            together = [theirs[ordinal] if 0 <= ordinal < len(theirs) else number for theirs in counted]
            if one["value"] not in (same, expected(script[number], together, rank)):
                wrong.append(f"rank {rank}, call {number} ({script[number]}): {one['value']} instead of {same}")
    return wrong
