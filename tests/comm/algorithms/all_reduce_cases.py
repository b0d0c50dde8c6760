"""Cases of all-reduce that the tests run on every rank, and checks of the answers."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dure.comm.algorithms.base import REDUCE_OPS
from dure.comm.algorithms.opening import open_all_reduce
from dure.comm.algorithms.table import ALGORITHMS, sent_elements

OVER_WIRE = [name for name, info in ALGORITHMS.items() if ":" not in info.implementation]
OVER_SOCKETS = [*OVER_WIRE, "backend"]
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)
LARGE = 1_000_007


class Case(NamedTuple):
    """One all-reduce."""

    name: str
    num_elements: int
    dtype: torch.dtype
    op: str


class Answer(NamedTuple):
    """Answer of one rank to one all-reduce."""

    digest: str
    """Digest of the result's bits."""
    sent_bytes: int
    error: float
    """Largest difference from the result of `dist.all_reduce` on the same vectors."""


def small_sizes(world_size: int) -> list[int]:
    """Return the sizes at which some ranks have no share of the vector, or one element more than others."""
    return sorted({0, 1, world_size - 1, world_size + 1})


def small_cases(world_size: int) -> list[Case]:
    """Return the full product over the small sizes."""
    return [Case(*values) for values in product(OVER_SOCKETS, small_sizes(world_size), DTYPES, REDUCE_OPS)]


def large_cases(world_size: int) -> Iterator[Case]:
    """Yield two dtypes and ops per algorithm: over the world sizes 1 to 8 every algorithm meets all of them."""
    combinations = list(product(DTYPES, REDUCE_OPS))
    for number, name in enumerate(OVER_SOCKETS):
        for turn in (2 * world_size + number, 2 * world_size + number + 1):
            yield Case(name, LARGE, *combinations[turn % len(combinations)])


def all_large_cases() -> list[Case]:
    """Return the full product over the large size."""
    return [Case(*values) for values in product(OVER_SOCKETS, [LARGE], DTYPES, REDUCE_OPS)]


def hosts_of(world_size: int) -> list[int]:
    """Return uneven hosts, whose ranks are not neighbours: 0 1 0 0 1 0 0 1."""
    return [int(rank % 3 == 1) for rank in range(world_size)]


def vector_of(case: Case, rank: int) -> Tensor:
    """Return a rank's vector: in [-1, 1), or whole numbers in [-1000, 1000)."""
    draw = torch.Generator().manual_seed(1000 * case.num_elements % 2**31 + rank)
    if case.dtype == torch.int64:
        return torch.randint(-1000, 1000, (case.num_elements,), generator=draw)
    return (2 * torch.rand(case.num_elements, generator=draw, dtype=torch.float64) - 1).to(case.dtype)


def run_cases(cases: Sequence[Case], rank: int, world_size: int) -> dict[Case, Answer]:
    """Run every case on this rank of the default group."""
    algorithms = {name: open_all_reduce(name, hosts=hosts_of(world_size)) for name in OVER_SOCKETS}
    alike: dict[Case, list[str]] = defaultdict(list)
    for case in cases:
        alike[case._replace(name="")].append(case.name)
    answers = {}
    for kind, names in alike.items():
        mine = vector_of(kind, rank)
        reference = _reference(kind, mine.clone(), world_size)
        for name in names:
            algorithm, vector = algorithms[name], mine.clone()
            before = algorithm.sent_bytes
            algorithm.all_reduce(vector, kind.op)
            answer = Answer(digest(vector), algorithm.sent_bytes - before, _difference(vector, reference))
            answers[kind._replace(name=name)] = answer
    return answers


def _reference(case: Case, vector: Tensor, world_size: int) -> Tensor:
    dist.all_reduce(vector, dist.ReduceOp.MAX if case.op == "max" else dist.ReduceOp.SUM)
    if case.op == "mean":
        vector = vector.div(world_size, rounding_mode="trunc" if case.dtype == torch.int64 else None)
    return vector


def _difference(one: Tensor, other: Tensor) -> float:
    return 0.0 if torch.equal(one, other) else float((one - other).abs().max())


def digest(vector: Tensor) -> str:
    """Return a digest of the bits."""
    return hashlib.sha1(vector.view(torch.uint8).numpy(), usedforsecurity=False).hexdigest()


def tolerance(case: Case, world_size: int) -> float:
    """Return how far two orders of adding may be apart.

    Sums of P values up to 1 are at most P, and each of the P-1 additions of either side rounds by half an epsilon of
    that: P (P-1) eps between the two. A mean is P times smaller, and its division rounds once more on each side.
    Maxima and whole numbers are exact.
    """
    if case.op == "max" or case.dtype == torch.int64:
        return 0.0
    epsilon = torch.finfo(case.dtype).eps
    return world_size * (world_size - 1) * epsilon if case.op == "sum" else world_size * epsilon


def faults(answers: Sequence[dict[Case, Answer]]) -> list[str]:
    """Return what is wrong with the answers of all ranks, in words."""
    world_size = len(answers)
    found = []
    for case in answers[0]:
        by_rank = [answer[case] for answer in answers]
        counted = [answer.sent_bytes for answer in by_rank]
        formula = sent_elements(case.name, case.num_elements, world_size, hosts=hosts_of(world_size))
        expected = [count * case.dtype.itemsize for count in formula]
        if counted != expected:
            found.append(f"{case}: sent {counted}, but the formula says {expected}")
        if len({answer.digest for answer in by_rank}) != 1:
            found.append(f"{case}: the ranks do not have the same bits")
        worst = max(answer.error for answer in by_rank)
        if not worst <= tolerance(case, world_size):
            found.append(f"{case}: {worst} away from torch's, allowed is {tolerance(case, world_size)}")
    return found
