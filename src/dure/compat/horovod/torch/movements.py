"""Movements of tensors between ranks: allgather, broadcast and alltoall, with their gradients; join and barrier."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dure.compat.horovod.common import basics
from dure.compat.horovod.common.process_sets import ProcessSet, global_process_set
from dure.compat.horovod.engine.entries import Entry
from dure.compat.horovod.engine.requests import AVERAGE
from dure.compat.horovod.torch.handles import note_join, submit, synchronize

# --- allgather


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin to concatenate the tensors of all ranks along the first dimension, which may differ; return a handle.

    Args:
        tensor: Tensor of the same type and, after the first dimension, shape on all ranks.
        name: Name by which ranks are matched; by default from the number of the call.
        process_set: Ranks that take part.

    Communication: one all_gather, fused with others that wait.
    """
    return submit("allgather", [tensor], lambda entry: entry.results[0], name=name, process_set=process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to gather several tensors as one operation; as `allgather_async`."""
    return submit(
        "allgather",
        [*tensors],
        lambda entry: tuple(entry.results),
        name=name,
        process_set=process_set,
        prefix="grouped_allgather",
    )


def _averaged(grads: Sequence[Tensor], process_set: ProcessSet) -> list[Tensor]:
    """Return the means of gradients over the ranks."""
    handle = submit(
        "allreduce",
        [grad.contiguous() for grad in grads],
        lambda entry: entry.results,
        name=None,
        process_set=process_set,
        op=AVERAGE,
    )
    return list(synchronize(handle))


def _own_rows(grads: Sequence[Tensor], rows: Sequence[int], process_set: ProcessSet) -> list[Tensor]:
    """Return this rank's rows of gathered tensors' gradients, averaged over ranks as Horovod does."""
    averaged = _averaged(grads, process_set)
    counts = allgather(torch.tensor([list(rows)], dtype=torch.int64), process_set=process_set)
    begins = counts[: process_set.rank() or 0].sum(0).tolist()
    return [grad.narrow(0, begin, number) for grad, begin, number in zip(averaged, begins, rows, strict=True)]


class _Allgather(torch.autograd.Function):
    """Concatenation over ranks, whose gradient is averaged and cut."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Any:
        """Gather the tensor."""
        handle = allgather_async(tensor, name, process_set)
        ctx.rows, ctx.process_set = tensor.shape[:1], process_set
        return synchronize(handle)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Average the gradient and return own rows."""
        return _own_rows(grads, ctx.rows, ctx.process_set)[0], None, None


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the tensors of all ranks along the first dimension, which may differ; autograd goes through it.

    Communication: one all_gather, blocking.
    """
    return _Allgather.apply(tensor, name, process_set)  # type: ignore[no-any-return, no-untyped-call]


class _GroupedAllgather(torch.autograd.Function):
    """Concatenations over ranks, whose gradients are averaged and cut."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Any:
        """Gather the tensors."""
        handle = grouped_allgather_async(tensors, name, process_set)
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return synchronize(handle)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Average the gradients and return own rows."""
        return None, None, *_own_rows(grads, ctx.rows, ctx.process_set)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Gather several tensors as one operation; as `allgather`."""
    return _GroupedAllgather.apply(name, process_set, *tensors)  # type: ignore[no-any-return, no-untyped-call]


# --- broadcast


def _begin_broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, is_in_place: bool
) -> int:
    members = basics.engine().members_of(process_set.process_set_id or 0) or ()
    if root_rank not in members and process_set.process_set_id is not None:
        raise ValueError(f"broadcast: root rank {root_rank} is not in {process_set}")

    def result(entry: Entry) -> Tensor:
        return tensor if is_in_place else entry.results[0]

    return submit(
        "broadcast", [tensor], result, name=name, process_set=process_set, is_in_place=is_in_place, root=root_rank
    )


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to send a rank's tensor to all ranks, and return a handle; the tensor is not changed.

    Args:
        tensor: Tensor of the same type and shape on all ranks.
        root_rank: Global rank of the source.
        name: Name by which ranks are matched; by default from the number of the call.
        process_set: Ranks that take part.

    Communication: one broadcast, fused with others that wait.
    """
    return _begin_broadcast(tensor, root_rank, name, process_set, is_in_place=False)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to overwrite a tensor with that of a rank; as `broadcast_async`."""
    return _begin_broadcast(tensor, root_rank, name, process_set, is_in_place=True)


class _Broadcast(torch.autograd.Function):
    """Copy of a rank's tensor, whose gradient is averaged on that rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        """Broadcast the tensor."""
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Average the gradient for the source; the others have none."""
        averaged = _averaged(grads, ctx.process_set)[0]
        if basics.rank() != ctx.root_rank:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return a rank's tensor on all ranks; autograd goes through it.

    Communication: one broadcast, blocking.
    """
    return _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-any-return, no-untyped-call]


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite a tensor with that of a rank, and return it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


