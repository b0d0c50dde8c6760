"""Handles of asynchronous calls of the backend `dure_shm`, and the thread that runs these calls in order."""

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dure.comm.shared_memory.memory import TIMED_OUT
from dure.errors import PeerLost

_NO_TIMEOUT = timedelta(0)


class SharedMemoryWork(dist.Work):
    """A collective call that is pending, running or completed."""

    def __init__(self, run: Callable[[], None], outputs: Any) -> None:
        """Prepare a call that no thread has started.

        Args:
            run: Function that makes the call.
            outputs: Tensors, or lists of tensors, that it overwrites.
        """
        super().__init__()
        self._run: Callable[[], None] | None = run
        self._outputs = outputs
        # inference mode is thread-local, and inference tensors cannot be overwritten without it
        self._is_inference = torch.is_inference_mode_enabled()
        self._error: BaseException | None = None
        self._is_over = False
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self._future: torch.futures.Future[Any] | None = None
        self._signal: torch.futures.Future[None] | None = None
        self._signals = threading.Lock()

    def run(self) -> None:
        """Make the call, keep its error for those who wait, and notify them."""
        try:
            assert self._run is not None, "a call is made once"
            self._run()
        except BaseException as error:
            self._error = error
        self._run = None  # release what it references
        with self._signals:
            self._is_over = True
            signal = self._signal
        self._under_way.release()
        if signal is not None:
            signal.set_result(None)

    def run_elsewhere(self) -> None:
        """Make the call in another thread as if it were the caller's."""
        if self._is_inference:
            with torch.inference_mode():
                self.run()
        else:
            self.run()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the call is completed.

        Args:
            timeout: Maximum time to wait; zero for the group's own timeout.

        Raises:
            PeerLost: A rank ended, left, or did not arrive in time.
            RanksDisagree: A rank is in another call.
        """
        if not self._is_over:
            seconds = timeout.total_seconds()
            if not self._under_way.acquire(timeout=seconds if seconds > 0 else -1):
                raise PeerLost(f"a call was not over after {seconds:g} s: other ranks have not made it ({TIMED_OUT})")
            self._under_way.release()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether the call is completed, successfully or not."""
        return self._is_over

    def is_success(self) -> bool:
        """Return whether the call is completed successfully."""
        return self._is_over and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the call, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors that were overwritten."""
        return list(self._outputs)

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future of the outputs, for DDP's communication hooks; it holds the error if there is one.

        Only errors of a callback reach a future's waiters in C++, so the outputs are passed on by a callback.
        """
        with self._signals:
            if self._future is not None:
                return self._future
            signal: torch.futures.Future[None] = torch.futures.Future()
            self._future = future = signal.then(self._hand_over)
            if not self._is_over:
                self._signal = signal
                return future
        signal.set_result(None)
        return future

    def _hand_over(self, _: "torch.futures.Future[None]") -> Any:
        if self._error is not None:
            raise self._error
        return self._outputs


def run_works(works: "queue.SimpleQueue[SharedMemoryWork | None]") -> None:
    """Run calls one after another until None arrives; the main function of a group's thread.

    Callbacks of the calls' futures run here too, including DDP's communication hooks. Like the backward that they
    belong to, they record nothing for autograd.
    """
    with torch.no_grad():
        while (work := works.get()) is not None:
            work.run_elsewhere()
            del work  # otherwise its tensors would stay alive while this thread waits for the next call
