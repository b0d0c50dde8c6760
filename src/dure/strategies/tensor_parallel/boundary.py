"""Conversions between plain tensors and values divided over a tensor group, differentiable any number of times.

The backward of DTensor's own `from_local` does not record the origin of the gradient, so that a loss made of gradients
would lose them without an error. The backward of each function here is another function here.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from dure.errors import TaskInvalid
from dure.torchcompat.modes import is_transforming

_RELEASE_SECONDS = 2.0
"""Seconds for which a value that something still holds may be held by a thread of gloo; on a loaded machine it takes a
millisecond."""


def storage_of(value: Any) -> Any:
    """Return the memory of a tensor, or of a DTensor's part; None if it has none of its own, such as a sparse one."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    if not isinstance(local, Tensor) or local.layout is not torch.strided or is_transforming():
        return None
    return local.untyped_storage()


def mark_as_copy(value: Any, original: Any) -> Any:
    """Mark a value as a copy, although on one device it would share memory with another; its views are marked too."""
    # torch keeps one Python object per storage, as long as that lives, for all tensors that share it
    storage, source = storage_of(value), storage_of(original)
    if storage is not None:
        storage.is_copy = True
        if source is not None and source is not storage:
            source.copies = [*_copies_of(source), StorageWeakRef(storage)]
    return value


def _copies_of(storage: Any) -> list[StorageWeakRef]:
    return [copy for copy in getattr(storage, "copies", ()) if not copy.expired()]


def has_copies(value: Any) -> bool:
    """Return whether something still has a copy of a value or of its views, on all ranks alike."""
    storage = storage_of(value)
    if _copies_of(storage):
        gc.collect()  # what only cycles still hold, such as frames of an error, goes at another time on each rank
    # threads of gloo hold the tensors of a collective for some time after the wait for it has ended
    deadline = time.monotonic() + _RELEASE_SECONDS
    while _copies_of(storage) and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(_copies_of(storage))


def is_copy(value: Any) -> bool:
    """Return whether a value was marked as a copy."""
    return hasattr(storage_of(value), "is_copy")


def is_shard(value: Any) -> bool:
    """Return whether a value is a DTensor that ranks with other samples divide, as a parameter that is not gathered."""
    return isinstance(value, DTensor) and value.device_mesh.mesh_dim_names != ("tensor",)


def check_is_gathered(value: Any, name: str) -> None:
    """Refuse a parameter that is not gathered, which would be taken for one that is divided over the tensor group.

    Args:
        value: A parameter, or a value computed from one.
        name: Name of what uses it.

    Raises:
        TaskInvalid: This rank has a shard of it.
    """
    if is_shard(value):
        raise TaskInvalid(
            f"a parameter of a unit is used outside that unit's forward ({name}), where this rank has a shard of it "
            "only: return what needs it from the unit, name other units with --fsdp.units, or use ddp"
        )


