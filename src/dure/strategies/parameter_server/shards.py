"""Division of parameters by rows over servers, and messages of rows: views into one buffer of bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 64
"""Alignment of every tensor in a message: suits vector instructions, and is a multiple of every element's size."""
_NUMBER_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Rows of one parameter that one server keeps; a parameter without dimensions is one row."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the shard."""
        return (self.stop - self.start, *self.shape[1:]) if self.shape else ()

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the start of the shard in the whole parameter, in each dimension."""
        return (self.start, *(0 for _ in self.shape[1:])) if self.shape else ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the shard."""
        return prod(self.sizes) * self.dtype.itemsize

    def of(self, whole: Tensor) -> Tensor:
        """Return the shard of a tensor of the whole parameter's shape, as a view."""
        return whole.narrow(0, self.start, self.stop - self.start) if self.shape else whole


def plan_shards(
    parameters: Sequence[tuple[str, Tensor]], num_servers: int, *, cuts_tensors: bool = True
) -> list[list[Shard]]:
    """Divide parameters over servers by bytes.

    The rows of all parameters, concatenated, are cut into as many runs of consecutive rows as there are servers, each
    at the row nearest to the even position. So a server's bytes differ from the even share by at most one row (Li et
    al. 2014, section 4.4, cut a hashed range of keys; rows stay rectangles, which a checkpoint can name). Whole tensors
    are assigned the largest first to the server with the least, and shares differ by at most the largest.

    Args:
        parameters: Parameters with their names, in the model's order.
        num_servers: At least one.
        cuts_tensors: Whether a tensor may be cut. Optimisers that depend on a whole tensor need it whole.

    Returns:
        The shards of each server, in the model's order; a server may have none if there are fewer rows.
    """
    named = [(name, tensor) for name, tensor in parameters if tensor.numel()]
    if not cuts_tensors:
        return _whole_tensors(named, num_servers)
    total = sum(tensor.numel() * tensor.element_size() for _, tensor in named)
    bounds = [total * server / num_servers for server in range(num_servers + 1)]
    shards: list[list[Shard]] = [[] for _ in range(num_servers)]
    before = 0
    for name, tensor in named:
        num_rows = tensor.shape[0] if tensor.dim() else 1
        row_bytes = tensor.numel() * tensor.element_size() // num_rows
        cuts = [min(max(round((bound - before) / row_bytes), 0), num_rows) for bound in bounds]
        for server in range(num_servers):
            if cuts[server] < cuts[server + 1]:
                shards[server].append(_rows(name, tensor, cuts[server], cuts[server + 1]))
        before += num_rows * row_bytes
    return shards


def _rows(name: str, tensor: Tensor, start: int, stop: int) -> Shard:
    return Shard(name=name, start=start, stop=stop, shape=tuple(tensor.shape), dtype=tensor.dtype)


def _whole_tensors(named: Sequence[tuple[str, Tensor]], num_servers: int) -> list[list[Shard]]:
    loads = [0] * num_servers
    server_of: dict[str, int] = {}
    for name, tensor in sorted(named, key=lambda item: -item[1].numel() * item[1].element_size()):
        server = loads.index(min(loads))
        server_of[name] = server
        loads[server] += tensor.numel() * tensor.element_size()
    return [
        [
            _rows(name, tensor, 0, tensor.shape[0] if tensor.dim() else 1)
            for name, tensor in named
            if server_of[name] == s
        ]
        for s in range(num_servers)
    ]


class Message:
    """Numbers and one tensor per shard in one buffer of bytes, so that they are one message.

    Whatever the dtypes, it is sent as bytes; the tensors are views, and nothing is packed or unpacked.
    """

    def __init__(self, num_numbers: int, shards: Sequence[Shard], *, is_pinned: bool = False) -> None:
        """Lay out a message of zeros.

        Args:
            num_numbers: Number of float64 values in the header.
            shards: One tensor each, in this order.
            is_pinned: Use page-locked memory, with which a CUDA device copies asynchronously.
        """
        places = []
        end = num_numbers * _NUMBER_BYTES
        for shard in shards:
            start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            end = start + shard.num_bytes
            places.append((start, end, shard))
        self.buffer = torch.zeros(end, dtype=torch.uint8, pin_memory=is_pinned)
        self.numbers = self.buffer[: num_numbers * _NUMBER_BYTES].view(torch.float64)
        self.tensors = [self.buffer[start:end].view(shard.dtype).view(shard.sizes) for start, end, shard in places]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of a message."""
        return self.buffer.numel()
