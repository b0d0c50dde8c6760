"""Interface of an opened all-reduce algorithm. Importing this module does not import torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch
    from torch import Tensor


ReduceOp = Literal["sum", "mean", "max"]
"""Reduction. A mean is the sum, then one division by the world size; for integers it is truncated towards zero.

Partial sums have the vector's dtype, each rounded once: a float16 sum, and so a mean, overflows beyond 65504.
"""
REDUCE_OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)


class AllReduce(ABC):
    """An algorithm over a group, ready for use."""

    name: str
    rank: int
    world_size: int

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent since the algorithm was opened."""

    @abstractmethod
    def all_reduce(self, vector: "Tensor", op: ReduceOp = "sum") -> None:
        """Reduce a vector over all ranks, in place; every rank gets the same bits.

        Communication: `sent_bytes_for` bytes from this rank, blocking; on an accelerator the current stream waits.

        Args:
            vector: (N,) contiguous, with the same N and dtype on every rank.
            op: Reduction per element. A maximum with a NaN is NaN.

        Raises:
            ValueError: The vector is not contiguous and 1-D, or the op is unknown.
            RuntimeError: A peer was lost, or sent nothing within the group's timeout.
        """

    def start(self, vector: "Tensor", op: ReduceOp = "sum") -> Callable[[], None]:
        """Start to reduce a vector, and return a function that waits for the result.

        On an accelerator it makes the current stream wait. Until then the vector may not be touched. Most algorithms
        have finished when `start` returns.
        """
        self.all_reduce(vector, op)
        return _nothing

    @abstractmethod
    def sent_bytes_for(self, num_elements: int, element_bytes: int) -> int:
        """Return the bytes that this rank sends in one `all_reduce`, by the formula."""

    def zeros(self, num_elements: int, dtype: "torch.dtype", device: "torch.device") -> "Tensor":
        """Return a vector of zeros in the memory in which it is reduced fastest.

        Every rank calls this in the same order with the same numbers.

        Communication: whatever the algorithm needs to share memory; none for most.
        """
        import torch

        return torch.zeros(num_elements, dtype=dtype, device=device)

    def close(self) -> None:
        """Release the algorithm's resources; the group stays."""


def _nothing() -> None:
    """Do nothing: there is nothing to wait for."""
