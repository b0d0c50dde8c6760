"""Table of the all-reduce algorithms. Importing this module does not import torch."""

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from dure.errors import SpecInvalid


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmInfo:
    """Row of the table: what a user needs to know to choose an algorithm, and what the tests verify."""

    name: str
    implementation: str
    """Module with the two functions over a wire, or `module:Class` of an `AllReduce`; imported on first use."""
    summary: str
    phases: tuple[str, ...]
    """Names of the phases of its messages, in order."""
    sent_busiest: str
    """Formula of the elements that the busiest rank sends; P ranks, N elements, H hosts, M ranks per host."""
    sent_total: str
    """Elements that all ranks send together."""
    steps: str
    """Number of messages that must wait for each other."""
    right_when: str
    is_counted: bool = True
    """True if `sent_bytes` counts messages; otherwise it adds up the formula."""
    uses_hosts: bool = False
    """True if the algorithm depends on which ranks share a host."""

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return asdict(self)


ALGORITHMS: dict[str, AlgorithmInfo] = {
    info.name: info
    for info in (
        AlgorithmInfo(
            name="naive",
            implementation="dure.comm.algorithms.naive",
            summary="every rank sends its whole vector to every other, and each adds up for itself",
            phases=("exchange",),
            sent_busiest="N (P-1)",
            sent_total="N P (P-1)",
            steps="1",
            right_when="to see what the others save; or for a few bytes, where only the number of steps counts",
        ),
        AlgorithmInfo(
            name="star",
            implementation="dure.comm.algorithms.star",
            summary="rank 0 gathers all vectors, reduces them and hands the result back",
            phases=("gather", "hand back"),
            sent_busiest="N (P-1), rank 0; the others N",
            sent_total="2 N (P-1)",
            steps="2",
            right_when="to see what a parameter server's links carry; or for a few bytes",
        ),
        AlgorithmInfo(
            name="ring",
            implementation="dure.comm.algorithms.ring",
            summary="each rank reduces one shard that travels around the ring, then the shards travel around once more",
            phases=("scatter-reduce", "all-gather"),
            sent_busiest="2 N (P-1)/P",
            sent_total="2 N (P-1)",
            steps="2 (P-1)",
            right_when="vectors are long: no rank can send less, and every link is in use all the time",
        ),
        AlgorithmInfo(
            name="halving_doubling",
            implementation="dure.comm.algorithms.halving_doubling",
            summary="pairs exchange halves of halves until each rank has one shard, and back",
            phases=("fold", "halving", "doubling", "unfold"),
            sent_busiest="2 N (Q-1)/Q, Q the largest power of two up to P; N more for P-Q ranks if P is none",
            sent_total="2 N (P-1)",
            steps="2 log2(P), and 2 more if P is no power of two",
            right_when="vectors are short or ranks are many: as few bytes as a ring in fewer steps",
        ),
        AlgorithmInfo(
            name="tree",
            implementation="dure.comm.algorithms.tree",
            summary="sums go up a binary tree to rank 0, the result comes down again",
            phases=("reduce", "broadcast"),
            sent_busiest="3 N (one with a parent and two children; from P = 5 on)",
            sent_total="2 N (P-1)",
            steps="2 log2(P)",
            right_when="ranks are very many and vectors short; no rank talks to more than three others",
        ),
        AlgorithmInfo(
            name="hierarchical",
            implementation="dure.comm.algorithms.hierarchical",
            summary="each host reduces to its leader, the leaders run a ring, and hand the result back in their hosts",
            phases=(
                "in hosts: gather",
                "between hosts: scatter-reduce",
                "between hosts: all-gather",
                "in hosts: hand back",
            ),
            sent_busiest="N (M-1) + 2 N (H-1)/H, a leader; 2 N (H-1)/H of it between hosts",
            sent_total="2 N (P-1), 2 N (H-1) of it between hosts",
            steps="2 + 2 (H-1)",
            right_when="hosts have several ranks each and the network between them is the slow part",
            uses_hosts=True,
        ),
        AlgorithmInfo(
            name="backend",
            implementation="dure.comm.algorithms.backend:BackendAllReduce",
            summary="torch's own all_reduce of the group's backend",
            phases=(),
            sent_busiest="2 N (P-1)/P (the least that is possible; not counted)",
            sent_total="2 N (P-1)",
            steps="the backend's own choice",
            right_when="on GPUs always; elsewhere where nothing of this table is measured to be faster",
            is_counted=False,
        ),
        AlgorithmInfo(
            name="shm",
            implementation="dure.comm.algorithms.shm:SharedMemoryAllReduce",
            summary="ranks of one host reduce through one shared-memory segment, each its own share, block by block",
            phases=("write", "reduce", "read"),
            sent_busiest="N, written into the segment: all but its own share, and its share's result",
            sent_total="N P, nothing of it by sockets",
            steps="a barrier per block and one more; one in all for a short vector, three where the vector lies in it",
            right_when="all ranks are on one host and reduce on its CPUs",
        ),
    )
}


def find_algorithm(name: str) -> AlgorithmInfo:
    """Return a row of the table.

    Raises:
        SpecInvalid: There is no such algorithm.
    """
    if name not in ALGORITHMS:
        raise SpecInvalid([f"there is no all-reduce algorithm {name!r}: choose one of {', '.join(ALGORITHMS)}"])
    return ALGORITHMS[name]


def sent_elements(name: str, num_elements: int, world_size: int, *, hosts: Sequence[int] | None = None) -> list[int]:
    """Return the exact number of elements that each rank sends in one all-reduce, by the algorithm's formula."""
    info = find_algorithm(name)
    formula = importlib.import_module(info.implementation.partition(":")[0]).sent_elements
    if info.uses_hosts:
        return cast(list[int], formula(num_elements, world_size, hosts))
    return cast(list[int], formula(num_elements, world_size))
