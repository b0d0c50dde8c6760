"""Values that are sent from stage to stage, described in JSON and packed into flat buffers.

torch's schedules send tensors of one shape for all microbatches. A value is therefore packed into one flat buffer per
dtype, whose length suits the longest of the step's microbatches. Both ends know every microbatch's true shapes, and
neither computes on the unused rest of a buffer.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dure.errors import TaskInvalid
from dure.strategies.sections.trace import tensors_of

Description = dict[str, Any]
"""Nested value as JSON: dtypes and shapes instead of tensors."""

Lanes = dict[str, int]
"""Elements of each flat buffer, by dtype; `bytes` is for values without gradients, four bytes to a float32."""

_BYTES = "bytes"
_ALIGNMENT = 8
_PLAIN = (bool, int, float, str, type(None))


class Leaf(NamedTuple):
    """Tensor of a value."""

    dtype: torch.dtype
    shape: list[int]

    @property
    def num_elements(self) -> int:
        """Return the number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def lane(self) -> str:
        """Return the name of the buffer in which it is sent."""
        return str(self.dtype).removeprefix("torch.") if self.dtype.is_floating_point else _BYTES

    @property
    def lane_elements(self) -> int:
        """Return the number of elements that it takes of that buffer."""
        if self.lane != _BYTES:
            return self.num_elements
        num_bytes = self.num_elements * self.dtype.itemsize
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT // 4


def describe(value: Any, block: str) -> Description:
    """Return the description of a block's output.

    Raises:
        TaskInvalid: It contains something that cannot be sent.
    """
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_complex():
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if type(value) in (tuple, list):
        return {type(value).__name__: [describe(item, block) for item in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: describe(item, block) for key, item in value.items()}}
    if isinstance(value, _PLAIN):
        return {"plain": value}
    seen = f"a {value.layout} tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    raise TaskInvalid(
        f"{block} returned {seen}: what goes from section to section may be dense real tensors, numbers, strings and "
        "None in tuples, lists and dicts; return one of these, or use ddp or fsdp"
    )


def rebuilt(description: Description, make: Callable[[torch.dtype, list[int]], Any]) -> Any:
    """Return the value of a description, with tensors made by `make`, in order."""
    kind, what = next(iter(description.items()))
    if kind == "tensor":
        return make(getattr(torch, what[0]), what[1])
    if kind == "dict":
        return {key: rebuilt(item, make) for key, item in what.items()}
    if kind == "plain":
        return what
    items = [rebuilt(item, make) for item in what]
    return tuple(items) if kind == "tuple" else items


def leaves_of(description: Description) -> list[Leaf]:
    """Return the tensors of a description, in order."""
    found: list[Leaf] = []
    rebuilt(description, lambda dtype, shape: found.append(Leaf(dtype, shape)))
    return found


def lanes_of(descriptions: Iterable[Description]) -> Lanes:
    """Return the sizes of buffers that fit each of the values."""
    lanes: Lanes = {}
    for description in descriptions:
        needed: Lanes = {}
        for leaf in leaves_of(description):
            needed[leaf.lane] = needed.get(leaf.lane, 0) + leaf.lane_elements
        for lane, elements in needed.items():
            lanes[lane] = max(lanes.get(lane, 0), elements)
    # torch requires every stage to send something
    return {lane: max(1, lanes[lane]) for lane in sorted(lanes)} or {"float32": 1}


def lane_dtype(lane: str) -> torch.dtype:
    """Return the dtype of a buffer."""
    return torch.float32 if lane == _BYTES else getattr(torch, lane)


def num_bytes(lanes: Lanes) -> int:
    """Return the bytes of all buffers."""
    return sum(elements * lane_dtype(lane).itemsize for lane, elements in lanes.items())


def packed(value: Any, description: Description, lanes: Lanes, anchor: Tensor, block: str) -> tuple[Tensor, ...]:
    """Copy a value into flat buffers; gradients of the buffers flow to the value.

    Args:
        value: Output of a block.
        description: Expected description.
        lanes: Sizes of the buffers.
        anchor: Tensor that requires a gradient, so that the buffers always do; it gets none.
        block: Name of the block, for the error.

    Raises:
        TaskInvalid: The value does not match the description.
    """
    now = describe(value, block)
    if now != description:
        raise TaskInvalid(
            f"{block} gave {_shown(now)}, but {_shown(description)} for an earlier batch of the same shapes: sections "
            "agree beforehand on what they exchange; let shapes depend on shapes alone, or use ddp or fsdp"
        )
    buffers: tuple[Tensor, ...] = _Pack.apply(anchor, leaves_of(description), lanes, *tensors_of(value))  # type: ignore[no-untyped-call]
    return buffers