# --- alltoall


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to send each rank its rows of a tensor, and return a handle.

    `synchronize` returns the received rows, and how many came from each rank.

    Args:
        tensor: Tensor of the same type and, after the first dimension, shape on all ranks.
        splits: Number of rows for each rank, in order; None to divide them equally.
        name: Name by which ranks are matched; by default from the number of the call.
        process_set: Ranks that take part.

    Raises:
        ValueError: The rows cannot be divided so.

    Communication: one all_to_all.
    """
    device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")
    rows = _rows_for_each(tensor, splits, process_set)

    def result(entry: Entry) -> tuple[Tensor, Tensor]:
        return entry.results[0], torch.tensor(entry.sizes, dtype=torch.int32, device=device)

    return submit("alltoall", [tensor], result, name=name, process_set=process_set, splits=rows)


def _rows_for_each(tensor: Tensor, splits: Tensor | Sequence[int] | None, process_set: ProcessSet) -> tuple[int, ...]:
    num_ranks = process_set.size() or 1
    if tensor.dim() == 0:
        return ()
    if splits is None:
        if tensor.shape[0] % num_ranks:
            raise ValueError(
                f"alltoall: the {tensor.shape[0]} rows are not an even multiple of the {num_ranks} ranks: give splits"
            )
        return (tensor.shape[0] // num_ranks,) * num_ranks
    given = splits if isinstance(splits, Tensor) else torch.tensor(list(splits), dtype=torch.int32)
    if given.dim() != 1:
        raise ValueError(f"alltoall: splits has {given.dim()} dimensions but must have one")
    if given.dtype != torch.int32:
        raise ValueError(f"alltoall: splits has type {given.dtype} but must have torch.int32")
    rows = tuple(map(int, given.tolist()))
    if not rows:
        return _rows_for_each(tensor, None, process_set)
    if len(rows) != num_ranks:
        raise ValueError(f"alltoall: splits has {len(rows)} entries but there are {num_ranks} ranks")
    if min(rows) < 0 or sum(rows) > tensor.shape[0]:
        raise ValueError(f"alltoall: splits is {list(rows)} but the tensor has {tensor.shape[0]} rows")
    return rows


class _Alltoall(torch.autograd.Function):
    """Exchange of rows, whose gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        """Exchange the rows."""
        received, counts = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.counts, ctx.process_set, ctx.num_rows = counts, process_set, tensor.shape[0]
        if splits is None:
            return received
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of the rows to their ranks; rows that were not sent have none."""
        grad, _ = alltoall(grads[0].contiguous(), ctx.counts, process_set=ctx.process_set)
        missing = ctx.num_rows - grad.shape[0]
        if missing:
            grad = torch.cat([grad, grad.new_zeros(missing, *grad.shape[1:])])
        return grad, None, None, None


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send each rank its rows of a tensor; autograd goes through it.

    Returns:
        The received rows; with `splits`, also how many came from each rank.

    Communication: one all_to_all, blocking.
    """
    return _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]


# --- waits


def join(device: int = -1) -> int:
    """Wait until all ranks have called this; collectives of the others go on, to which this rank adds zeros.

    Args:
        device: Ignored: zeros are created where they are needed.

    Returns:
        The rank that joined last.
    """
    last = synchronize(submit("join", [], lambda entry: entry.value, name="all", process_set=global_process_set))
    note_join()
    return int(last)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for all ranks of a process set."""
    synchronize(submit("barrier", [], lambda entry: None, name=None, process_set=process_set))
