"""Interface of an all-reduce algorithm that is ready for use. Importing it does not import torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch
    from torch import Tensor


ReduceOp = Literal["sum", "mean", "max"]
"""A mean is the sum, then one division by the world size; of whole numbers it is cut off towards zero.

Partial sums have the vector's dtype, each rounded once: a float16 sum, and so a mean, overflows beyond 65504.
"""
REDUCE_OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)


class AllReduce(ABC):
    """One algorithm over one group, ready for use."""

    name: str
    rank: int
    world_size: int

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent since it was opened."""

    @abstractmethod
    def all_reduce(self, vector: "Tensor", op: ReduceOp = "sum") -> None:
        """Reduce a vector over all ranks, in place; every rank gets the same bits.

        Communication: `sent_bytes_for` bytes from this rank, blocking; on an accelerator the current stream waits.

        Args:
            vector: (N,) contiguous, the same N and dtype on every rank.
            op: What is computed per element. A maximum with a NaN is NaN.

        Raises:
            ValueError: Not a contiguous vector, or an unknown op.
            RuntimeError: A peer went away, or said nothing within the group's timeout.
        """

    def start(self, vector: "Tensor", op: ReduceOp = "sum") -> Callable[[], None]:
        """Begin to reduce a vector, and return what waits for the result; on an accelerator the current stream does.

        Until then the vector may not be touched. Most algorithms have reduced it when this returns.
        """
        self.all_reduce(vector, op)
        return _nothing

    @abstractmethod
    def sent_bytes_for(self, num_elements: int, element_bytes: int) -> int:
        """Return the bytes that this rank sends in one `all_reduce` of so many elements, by the formula."""

    def zeros(self, num_elements: int, dtype: "torch.dtype", device: "torch.device") -> "Tensor":
        """Return a vector of zeros in the memory in which it is reduced fastest.

        Every rank calls it in the same order with the same numbers.

        Communication: whatever the algorithm needs to share memory; most need nothing.
        """
        import torch

        return torch.zeros(num_elements, dtype=dtype, device=device)

    def close(self) -> None:
        """Let go of what it holds; the group stays."""


def _nothing() -> None:
    """Wait for nothing."""