def unpacked(buffers: Sequence[Tensor], description: Description, lanes: Lanes) -> Any:
    """Return the packed value in new tensors, whose gradients flow to the buffers."""
    tensors: Iterator[Tensor] = iter(_Unpack.apply(leaves_of(description), lanes, *buffers))  # type: ignore[no-untyped-call]
    return rebuilt(description, lambda dtype, shape: next(tensors))


def nothing(buffers: Sequence[Tensor], lanes: Lanes | None, anchor: Tensor) -> tuple[Tensor, ...]:
    """Return zeros as a stage's output for a microbatch without samples; the gradients are zeros too.

    Args:
        buffers: Received buffers.
        lanes: Sizes of the buffers that it sends; None for the last stage, which returns a float64 scalar.
        anchor: Tensor that requires a gradient.
    """
    zeros: tuple[Tensor, ...] = _Nothing.apply(anchor, lanes, *buffers)  # type: ignore[no-untyped-call]
    return zeros


def _shown(description: Description) -> str:
    return ", ".join(f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}" for leaf in leaves_of(description))


def _places(leaves: Sequence[Leaf]) -> list[tuple[str, int]]:
    """Return each leaf's buffer and its start in that buffer."""
    used: Lanes = {}
    places = []
    for leaf in leaves:
        places.append((leaf.lane, used.get(leaf.lane, 0)))
        used[leaf.lane] = used.get(leaf.lane, 0) + leaf.lane_elements
    return places


def _filled(
    tensors: Sequence[Tensor | None], leaves: Sequence[Leaf], lanes: Lanes, device: torch.device
) -> list[Tensor]:
    buffers = {lane: torch.zeros(size, dtype=lane_dtype(lane), device=device) for lane, size in lanes.items()}
    for tensor, leaf, (lane, start) in zip(tensors, leaves, _places(leaves), strict=True):
        if tensor is not None:
            _slot(buffers[lane], leaf, start).copy_(tensor)
    return list(buffers.values())


def _slot(buffer: Tensor, leaf: Leaf, start: int) -> Tensor:
    part = buffer[start : start + leaf.lane_elements]
    if leaf.lane == _BYTES:
        part = part.view(torch.uint8)[: leaf.num_elements * leaf.dtype.itemsize].view(leaf.dtype)
    return part.view(leaf.shape)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, leaves: list[Leaf], lanes: Lanes, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.leaves, ctx.lanes = leaves, lanes
        return tuple(_filled(tensors, leaves, lanes, anchor.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        by_lane = dict(zip(ctx.lanes, gradients, strict=True))
        places = zip(ctx.leaves, _places(ctx.leaves), strict=True)
        found = [None if lane == _BYTES else _slot(by_lane[lane], leaf, start) for leaf, (lane, start) in places]
        return (None, None, None, *found)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaves: list[Leaf], lanes: Lanes, *buffers: Tensor) -> tuple[Tensor, ...]:
        ctx.leaves, ctx.lanes, ctx.device = leaves, lanes, buffers[0].device
        by_lane: Mapping[str, Tensor] = dict(zip(lanes, buffers, strict=True))
        places = zip(leaves, _places(leaves), strict=True)
        # copies: blocks may work in place, and the buffers are reused
        values = tuple(_slot(by_lane[lane], leaf, start).clone() for leaf, (lane, start) in places)
        ctx.mark_non_differentiable(*(v for v, leaf in zip(values, leaves, strict=True) if leaf.lane == _BYTES))
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        known = [None if leaf.lane == _BYTES else g for g, leaf in zip(gradients, ctx.leaves, strict=True)]
        return (None, None, *_filled(known, ctx.leaves, ctx.lanes, ctx.device))


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lanes: Lanes | None, *buffers: Tensor) -> tuple[Tensor, ...]:
        ctx.like = [(buffer.shape, buffer.dtype, buffer.device) for buffer in buffers]
        if lanes is None:
            return (torch.zeros((), dtype=torch.float64, device=anchor.device),)
        return tuple(_filled([], [], lanes, anchor.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like))
