"""Algorithms written over a wire, as objects."""

import importlib
from functools import lru_cache

from torch import Tensor

from dure.comm.algorithms.base import REDUCE_OPS, AllReduce, ReduceOp
from dure.comm.algorithms.table import find_algorithm, sent_elements
from dure.comm.algorithms.wire import PointToPoint


class AllReduceOverWire(AllReduce):
    """An algorithm's two functions, and the wire over which they send."""

    def __init__(self, name: str, wire: PointToPoint) -> None:
        self.name = name
        self.rank = wire.rank
        self.world_size = wire.world_size
        self._wire = wire
        self._all_reduce = importlib.import_module(find_algorithm(name).implementation).all_reduce
        self._sent_elements = lru_cache(maxsize=64)(self._count)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent, counted message by message."""
        return self._wire.sent_bytes

    def all_reduce(self, vector: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce a vector over all ranks, in place."""
        check_reducible(vector, op)
        self._all_reduce(self._wire, vector.detach(), op)

    def sent_bytes_for(self, num_elements: int, element_bytes: int) -> int:
        """Return the bytes that this rank sends, by the formula."""
        return self._sent_elements(num_elements) * element_bytes

    def _count(self, num_elements: int) -> int:
        wire = self._wire
        return sent_elements(self.name, num_elements, wire.world_size, hosts=wire.hosts)[wire.rank]


def check_reducible(vector: Tensor, op: str) -> None:
    """Refuse a vector or op that no algorithm here can reduce in place.

    Raises:
        ValueError: The vector is not contiguous and 1-D, or the op is unknown.
    """
    if vector.dim() != 1 or not vector.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(vector.shape)} and strides {vector.stride()} cannot be reduced in place: "
            "all_reduce takes a contiguous vector, so pass tensor.view(-1) of a contiguous tensor"
        )
    if op not in REDUCE_OPS:
        raise ValueError(f"there is no op {op!r}: all_reduce knows {', '.join(REDUCE_OPS)}")
