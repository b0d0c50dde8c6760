"""Collectives of arbitrary tensors: several at once, non-contiguous ones, or ones that share memory.

`collectives` and `algorithms.shm` handle contiguous memory. The tensors' `data` is used throughout, because gloo's
writes do not count as changes for autograd either.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dure.comm.algorithms import shm
from dure.comm.dure_shm import collectives as shm_collectives
from dure.comm.dure_shm.arguments import span_of
from dure.comm.shared_memory.call_number import call_number
from dure.comm.shared_memory.memory import SharedMemory


def all_reduce(memory: SharedMemory, tensors: Sequence[Tensor], op: str) -> None:
    """Reduce tensors over all ranks, in place; several of one dtype at once."""
    if len(tensors) == 1:
        data = tensors[0].data
        dense = _dense(data)
        shm.all_reduce(memory, dense.view(-1), op)
        if dense is not data:
            data.copy_(dense)
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        members = [tensor.data for tensor in tensors if tensor.dtype == dtype]
        dense = torch.cat([member.reshape(-1) for member in members])
        shm.all_reduce(memory, dense, op)
        for member, part in zip(members, dense.split([member.numel() for member in members]), strict=True):
            member.copy_(part.view_as(member))


def reduce(memory: SharedMemory, tensors: Sequence[Tensor], op: str, root: int) -> None:
    """Reduce tensors over all ranks, in place on one rank; those of the others stay unchanged."""
    for tensor in tensors:
        data = tensor.data
        dense = _dense(data)
        if dense is data and memory.rank != root:
            dense = data.clone()
        shm.all_reduce(memory, dense.view(-1), op, _reduction("reduce", dense, op, root))
        if dense is not data and memory.rank == root:
            data.copy_(dense)


def broadcast(memory: SharedMemory, tensors: Sequence[Tensor], root: int) -> None:
    """Overwrite tensors with those of one rank, one after another."""
    for tensor in tensors:
        data = tensor.data
        dense = _dense(data)
        shm_collectives.broadcast(memory, dense, root)
        if dense is not data and memory.rank != root:
            data.copy_(dense)


def all_gather(memory: SharedMemory, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
    """Copy every rank's tensors to all ranks, into one output per rank for each."""
    for gathered, own in zip(outputs, inputs, strict=True):
        with _targets(gathered) as targets:
            shm_collectives.all_gather(memory, _apart(_dense(own.data), targets), targets)


def all_gather_into(memory: SharedMemory, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Copy every rank's tensors into one long tensor each."""
    with _targets(outputs) as targets:
        all_gather(memory, [_cut(target, memory.world_size) for target in targets], inputs)


def gather(memory: SharedMemory, gathered: Sequence[Tensor], own: Tensor, root: int) -> None:
    """Copy every rank's tensor to rank `root`, the only one with outputs."""
    with _targets(gathered) as targets:
        shm_collectives.gather(memory, _apart(_dense(own.data), targets), targets, root)


def scatter(memory: SharedMemory, received: Tensor, shares: Sequence[Tensor], root: int) -> None:
    """Copy one tensor of rank `root`, the only one with inputs, to each rank."""
    with _targets([received]) as (target,):
        sources = [_dense(share.data) for share in shares]
        if any(_overlap(source, target) for rank, source in enumerate(sources) if rank != root):
            sources = [source.clone() for source in sources]
        shm_collectives.scatter(memory, sources, target, root)


def all_to_all(memory: SharedMemory, received: Sequence[Tensor], shares: Sequence[Tensor]) -> None:
    """Copy a tensor from every rank to every rank."""
    with _targets(received) as targets:
        sources = [_dense(share.data) for share in shares]
        if any(_overlap(source, target) for source in sources for target in targets):
            sources = [source.clone() for source in sources]
        shm_collectives.all_to_all(memory, sources, targets)


def all_to_all_of_rows(
    memory: SharedMemory, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
) -> None:
    """Copy rows of one tensor from every rank to every rank, as many as the splits say; the same number if empty."""
    with _targets([output]) as (target,):
        rows = [
            list(tensor.split(splits) if splits else tensor.chunk(memory.world_size))
            if tensor.size(0)
            else [tensor] * memory.world_size
            for tensor, splits in ((target, list(output_splits)), (_dense(input.data), list(input_splits)))
        ]
        all_to_all(memory, *rows)


def reduce_scatter(
    memory: SharedMemory, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], op: str
) -> None:
    """Reduce lists of tensors over all ranks; each rank receives its own."""
    for reduced, shares in zip(outputs, inputs, strict=True):
        flat = [_dense(share.data).view(-1) for share in shares]
        with _targets([reduced]) as (target,):
            if any(share.numel() != target.numel() for share in flat):
                everything = torch.cat(flat)
                shm.all_reduce(memory, everything, op, _reduction("reduce_scatter", everything, op))
                target.view(-1).copy_(everything.split([share.numel() for share in flat])[memory.rank])
                continue
            flat = [_apart(share, [target]) for share in flat]
            shm_collectives.reduce_scatter(memory, flat, target.view(-1), op)


def reduce_scatter_from(memory: SharedMemory, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: str) -> None:
    """Reduce long tensors over all ranks; each rank receives its part of each."""
    reduce_scatter(memory, outputs, [_cut(_dense(long.data), memory.world_size) for long in inputs], op)


def _dense(data: Tensor) -> Tensor:
    """Return a tensor with its values materialised in memory, without lazy negation or conjugation, and contiguous."""
    if data.is_neg() or data.is_conj():
        data = data.resolve_conj().resolve_neg()
    return data.contiguous()


@contextmanager
def _targets(outputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield contiguous memory for outputs, either themselves or temporary tensors copied to them at the end."""
    places = [output.data for output in outputs]
    targets = [
        place
        if place.is_contiguous() and not place.is_neg() and not place.is_conj()
        else torch.empty(place.shape, dtype=place.dtype)
        for place in places
    ]
    yield targets
    for place, target in zip(places, targets, strict=True):
        if place is not target:
            place.copy_(target)


def _apart(source: Tensor, targets: Sequence[Tensor]) -> Tensor:
    """Return a copy if the call could overwrite the source too early; one that is exactly a target is read in time."""
    if any(_overlap(source, target) and span_of(source) != span_of(target) for target in targets):
        return source.clone()
    return source


def _reduction(kind: str, dense: Tensor, op: str, root: int = 0) -> int:
    return call_number(kind, dense.numel() * dense.element_size(), op=op, root=root, dtype=dense.dtype)


def _cut(long: Tensor, num_parts: int) -> list[Tensor]:
    return list(long.view(-1).tensor_split(num_parts)) if long.numel() else [long] * num_parts


def _overlap(one: Tensor, other: Tensor) -> bool:
    (start, end), (other_start, other_end) = span_of(one), span_of(other)
    return start < other_end and other_start < end
