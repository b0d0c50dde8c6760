"""Flat buffer for all gradients, cut into buckets, which a reducer sends instead of single tensors."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dure.errors import TaskInvalid


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Slice of a flat buffer that is reduced at once."""

    vector: Tensor
    """1-D view into the buffer."""
    positions: tuple[int, ...]
    """Parameters in the bucket, as positions in the parameter list of the buffers."""
    index: int
    tail_elements: int = 0

    @property
    def gradients(self) -> Tensor:
        """Vector without the tail."""
        return self.vector[: self.vector.numel() - self.tail_elements]

    @property
    def tail(self) -> Tensor:
        """Numbers that are reduced together with the gradients."""
        return self.vector[self.vector.numel() - self.tail_elements :]


class FlatGradients:
    """Gradients as views into one buffer per dtype, so that they are accumulated where they are sent from.

    Parameters are in reverse order, roughly that in which backward reaches them, so that the first bucket is full first
    (Li et al. 2020, section 3.2.3). After the last parameter is a tail for a few numbers that are sent with the last
    bucket.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        bucket_elements: int,
        tail_elements: int,
        zeros: Callable[[int, torch.dtype, torch.device], Tensor] | None = None,
        bucket_ends: Container[int] | None = None,
    ) -> None:
        """Allocate the buffers, zeroed; the parameters' gradients are not touched.

        Args:
            parameters: Dense parameters on one device.
            bucket_elements: Minimum elements at which a bucket is closed.
            tail_elements: Length of the tail, which has dtype float32 or float64.
            zeros: Allocates a buffer; None for torch's own memory.
            bucket_ends: Identities of the parameters at which a bucket is closed, whatever its size; None for none.
        """
        self._zeros = zeros or (lambda length, dtype, device: torch.zeros(length, dtype=dtype, device=device))
        self._bucket_ends = bucket_ends
        self.parameters = list(parameters)
        self.views: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        self.buckets: list[Bucket] = []
        self.buffers: list[Tensor] = []
        by_dtype: dict[torch.dtype, list[int]] = {}
        for position in reversed(range(len(self.parameters))):
            by_dtype.setdefault(self.parameters[position].dtype, []).append(position)
        # the buffer with the tail is last, so that the tail is in the last bucket; half precision is too coarse for it
        carrier = next((dtype for dtype in by_dtype if dtype in (torch.float32, torch.float64)), torch.float32)
        for dtype in [*(dtype for dtype in by_dtype if dtype != carrier), carrier]:
            is_last = dtype == carrier
            self._lay_out(dtype, by_dtype.get(dtype, []), bucket_elements, tail_elements if is_last else 0)
        self.tail = self.buffers[-1][self.buffers[-1].numel() - tail_elements :]

    def _lay_out(self, dtype: torch.dtype, positions: Sequence[int], bucket_elements: int, tail_elements: int) -> None:
        total = sum(self.parameters[position].numel() for position in positions) + tail_elements
        buffer = self._zeros(total, dtype, self.parameters[0].device)
        self.buffers.append(buffer)
        start = end = 0
        inside: list[int] = []
        for position in positions:
            parameter = self.parameters[position]
            self.views[position] = _like(parameter, buffer, end)
            end += parameter.numel()
            inside.append(position)
            is_full = end - start >= bucket_elements
            if self._bucket_ends is not None:
                is_full = id(parameter) in self._bucket_ends
            if is_full and position != positions[-1]:
                self.buckets.append(Bucket(buffer[start:end], tuple(inside), len(self.buckets)))
                start, inside = end, []
        self.buckets.append(Bucket(buffer[start:], tuple(inside), len(self.buckets), tail_elements))

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, including the tail."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def keeper(self, position: int, reached: list[nn.Parameter]) -> Callable[[nn.Parameter], None]:
        """Return a post-accumulate hook that makes a parameter's gradient its view, and records that it was reached.

        Backward's first gradient is new memory, still in the caches. It is copied over the contents of the buffer,
        which therefore need not be zeroed. Later microsteps add to the view.
        """
        view = self.views[position]

        def keep(parameter: nn.Parameter) -> None:
            if not parameter.requires_grad:  # frozen since its forward: autograd adds nothing to its gradient
                return
            reached.append(parameter)
            if parameter.grad is not view:
                assert parameter.grad is not None
                check_gradient(parameter.grad)
                view.copy_(parameter.grad)
                parameter.grad = view

        return keep


def check_gradient(gradient: Tensor) -> None:
    """Refuse a gradient that is no plain tensor of numbers.

    Raises:
        TaskInvalid: It is sparse, or is part of a graph.
    """
    if gradient.layout is not torch.strided:
        raise TaskInvalid("a gradient is sparse (sparse=True), and has no place in a flat buffer: use torch's DDP")
    if gradient.requires_grad:
        raise TaskInvalid(
            "backward was called with create_graph=True, and a mean over ranks has no graph: compute such gradients "
            "with torch.autograd.grad, and call backward of a loss that contains them"
        )


def as_gradient_of(parameter: Tensor, flat: Tensor) -> Tensor:
    """Return a parameter's gradient, given as a vector in the order of its elements, with the parameter's strides.

    Fused optimisers read both in memory order. If the strides differ (channels_last weights and a contiguous gradient),
    those of CUDA refuse. Those of the CPU silently update each element with the gradient of another.
    """
    gradient = flat.view_as(parameter)
    return gradient if parameter.is_contiguous() else torch.empty_like(parameter).copy_(gradient)


def _like(parameter: Tensor, buffer: Tensor, start: int) -> Tensor:
    """Return the parameter's view of the buffer, with its strides if they leave no gaps (channels_last)."""
    flat = buffer[start : start + parameter.numel()]
    is_dense = torch.empty_like(parameter).stride() == parameter.stride()
    return (
        flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
        if is_dense
        else flat.view_as(parameter)
    )
