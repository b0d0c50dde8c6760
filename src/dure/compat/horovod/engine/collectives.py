"""Execution of one response: tensors are packed, sent and unpacked."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dure.compat.horovod.engine import adasum
from dure.compat.horovod.engine.entries import Entry
from dure.compat.horovod.engine.requests import (
    ADASUM,
    AVERAGE,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    Request,
    Response,
    num_elements,
)
from dure.torchcompat.own_groups import OwnGroup

_OPS = {AVERAGE: "SUM", SUM: "SUM", MIN: "MIN", MAX: "MAX", PRODUCT: "PRODUCT"}
_HALVES = (torch.float16, torch.bfloat16)
_MAX_PADDING = 1.5
"""Ratio of sent to needed bytes above which unequal parts are broadcast one by one."""


def execute(
    response: Response,
    entries: Sequence[Entry | None],
    group: OwnGroup | None,
    members: Sequence[int],
    *,
    moves_to_host: bool,
) -> None:
    """Fill the entries' results.

    Args:
        response: Collective, the same on all ranks of the group.
        entries: This rank's part for each name; None where it has joined.
        group: Ranks of the process set; None for this rank alone.
        members: Their global ranks.
        moves_to_host: Whether the group sends from host memory only.
    """
    _EXECUTE[response.kind](response, entries, _Ranks(group, members, moves_to_host=moves_to_host))


class _Ranks:
    """Group, with host memory as a detour for devices that it does not reach."""

    def __init__(self, group: OwnGroup | None, members: Sequence[int], *, moves_to_host: bool) -> None:
        self.group = group
        self.members = members
        self.moves_to_host = moves_to_host
        self.rank = 0 if group is None else group.rank
        self.size = 1 if group is None else group.size

    def taken(self, tensor: Tensor) -> Tensor:
        """Return a tensor where the group can send it from."""
        return tensor.cpu() if self.moves_to_host and tensor.device.type != "cpu" else tensor

    def reaches(self, tensor: Tensor) -> bool:
        """Return whether the group can read and write a tensor's own memory."""
        is_there = tensor.device.type == "cpu" or not self.moves_to_host
        return is_there and is_plain(tensor)

    def all_gather_bytes(self, mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return the bytes of every rank, whose numbers are known."""
        if self.group is None:
            return [mine]
        longest, total = max(sizes), sum(sizes)
        if total == 0:
            return [mine.new_empty(0) for _ in sizes]
        if longest * self.size > _MAX_PADDING * total:
            parts = [mine if rank == self.rank else mine.new_empty(size) for rank, size in enumerate(sizes)]
            for rank, part in enumerate(parts):
                if part.numel():
                    self.group.broadcast(part, rank)
            return parts
        padded = mine
        if mine.numel() < longest:
            padded = mine.new_zeros(longest)
            padded[: mine.numel()] = mine
        gathered = mine.new_empty(longest * self.size)
        self.group.all_gather(gathered, padded)
        return [gathered[longest * rank :][:size] for rank, size in enumerate(sizes)]


def is_plain(tensor: Tensor) -> bool:
    """Return whether memory holds the values themselves: a conjugate or negative view holds their opposites."""
    return not (tensor.is_conj() or tensor.is_neg())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, without a copy unless it is a conjugate or negative view."""
    plain = tensor.resolve_conj().resolve_neg()
    # a dimension of one element may have any stride, which `view` with another type refuses
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return bytes as a tensor; they are copied where they are not aligned."""
    if data.storage_offset() % dtype.itemsize or data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(list(shape))


# --- reductions


def scaled(tensor: Tensor, factor: float, divisor: int = 1) -> Tensor:
    """Return `tensor * factor / divisor` in the tensor's own type, in place if that is possible.

    Integers are scaled in float64 and truncated, 16-bit floats in float32, as Horovod does. A mean of integers alone is
    rounded down, which is what Horovod's own tests expect of today's `floor_divide`.
    """
    if factor == 1.0 and divisor == 1:
        return tensor
    if not (tensor.is_floating_point() or tensor.is_complex()):
        if factor == 1.0:
            return tensor.floor_divide(divisor)
        return (tensor.to(torch.float64) * factor / divisor).to(tensor.dtype)
    wide = tensor.float() if tensor.dtype in _HALVES else tensor
    # a division is more exact than a product with the reciprocal
    wide = wide.div_(divisor) if factor == 1.0 else wide.mul_(factor / divisor)
    return wide.to(tensor.dtype)


def _allreduce(response: Response, entries: Sequence[Entry | None], ranks: _Ranks) -> None:
    """Reduce tensors of each type as one."""
    models = dict(zip(response.names, response.models, strict=False))
    by_dtype: dict[str, list[tuple[Entry | None, int, tuple[int, ...]]]] = {}
    request: Request | None = None
    for name, entry in zip(response.names, entries, strict=True):
        request = models[name] if entry is None else entry.request
        for index, (dtype, shape) in enumerate(zip(request.dtypes, request.shapes, strict=True)):
            by_dtype.setdefault(dtype, []).append((entry, index, shape))
        if entry is not None:
            entry.results = [*entry.inputs]
    assert request is not None
    for dtype, parts in by_dtype.items():
        _reduce_parts(getattr(torch, dtype), parts, request, ranks)


def _reduce_parts(
    dtype: torch.dtype, parts: list[tuple[Entry | None, int, tuple[int, ...]]], request: Request, ranks: _Ranks
) -> None:
    sizes = [num_elements(shape) for _, _, shape in parts]
    device = next((entry.inputs[index].device for entry, index, _ in parts if entry is not None), torch.device("cpu"))
    sources = [
        _neutral(size, dtype, device, request.op) if entry is None else entry.inputs[index].reshape(-1)
        for (entry, index, _), size in zip(parts, sizes, strict=True)
    ]
    first = parts[0][0]
    if len(parts) == 1 and first is not None and first.is_in_place and ranks.reaches(sources[0]):
        flat = sources[0]
    else:
        flat = ranks.taken(torch.cat(sources))
    flat = scaled(flat, request.prescale)
    if request.op == ADASUM:
        if ranks.group is not None:
            flat = adasum.reduce(flat, sizes, ranks.group)
    elif ranks.group is not None and flat.numel():
        _reduce(flat, _OPS[request.op], ranks.group)
    flat = scaled(flat, request.postscale, ranks.size if request.op == AVERAGE else 1)
    for (entry, index, shape), part in zip(parts, flat.split(sizes), strict=True):
        if entry is None:
            continue
        if entry.is_in_place:
            if part.data_ptr() != entry.inputs[index].data_ptr():
                entry.inputs[index].copy_(part.view(shape))
        else:
            result = part.view(shape).to(entry.inputs[index].device)
            entry.results[index] = result if len(parts) == 1 else result.clone()


def _neutral(size: int, dtype: torch.dtype, device: torch.device, op: int) -> Tensor:
    """Return what a rank that has joined contributes: values that change no other rank's."""
    if op not in (MIN, MAX, PRODUCT):
        return torch.zeros(size, dtype=dtype, device=device)
    if dtype.is_floating_point:
        ends: tuple[float, float] = float("inf"), -float("inf")
    else:
        ends = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    value = {MIN: ends[0], MAX: ends[1], PRODUCT: 1}[op]
    return torch.full((size,), value, dtype=dtype, device=device)


def _reduce(flat: Tensor, op: str, group: OwnGroup) -> None:
    if flat.dtype == torch.int16:  # unknown to gloo and NCCL
        wide = flat.to(torch.int32)
        group.all_reduce(wide, op)
        flat.copy_(wide)
    else:
        group.all_reduce(flat, op)


def rows_of(rank: int, num_rows: int, num_ranks: int) -> tuple[int, int]:
    """Return the first row of a rank's part of a reducescatter, and the end; the first ranks get one row more."""
    few, more = divmod(num_rows, num_ranks)
    begin = rank * few + min(rank, more)
    return begin, begin + few + (rank < more)


def _reducescatter(response: Response, entries: Sequence[Entry | None], ranks: _Ranks) -> None:
    """Exchange the rows, and reduce own ones in the order of ranks."""
    for entry in entries:
        if entry is None:
            continue
        entry.results = [_reduce_rows(tensor, entry.request, ranks) for tensor in entry.inputs]


def _reduce_rows(tensor: Tensor, request: Request, ranks: _Ranks) -> Tensor:
    source = scaled(ranks.taken(tensor).clone() if request.prescale != 1.0 else ranks.taken(tensor), request.prescale)
    rows = [rows_of(rank, tensor.shape[0], ranks.size) for rank in range(ranks.size)]
    begin, end = rows[ranks.rank]
    shape = (end - begin, *tensor.shape[1:])
    if ranks.group is None:
        result = source.clone()
    else:
        row = num_elements(tuple(tensor.shape[1:])) * tensor.element_size()
        own = (end - begin) * row
        received = torch.empty(own * ranks.size, dtype=torch.uint8, device=source.device)
        sent = [(last - first) * row for first, last in rows]
        ranks.group.all_to_all(received, as_bytes(source), [own] * ranks.size, sent)
        parts = received.view(source.dtype).view(ranks.size, *shape)
        if request.op in (MIN, MAX):
            result = parts.amin(0) if request.op == MIN else parts.amax(0)
        elif request.op == PRODUCT:
            result = parts.prod(0, dtype=source.dtype)
        else:
            result = parts.sum(0, dtype=source.dtype)
    result = scaled(result, request.postscale, ranks.size if request.op == AVERAGE else 1)
    return result.to(tensor.device)


# --- movements


def _allgather(response: Response, entries: Sequence[Entry | None], ranks: _Ranks) -> None:
    """Gather the bytes of all tensors as one."""
    tensors = [tensor for entry in entries if entry is not None for tensor in entry.inputs]
    rows = [num_elements(tuple(tensor.shape[1:])) * tensor.element_size() for tensor in tensors]
    firsts = response.sizes
    if not tensors:  # empty groups
        return
    parts = [as_bytes(ranks.taken(tensor)) for tensor in tensors]
    mine = parts[0] if len(parts) == 1 else torch.cat(parts)
    totals = [sum(first * row for first, row in zip(of_rank, rows, strict=True)) for of_rank in firsts]
    gathered = ranks.all_gather_bytes(mine, totals)
    split = [
        data.split([first * row for first, row in zip(of_rank, rows, strict=True)])
        for data, of_rank in zip(gathered, firsts, strict=True)
    ]
    outputs = []
    for index, tensor in enumerate(tensors):
        data = torch.cat([of_rank[index] for of_rank in split])
        shape = (sum(of_rank[index] for of_rank in firsts), *tensor.shape[1:])
        outputs.append(from_bytes(data, tensor.dtype, shape).to(tensor.device))
    position = 0
    for entry in entries:
        if entry is not None:
            entry.results = outputs[position : position + len(entry.inputs)]
            position += len(entry.inputs)


def _broadcast(response: Response, entries: Sequence[Entry | None], ranks: _Ranks) -> None:
    """Send the bytes of all tensors as one."""
    own = [entry for entry in entries if entry is not None]
    source = ranks.members.index(own[0].request.root)
    pairs = [(entry, index, tensor) for entry in own for index, tensor in enumerate(entry.inputs)]
    for entry in own:
        entry.results = [*entry.inputs]
    if ranks.group is not None:
        parts = [as_bytes(ranks.taken(tensor)) for _, _, tensor in pairs]
        is_direct = len(pairs) == 1 and pairs[0][0].is_in_place and ranks.reaches(pairs[0][2])
        data = parts[0] if is_direct else torch.cat(parts)
        if data.numel():
            ranks.group.broadcast(data, source)
        if is_direct:
            return
        for (entry, index, tensor), part in zip(pairs, data.split([part.numel() for part in parts]), strict=True):
            if not entry.is_in_place:
                entry.results[index] = from_bytes(part.clone(), tensor.dtype, tensor.shape).to(tensor.device)
            elif ranks.rank != source:
                tensor.copy_(from_bytes(part, tensor.dtype, tensor.shape))
    else:
        for entry, index, tensor in pairs:
            if not entry.is_in_place:
                entry.results[index] = tensor.clone()


def _alltoall(response: Response, entries: Sequence[Entry | None], ranks: _Ranks) -> None:
    """Exchange rows; each rank knows from the response how many it receives."""
    for entry in entries:
        if entry is None:
            continue
        tensor, sent = entry.inputs[0], response.sizes[ranks.rank]
        received = tuple(of_rank[ranks.rank] for of_rank in response.sizes)
        row = num_elements(tuple(tensor.shape[1:])) * tensor.element_size()
        data = as_bytes(ranks.taken(tensor))[: sum(sent) * row]
        output = torch.empty(sum(received) * row, dtype=torch.uint8, device=data.device)
        if ranks.group is None:
            output.copy_(data)
        elif any(any(of_rank) for of_rank in response.sizes):
            ranks.group.all_to_all(output, data, [size * row for size in received], [size * row for size in sent])
        shape = (sum(received), *tensor.shape[1:])
        entry.results = [from_bytes(output, tensor.dtype, shape).to(tensor.device)]
        entry.sizes = received


def _barrier(response: Response, entries: Sequence[Entry | None], ranks: _Ranks) -> None:
    """Do nothing: the response itself says that all ranks have arrived."""


_EXECUTE: dict[str, Callable[..., Any]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "barrier": _barrier,
}
