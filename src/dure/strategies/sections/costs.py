"""Costs of a model's blocks: operations, counted in one forward pass, and bytes held.

No time is measured: the cut of a model follows from the task alone.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

_OPERATIONS_PER_ELEMENT = 16.0
"""Weight of an element that is written and kept for backward, in operations of a matrix product. No block is free."""
_RECURRENT = ("_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer")


class BlockCost(AbstractContextManager["BlockCost"]):
    """Cost of one call of a block: computation, and memory kept for backward."""

    def __init__(self, not_kept: set[int]) -> None:
        """Prepare to count.

        Args:
            not_kept: Addresses of storages that are not counted: parameters and buffers.
        """
        self._not_kept = not_kept
        self._kept: dict[int, tuple[int, int]] = {}
        self._counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(_recurrent_operations(), _of_rnn))
        self._contexts = ExitStack()

    def __enter__(self) -> "BlockCost":
        """Start to count."""
        kept, not_kept = self._kept, self._not_kept

        # The graph of a block's output holds this function and its result. If the output were among them, directly or
        # through `self`, that would be a cycle that is never collected, with the model in it.
        def count(tensor: Tensor) -> Tensor:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in not_kept:
                    kept[storage.data_ptr()] = storage.nbytes(), storage.nbytes() // tensor.itemsize
            return tensor.detach()

        self._contexts.enter_context(torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor))
        # the only kernel whose products are counted on every device
        self._contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
        self._contexts.enter_context(self._counter)
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        self._contexts.close()

    @property
    def saved_bytes(self) -> int:
        """Bytes kept for backward; each storage is counted once."""
        return sum(size for size, _ in self._kept.values())

    def operations(self, results: Sequence[Tensor]) -> float:
        """Return the operations, forward and backward, independently of the precision.

        Those of matrix products, convolutions and attention count three times, for forward and both gradients.
        Elementwise operations are weighted by their elements.
        """
        moved = sum(elements for _, elements in self._kept.values()) + sum(tensor.numel() for tensor in results)
        return 3.0 * self._counter.get_total_flops() + _OPERATIONS_PER_ELEMENT * moved


def _recurrent_operations() -> list[Any]:
    return [getattr(torch.ops.aten, name) for name in _RECURRENT if hasattr(torch.ops.aten, name)]


def _of_rnn(input_shape: Sequence[int], weights: Any, *args: Any, **kwargs: Any) -> int:
    """Return the operations of recurrent layers: every weight matrix is applied to every token."""
    # a list of all weights, or the two matrices of one layer
    shapes: list[Sequence[int]] = [weights, args[0]] if isinstance(weights, torch.Size) else weights
    return 2 * math.prod(input_shape[:-1]) * sum(math.prod(shape) for shape in shapes if len(shape) == 2)


def parameter_bytes(module: nn.Module) -> int:
    """Return the bytes of parameters, of the gradients of those that are trained, and of buffers."""
    parameters = [p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in module.parameters()]
    return sum(parameters) + sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
