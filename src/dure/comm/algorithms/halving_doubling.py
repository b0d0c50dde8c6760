"""Recursive halving and doubling (Thakur, Rabenseifner and Gropp 2005, section 4.5): a ring's bytes in log2(P) steps.

Let Q be the largest power of two up to P. Four phases:

`fold`, only if P > Q: of the first 2 (P-Q) ranks each even one sends its vector to the odd one after it and then waits.
The remaining Q ranks participate, numbered again from 0.

`halving`, log2(Q) steps: in step s a rank and the one whose number differs in bit s work on the same part of the
vector. Each keeps one half of it, sends the other half, and adds what it receives to its own. The part is N/Q at the
end. Neighbours come first, when the halves are largest: they are the most likely to be on one host.

`doubling`, the same pairs in reverse: they exchange their finished parts, so that the part doubles each time.

`unfold`, only if P > Q: the odd ranks send the result to the even ones.
"""

from typing import NamedTuple

from torch import Tensor

from dure.comm.algorithms.base import ReduceOp
from dure.comm.algorithms.segments import finish_mean, relay, swap
from dure.comm.algorithms.wire import PointToPoint


class Halving(NamedTuple):
    """One step of a participating rank."""

    peer: int
    """Number of its partner among the participants."""
    kept: slice
    """Elements that it keeps and continues with."""
    sent: slice
    """Elements that it leaves to its partner; before this step they were one part with the kept ones."""


def all_reduce(wire: PointToPoint, vector: Tensor, op: ReduceOp) -> None:
    """Reduce a vector over all ranks, in place.

    Communication: 2 N (Q-1)/Q elements from each participant, and N from each rank that folds or unfolds; blocking.
    """
    partner = fold_partner(wire.rank, wire.world_size)
    folds = [] if partner is None else [partner]
    is_participant = participant(wire.rank, wire.world_size) is not None
    wire.mark("fold")
    relay(wire, vector, sources=folds * is_participant, targets=folds * (not is_participant), op=op)
    if is_participant:
        _all_reduce_power_of_two(wire, vector, op)
    wire.mark("unfold")
    relay(wire, vector, sources=folds * (not is_participant), targets=folds * is_participant, op=None)


def _all_reduce_power_of_two(wire: PointToPoint, vector: Tensor, op: ReduceOp) -> None:
    number = participant(wire.rank, wire.world_size)
    assert number is not None
    steps = halvings(vector.numel(), number, largest_power_of_two(wire.world_size))
    part = vector
    for index, step in enumerate(steps):
        wire.mark("halving", index)
        part = vector[step.kept]
        swap(wire, vector[step.sent], part, rank_of(step.peer, wire.world_size), op)
    finish_mean(part, op, wire.world_size)
    for index, step in enumerate(reversed(steps)):
        wire.mark("doubling", index)
        swap(wire, vector[step.kept], vector[step.sent], rank_of(step.peer, wire.world_size), op=None)


def halvings(num_elements: int, number: int, num_participants: int) -> list[Halving]:
    """Return the steps of one participant."""
    steps = []
    start, end = 0, num_elements
    for bit in range(num_participants.bit_length() - 1):
        middle = (start + end + 1) // 2
        lower, upper = slice(start, middle), slice(middle, end)
        is_upper = number >> bit & 1
        kept, sent = (upper, lower) if is_upper else (lower, upper)
        steps.append(Halving(number ^ 1 << bit, kept, sent))
        start, end = kept.start, kept.stop
    return steps


def largest_power_of_two(world_size: int) -> int:
    """Return the number of ranks that participate in halving and doubling."""
    return 1 << world_size.bit_length() - 1


def fold_partner(rank: int, world_size: int) -> int | None:
    """Return the rank with which a rank folds; None if it does not fold."""
    num_folded = world_size - largest_power_of_two(world_size)
    return rank ^ 1 if rank < 2 * num_folded else None


def participant(rank: int, world_size: int) -> int | None:
    """Return a rank's number among the participants; None if it waits."""
    num_folded = world_size - largest_power_of_two(world_size)
    if rank >= 2 * num_folded:
        return rank - num_folded
    return rank // 2 if rank % 2 else None


def rank_of(number: int, world_size: int) -> int:
    """Return the rank of a participant."""
    num_folded = world_size - largest_power_of_two(world_size)
    return 2 * number + 1 if number < num_folded else number + num_folded


def sent_elements(num_elements: int, world_size: int) -> list[int]:
    """Return the elements that each rank sends: its fold or unfold, the halves it leaves, and the parts it returns."""
    counts = []
    for rank in range(world_size):
        folded = 0 if fold_partner(rank, world_size) is None else num_elements
        number = participant(rank, world_size)
        steps = [] if number is None else halvings(num_elements, number, largest_power_of_two(world_size))
        parts = [part.stop - part.start for step in steps for part in (step.sent, step.kept)]
        counts.append(folded + sum(parts))
    return counts