class Traffic:
    """Bytes that a rank sends for divided layers, by the formulas of bandwidth-optimal collectives."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.sent_bytes = 0
        """Bytes since it was last reset to zero; only of forward passes with gradients and of their backward."""

    def count(self, value: DTensor, source: Placement, target: Placement) -> None:
        """Add the bytes that converting a value from one placement to another sends."""
        num_bytes = value.numel() * value.element_size()
        if isinstance(source, Partial) and isinstance(target, Replicate):
            self.sent_bytes += 2 * (self.num_ranks - 1) * num_bytes // self.num_ranks
            return
        # parts are gathered, or sums leave each rank a part; each part is padded to the longest
        divided = next((p for p in (source, target) if isinstance(p, Shard)), None)
        if divided is not None and not isinstance(source, Replicate) and num_bytes:
            size = value.size(divided.dim)
            self.sent_bytes += (self.num_ranks - 1) * num_bytes // size * longest_part(size, self.num_ranks)


_counting: list[Traffic] = []


@contextmanager
def counted_by(traffic: Traffic) -> Iterator[None]:
    """Count the bytes sent inside the context."""
    _counting.append(traffic)
    try:
        yield
    finally:
        _counting.pop()


def longest_part(size: int, num_ranks: int) -> int:
    """Return the size of the first rank's part, which is rounded up."""
    return -(-size // num_ranks)


def from_local(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size | None = None) -> Any:
    """Return a DTensor of every rank's local tensor.

    Args:
        local: The whole, a part or a summand, by the placement.
        mesh: Mesh of one axis, the tensor group.
        placement: The same on all ranks.
        shape: Shape of the whole; by default all parts have the same size.

    Communication: in backward, the conversion of the gradient to the same placement (a summand's to the whole).
    """
    return _FromLocal.apply(local, mesh, placement, shape, torch.is_grad_enabled())  # type: ignore[no-untyped-call]


def to_local(value: Any, *, gradient: Placement | None = None) -> Tensor:
    """Return this rank's tensor of a DTensor.

    Args:
        value: Divided, summands or whole.
        gradient: Placement of this rank's gradient: `Partial` if each rank uses the whole for a different purpose. By
            default it is that of the value.
    """
    check_is_gathered(value, "a divided layer")
    placement = gradient or _of_gradient(value.placements[0])
    found: Tensor = _ToLocal.apply(value, placement)  # type: ignore[no-untyped-call]
    return found


def redistributed(value: Any, placement: Placement, *, is_counted: bool | None = None) -> Any:
    """Return a DTensor with another placement.

    Communication: an all_gather, all_reduce or reduce_scatter; none from the whole to parts or summands.
    """
    check_is_gathered(value, "a divided layer")
    if value.placements == (placement,):
        return value
    is_counted = torch.is_grad_enabled() if is_counted is None else is_counted
    return _Redistributed.apply(value, placement, is_counted)  # type: ignore[no-untyped-call]


def gathered(value: Any) -> Tensor:
    """Return a DTensor as a whole plain tensor.

    Communication: an all_gather or all_reduce, unless it is whole already.
    """
    return to_local(redistributed(value, Replicate()))


def released(value: Any) -> Tensor:
    """Return a DTensor that is not used otherwise as a whole plain tensor, which a model may change in place.

    Communication: an all_gather or all_reduce, unless it is whole already.
    """
    found: Tensor = _Released.apply(value, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return found


def _of_gradient(placement: Placement) -> Placement:
    """Return the placement of a value's gradient: for a summand it is that of the sum."""
    return Replicate() if isinstance(placement, Partial) else placement


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size | None, is_counted: bool
    ) -> Any:
        ctx.placement, ctx.is_counted = placement, is_counted
        ctx.set_materialize_grads(False)
        stride = None if shape is None else _contiguous_stride(shape)
        return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 5
        placed = redistributed(gradient, _of_gradient(ctx.placement), is_counted=ctx.is_counted)
        # each summand's rank gets the gradient of the sum
        return to_local(placed, gradient=ctx.placement), None, None, None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any, gradient: Placement) -> Tensor:
        ctx.mesh, ctx.shape, ctx.gradient = value.device_mesh, value.shape, gradient
        ctx.set_materialize_grads(False)
        local: Tensor = value.to_local()
        return local.view_as(local)  # autograd marks the returned tensor, and the DTensor keeps its own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, None]:
        if gradient is None:
            return None, None
        if isinstance(gradient, DTensor):  # an autograd function took it from the divided parameter itself
            return redistributed(gradient, ctx.gradient), None
        return from_local(gradient.contiguous(), ctx.mesh, ctx.gradient, ctx.shape), None


class _Redistributed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any, placement: Placement, is_counted: bool) -> Any:
        (ctx.source,) = value.placements
        ctx.is_counted = is_counted
        ctx.set_materialize_grads(False)
        if is_counted and _counting:
            _counting[-1].count(value, ctx.source, placement)
        if isinstance(placement, Partial):
            return DTensor.from_local(_summand(value, placement), value.device_mesh, [placement], run_check=False)
        return value.redistribute(placements=[placement])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None, None]:
        if gradient is None:
            return None, None, None
        return redistributed(gradient, _of_gradient(ctx.source), is_counted=ctx.is_counted), None, None


def _summand(value: Any, placement: Partial) -> Tensor:
    """Return a rank's own summand of a value that is whole on every rank: all of it or nothing."""
    whole: Tensor = value.to_local()
    is_all = placement.reduce_op != "sum" or value.device_mesh.get_local_rank() == 0
    return whole if is_all else torch.zeros_like(whole)


class _Released(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any, is_counted: bool) -> Tensor:
        ctx.mesh, (ctx.source,) = value.device_mesh, value.placements
        ctx.is_counted = is_counted
        ctx.set_materialize_grads(False)
        if is_counted and _counting:
            _counting[-1].count(value, ctx.source, Replicate())
        local: Tensor = value.redistribute(placements=[Replicate()]).to_local()
        return local.detach()  # not a view, which autograd would not let a model change

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, None]:
        if gradient is None:
            return None, None
        whole = from_local(gradient.contiguous(), ctx.mesh, Replicate())
        return redistributed(whole, _of_gradient(ctx.source), is_counted=ctx.is_counted), None


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(1, shape[dim + 1])
    return tuple(stride)
