"""Trace of an algorithm's messages, from a run on a small vector in this process."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dure.comm.algorithms.base import ReduceOp
from dure.comm.algorithms.over_wire import AllReduceOverWire
from dure.comm.algorithms.table import find_algorithm
from dure.comm.algorithms.thread_wire import ThreadWire, on_threads
from dure.comm.algorithms.wire import Message
from dure.errors import SpecInvalid


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Record of one all-reduce over all ranks."""

    name: str
    op: ReduceOp
    vectors: tuple[tuple[float, ...], ...]
    """Input vector of each rank."""
    messages: tuple[Message, ...]
    """Messages in the order of phases, steps, sources and elements; those of one step may be in flight at once."""
    sent_bytes: tuple[int, ...]
    """Bytes sent by each rank."""
    result: tuple[float, ...]
    """Resulting vector, the same on every rank."""


def trace(
    name: str, world_size: int, num_elements: int, *, op: ReduceOp = "sum", hosts: Sequence[int] | None = None
) -> Trace:
    """Run an algorithm on float32 vectors with 10 (r + 1) + i as element i of rank r, and record every message.

    Raises:
        SpecInvalid: There is no such algorithm, or its messages are not visible.
    """
    info = find_algorithm(name)
    if ":" in info.implementation:
        raise SpecInvalid(
            [f"the messages of {name!r} cannot be shown, it sends them where nobody looks: explain another one"]
        )
    log: list[Message] = []
    vectors = [10.0 * (rank + 1) + torch.arange(num_elements) for rank in range(world_size)]
    results = [vector.clone() for vector in vectors]

    def reduce(wire: ThreadWire) -> int:
        AllReduceOverWire(name, wire).all_reduce(results[wire.rank], op)
        return wire.sent_bytes

    sent_bytes = on_threads(world_size, reduce, hosts=hosts, log=log)
    order = {phase: number for number, phase in enumerate(info.phases)}
    log.sort(key=lambda m: (order[m.phase], m.step, m.source, m.destination, m.start))
    return Trace(
        name=name,
        op=op,
        vectors=tuple(tuple(vector.tolist()) for vector in vectors),
        messages=tuple(log),
        sent_bytes=tuple(sent_bytes),
        result=tuple(results[0].tolist()),
    )
