"""Checks of the arguments of calls of the backend `dure_shm`, before any other rank can notice the call.

Errors are those of torch's own groups, `RuntimeError`. A call refused here has not taken a number: the group continues
as if it had not been made.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}
_WHOLE = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_REAL = {torch.float64, torch.float32, torch.float16, torch.bfloat16, *_WHOLE}
_TRUTH = {torch.bool}
_COMPLEX = {torch.complex64, torch.complex128}
_REDUCIBLE = {
    "sum": _REAL | _COMPLEX | _TRUTH,
    "mean": _REAL | _COMPLEX,
    "max": _REAL | _TRUTH,
    "min": _REAL | _TRUTH,
    "product": _REAL | _TRUTH,
    "band": _WHOLE | _TRUTH,
    "bor": _WHOLE | _TRUTH,
    "bxor": _WHOLE | _TRUTH,
}


def reduction(call: str, op: Any, *lists: Sequence[Tensor]) -> str:
    """Return our name of a reduction; refuse one that is not supported for these dtypes."""
    check_movable(call, *lists)
    name = _OPS.get(op.op, "")
    known = _REDUCIBLE.get(name, set())
    for tensors in lists:
        for tensor in tensors:
            if tensor.dtype not in known:
                raise RuntimeError(f"{call} cannot reduce tensors of {_name(tensor.dtype)} by {_named(op)} here")
    return name


def check_sparse_sum(call: str, op: Any) -> None:
    """Refuse reductions of sparse tensors that gloo does not support."""
    if op.op != dist.ReduceOp.SUM:
        raise RuntimeError(f"{call} reduces sparse tensors by SUM only, not by {_named(op)}: pass tensor.to_dense()")


def check_movable(call: str, *lists: Sequence[Tensor]) -> None:
    """Refuse tensors that are not strided or not in host memory."""
    for tensors in lists:
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"a tensor is on {tensor.device}, but dure_shm moves CPU tensors only: make a group with "
                    "another backend for them"
                )
            if tensor.layout != torch.strided:
                raise RuntimeError(f"{call} got a tensor of layout {_name(tensor.layout)}: pass tensor.to_dense()")


def check_root(call: str, root: int, world_size: int) -> None:
    """Refuse a source or destination that is not a rank of the group."""
    if not 0 <= root < world_size:
        raise RuntimeError(f"{call} names rank {root} of a group of {world_size}: the ranks are 0 to {world_size - 1}")


def check_pairs(call: str, outputs: Sequence[object], inputs: Sequence[object]) -> None:
    """Refuse several tensors at once unless there is an output for each input."""
    if len(outputs) != len(inputs):
        raise RuntimeError(f"{call} has {len(outputs)} outputs for {len(inputs)} inputs: give one for each")


def check_one(call: str, what: str, tensors: Sequence[Tensor]) -> None:
    """Refuse several tensors where only one is allowed."""
    if len(tensors) != 1:
        raise RuntimeError(f"{call} got {len(tensors)} {what} tensors: give one")


def check_list(call: str, what: str, tensors: Sequence[Tensor], like: Tensor | None, world_size: int) -> None:
    """Refuse a list without one tensor for every rank, or with sizes or dtypes that differ from `like` if given."""
    if len(tensors) != world_size:
        raise RuntimeError(
            f"{call} got a list of {len(tensors)} {what} tensors in a group of {world_size} ranks: give one for each "
            "rank"
        )
    if like is None:
        check_dtypes(call, tensors)
    else:
        check_alike(call, tensors, like)


def check_dtypes(call: str, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors of several dtypes."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        names = ", ".join(sorted({_name(tensor.dtype) for tensor in tensors}))
        raise RuntimeError(f"{call} got tensors of several dtypes ({names}): give tensors of one")


def check_alike(call: str, tensors: Sequence[Tensor], like: Tensor, *, times: int = 1) -> None:
    """Refuse tensors with a dtype other than `like`, or without `times` as many elements."""
    wanted = like.numel() * times
    for tensor in tensors:
        if tensor.dtype != like.dtype or tensor.numel() != wanted:
            raise RuntimeError(
                f"{call} got a tensor of {tensor.numel()} elements of {_name(tensor.dtype)} where one of {wanted} "
                f"elements of {_name(like.dtype)} fits the others: give tensors of one dtype and of the right sizes"
            )


def check_writable(call: str, tensors: Sequence[Tensor]) -> None:
    """Refuse outputs whose elements overlap in memory, or that share memory with each other."""
    for tensor in tensors:
        if tensor.layout == torch.strided and not tensor.is_contiguous() and _repeats(tensor):
            raise RuntimeError(
                f"{call} would overwrite a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}, which "
                "has several elements in one place (as expand() makes them): pass a clone()"
            )
    if len(tensors) > 1:
        spans = sorted(span_of(t) for t in tensors if t.layout == torch.strided and t.numel() and t.is_contiguous())
        if any(end > start for (_, end), (start, _) in pairwise(spans)):
            raise RuntimeError(f"two of the tensors that {call} would overwrite share memory: give each its own")


def check_contiguous(call: str, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that gloo would read or fill in another element order."""
    for tensor in tensors:
        if tensor.layout == torch.strided and not tensor.is_contiguous():
            raise RuntimeError(
                f"{call} got a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}, but takes "
                "contiguous ones only: pass tensor.contiguous(), and copy what it receives back"
            )


def check_dense(call: str, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors with gaps in memory, which gloo would take for elements."""
    for tensor in tensors:
        if tensor.layout == torch.strided and not is_dense(tensor):
            raise RuntimeError(
                f"{call} got a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}, which has gaps in "
                "memory or elements in one place: pass tensor.contiguous(), and copy the result back"
            )


def check_splits(output: Tensor, input: Tensor, outputs: Sequence[int], inputs: Sequence[int], world_size: int) -> None:
    """Refuse tensors that `all_to_all_single` cannot split into a part for every rank."""
    call = "all_to_all_single"
    for what, tensor, splits in (("output", output, outputs), ("input", input, inputs)):
        if tensor.dim() == 0:
            raise RuntimeError(f"{call} got an {what} of one number: it needs a dimension to be cut along")
        rows = tensor.size(0)
        if not splits:
            if rows % world_size:
                raise RuntimeError(
                    f"{call} got an {what} of {rows} rows for {world_size} ranks and no {what} splits: give as many "
                    "rows to each rank, or say how many each gets"
                )
        elif len(splits) != world_size or min(splits) < 0 or sum(splits) != rows:
            raise RuntimeError(
                f"{call} got the {what} splits {list(splits)} for an {what} of {rows} rows in a group of {world_size} "
                f"ranks: give {world_size} numbers from 0 that add up to {rows}"
            )
    if not outputs and not inputs:
        check_alike(call, [output], input)
    elif output.dtype != input.dtype or math.prod(output.shape[1:]) != math.prod(input.shape[1:]):
        raise RuntimeError(
            f"{call} got an output with rows of {tuple(output.shape[1:])} {_name(output.dtype)} and an input with rows "
            f"of {tuple(input.shape[1:])} {_name(input.dtype)}: give both the same rows"
        )


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a contiguous tensor's first byte and of the byte after its last."""
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills its range of memory, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return True
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _repeats(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _name(kind: object) -> str:
    return str(kind).removeprefix("torch.")


def _named(op: Any) -> str:
    return str(op.op).rpartition(".")[2]
