"""Collectives of this process that are not finished, with their tensors."""

import _thread
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dure.compat.horovod.engine.requests import Request


class Entry:
    """One collective: its request, its tensors, and later its results or its error."""

    __slots__ = ("_lock", "error", "inputs", "is_done", "is_in_place", "ready", "request", "results", "sizes", "value")

    def __init__(
        self, request: Request, inputs: Sequence[Tensor], *, is_in_place: bool = False, ready: Any = None
    ) -> None:
        """Prepare a collective.

        Args:
            request: Request for the other ranks.
            inputs: Tensors, contiguous.
            is_in_place: Whether the results overwrite the inputs.
            ready: Event of a CUDA stream after which the inputs can be read; None for host memory.
        """
        self.request = request
        self.inputs = [tensor.data for tensor in inputs]  # no version counter of autograd is advanced
        self.is_in_place = is_in_place
        self.ready = ready
        self.results: list[Tensor] = []
        self.sizes: tuple[int, ...] = ()
        """First dimensions that an alltoall received from each rank."""
        self.value = -1
        self.error: BaseException | None = None
        self.is_done = False
        self._lock = _thread.allocate_lock()  # a quarter of the time of a threading.Event
        self._lock.acquire()

    def finish(self, error: BaseException | None = None) -> None:
        """Wake those who wait; called once."""
        self.error = error
        self.is_done = True
        self._lock.release()

    def wait(self, seconds: float = -1) -> bool:
        """Wait until it is finished, or for some seconds; return whether it is."""
        if not self.is_done and self._lock.acquire(timeout=seconds):
            self._lock.release()
        return self.is_done
