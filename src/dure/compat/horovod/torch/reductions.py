"""Reductions: allreduce, grouped, sparse and reducescatter, with their gradients."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dure.compat.horovod.common import basics
from dure.compat.horovod.common.process_sets import ProcessSet, global_process_set
from dure.compat.horovod.engine.failures import HorovodInternalError
from dure.compat.horovod.engine.requests import ADASUM, AVERAGE, PRODUCT, SUM
from dure.compat.horovod.torch.compression import Compression
from dure.compat.horovod.torch.handles import submit, synchronize
from dure.compat.horovod.torch.movements import allgather, allgather_async, grouped_allgather


def reduction(op: int | None, average: bool | None) -> int:
    """Return the reduction of the old argument `average` and the new one `op`.

    Raises:
        ValueError: Both are given.
    """
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return op
    if average is None:
        return AVERAGE
    warnings.warn("average is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3)
    return AVERAGE if average else SUM


def _check_op(op: int, process_set: ProcessSet, known: Sequence[int]) -> None:
    if op == ADASUM and ADASUM not in known:
        raise HorovodInternalError("reducescatter has no Adasum: use allreduce, and take the rows of this rank")
    if op not in known:
        raise ValueError(f"op is {op!r} but must be a reduction of hvd that this operation has")
    if op != ADASUM:
        return
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    num_ranks = basics.size()
    if num_ranks & (num_ranks - 1):
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")


def _reduce(
    tensors: Sequence[Tensor],
    results: Callable[..., Any],
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    **settings: Any,
) -> int:
    _check_op(op, settings["process_set"], range(AVERAGE, PRODUCT + 1))
    return submit(
        "allreduce", tensors, results, op=op, prescale=float(prescale_factor), postscale=float(postscale_factor),
        **settings,
    )  # fmt: skip


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce a tensor over ranks, and return a handle; the tensor is not changed.

    Args:
        tensor: Tensor of the same type and shape on all ranks.
        average: Deprecated; use `op`.
        name: Name by which ranks are matched; by default from the number of the call.
        op: Reduction; `Average` by default.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after it.
        process_set: Ranks that take part.

    Communication: one all_reduce, fused with others that wait.
    """
    op = reduction(op, average)
    return _reduce(
        [tensor], lambda entry: entry.results[0], op, prescale_factor, postscale_factor, name=name,
        process_set=process_set,
    )  # fmt: skip


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce a tensor in place; as `allreduce_async`."""
    op = reduction(op, average)
    return _reduce(
        [tensor], lambda entry: tensor, op, prescale_factor, postscale_factor, name=name, process_set=process_set,
        is_in_place=True,
    )  # fmt: skip


class _Allreduce(torch.autograd.Function):
    """Reduction of a tensor, whose gradient is reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, arguments: dict[str, Any]) -> Any:
        """Reduce the tensor."""
        ctx.arguments = arguments
        return synchronize(allreduce_async(tensor, name=name, **arguments))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Reduce the gradient."""
        return allreduce(grads[0].contiguous(), **ctx.arguments), None, None


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over ranks, and return the result; autograd goes through it.

    Args:
        tensor: Tensor of the same type and shape on all ranks.
        average: Deprecated; use `op`.
        name: Name by which ranks are matched; by default from the number of the call.
        compression: Conversion on the way.
        op: Reduction; `Average` by default.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after it.
        process_set: Ranks that take part.

    Communication: one all_reduce, blocking.
    """
    arguments = {
        "op": reduction(op, average),
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    sent, context = compression.compress(tensor)
    return compression.decompress(_Allreduce.apply(sent, name, arguments), context)  # type: ignore[no-any-return, no-untyped-call]


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over ranks in place, and return it; as `allreduce`, without autograd."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


# --- groups


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce several tensors as one operation; as `allreduce_async`."""
    op = reduction(op, average)
    return _reduce(
        [*tensors], lambda entry: tuple(entry.results), op, prescale_factor, postscale_factor, name=name,
        process_set=process_set, prefix="grouped_allreduce",
    )  # fmt: skip


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce several tensors in place as one operation; as `allreduce_async`."""
    op = reduction(op, average)
    return _reduce(
        [*tensors], lambda entry: tuple(tensors), op, prescale_factor, postscale_factor, name=name,
        process_set=process_set, prefix="grouped_allreduce", is_in_place=True,
    )  # fmt: skip


class _GroupedAllreduce(torch.autograd.Function):
    """Reduction of several tensors, whose gradients are reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, name: str | None, arguments: dict[str, Any], *tensors: Tensor) -> Any:
        """Reduce the tensors."""
        ctx.arguments = arguments
        return synchronize(grouped_allreduce_async(tensors, name=name, **arguments))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Reduce the gradients."""
        return None, None, *grouped_allreduce([grad.contiguous() for grad in grads], **ctx.arguments)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors as one operation; as `allreduce`."""
    arguments = {
        "op": reduction(op, average),
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _GroupedAllreduce.apply(name, arguments, *(sent for sent, _ in pairs))  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Reduce several tensors in place as one operation; as `allreduce_`."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begin to reduce a sparse tensor, by gathering; return a function that waits for the result.

    Raises:
        ValueError: The reduction is neither `Sum` nor `Average`.

    Communication: two allgathers, of the indices and of the values.
    """
    if op not in (AVERAGE, SUM):
        raise ValueError(
            f"sparse_allreduce_async has Sum and Average, but op is {op!r}: give tensor.to_dense() instead"
        )
    # gathered along the first dimension, which has the entries after the transposition
    indices = tensor._indices().transpose(0, 1).contiguous()
    handles = [
        allgather_async(indices, name=f"{name}.indices", process_set=process_set),
        allgather_async(tensor._values().contiguous(), name=f"{name}.values", process_set=process_set),
    ]

    def wait() -> Tensor:
        values, positions = synchronize(handles[1]), synchronize(handles[0])
        if op == AVERAGE:
            values = values / (process_set.size() or 1)
        return torch.sparse_coo_tensor(positions.transpose(0, 1), values, tensor.shape, check_invariants=False)

    return wait


# --- reducescatter


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce a tensor over ranks, of which each gets its rows; return a handle.

    Args:
        tensor: Tensor of the same type and shape on all ranks. If its rows cannot be divided, the first ranks get more.
        name: Name by which ranks are matched; by default from the number of the call.
        op: Reduction.
        process_set: Ranks that take part.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after it.

    Communication: one all_to_all.
    """
    _check_op(op, process_set, _SCATTERED)
    return submit(
        "reducescatter", [tensor], lambda entry: entry.results[0], name=name, process_set=process_set, op=op,
        prescale=float(prescale_factor), postscale=float(postscale_factor),
    )  # fmt: skip


_SCATTERED = tuple(op for op in range(AVERAGE, PRODUCT + 1) if op != ADASUM)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce several tensors over ranks, of which each gets its rows; as `reducescatter_async`."""
    _check_op(op, process_set, _SCATTERED)
    return submit(
        "reducescatter", [*tensors], lambda entry: tuple(entry.results), name=name, process_set=process_set, op=op,
        prescale=float(prescale_factor), postscale=float(postscale_factor), prefix="grouped_reducescatter",
    )  # fmt: skip


def _gradient_factor(arguments: dict[str, Any]) -> float:
    """Return the factor of a gradient of reducescatter: Horovod's convention is that of the mean over ranks."""
    size = arguments["process_set"].size() if arguments["op"] == SUM else 1
    return float(size * arguments["prescale_factor"] * arguments["postscale_factor"])


class _Reducescatter(torch.autograd.Function):
    """Reduction in rows of several tensors, whose gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, name: str | None, arguments: dict[str, Any], *tensors: Tensor) -> Any:
        """Reduce the tensors."""
        ctx.arguments = arguments
        return synchronize(grouped_reducescatter_async(tensors, name, **arguments))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gather the gradients."""
        factor = _gradient_factor(ctx.arguments)
        scaled = [(grad * factor if factor != 1.0 else grad).contiguous() for grad in grads]
        return None, None, *grouped_allgather(scaled, process_set=ctx.arguments["process_set"])


class _ReducescatterOne(torch.autograd.Function):
    """Reduction in rows of one tensor, whose gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, arguments: dict[str, Any]) -> Any:
        """Reduce the tensor."""
        ctx.arguments = arguments
        return synchronize(reducescatter_async(tensor, name, **arguments))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gather the gradient."""
        factor = _gradient_factor(ctx.arguments)
        scaled = (grads[0] * factor if factor != 1.0 else grads[0]).contiguous()
        return allgather(scaled, process_set=ctx.arguments["process_set"]), None, None


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over ranks, of which each gets its rows; autograd goes through it.

    Communication: one all_to_all, blocking.
    """
    arguments = {
        "op": op,
        "process_set": process_set,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }
    sent, context = compression.compress(tensor)
    return compression.decompress(_ReducescatterOne.apply(sent, name, arguments), context)  # type: ignore[no-any-return, no-untyped-call]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce several tensors over ranks, of which each gets its rows; as `reducescatter`."""
    arguments = {
        "op": op,
        "process_set": process_set,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _Reducescatter.apply(name, arguments, *(sent for sent, _ in pairs))  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]
