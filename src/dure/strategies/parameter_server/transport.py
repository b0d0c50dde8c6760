"""Transport between workers and servers: one message at a time from rank to rank, any number in flight."""

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

TAG = 41
"""Tag of every message between a worker and a server, which separates them from all others."""


class UnderWay(Protocol):
    """Handle of a message in flight."""

    def wait(self, timeout: timedelta = ..., /) -> Any:
        """Wait until its buffer may be read, or written again. Raises if the other rank is gone."""


class Transport(ABC):
    """Point-to-point messages. Between two ranks they arrive in the order in which they were sent."""

    @abstractmethod
    def send(self, message: Tensor, rank: int) -> UnderWay:
        """Start to send a buffer of bytes, which must not change until the message has been sent."""

    @abstractmethod
    def receive(self, message: Tensor, rank: int) -> UnderWay:
        """Start to receive a message of exactly the buffer's size."""

    def close(self, *, is_whole: bool) -> None:
        """Close the transport; no message is in flight any more.

        Args:
            is_whole: Whether all ranks live.
        """


class C10dTransport(Transport):
    """Transport over the default process group: gloo's pair of sockets between the two ranks."""

    def send(self, message: Tensor, rank: int) -> UnderWay:
        """Start `isend`. Communication: the message's bytes to one rank, not blocking."""
        return _there(dist.isend(message, rank, tag=TAG))

    def receive(self, message: Tensor, rank: int) -> UnderWay:
        """Start `irecv`. Communication: one message from one rank, not blocking."""
        return _there(dist.irecv(message, rank, tag=TAG))


def _there(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the default process group"
    return work
