"""Handles of asynchronous calls of the backend `dure_shm`, and the thread that runs these calls in order."""

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dure.errors import PeerLost

_NO_TIMEOUT = timedelta(0)


class SharedMemoryWork(dist.Work):
    """One collective call: to be run, under way or over."""

    def __init__(self, run: Callable[[], None], outputs: Any) -> None:
        """Take a call that no thread has started.

        Args:
            run: The call.
            outputs: The tensors, or lists of tensors, that it overwrites.
        """
        super().__init__()
        self._run: Callable[[], None] | None = run
        self._outputs = outputs
        # inference mode is a thread's own, and without it what was made in it cannot be overwritten
        self._is_inference = torch.is_inference_mode_enabled()
        self._error: BaseException | None = None
        self._is_over = False
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self._future: torch.futures.Future[Any] | None = None
        self._signal: torch.futures.Future[None] | None = None
        self._signals = threading.Lock()

    def run(self) -> None:
        """Make the call, keep its error for those who wait, and tell them."""
        try:
            assert self._run is not None, "a call is made once"
            self._run()
        except BaseException as error:
            self._error = error
        self._run = None  # what it holds is needed no more
        with self._signals:
            self._is_over = True
            signal = self._signal
        self._under_way.release()
        if signal is not None:
            signal.set_result(None)

    def run_elsewhere(self) -> None:
        """Make the call in another thread than its caller's, as if in that one."""
        if self._is_inference:
            with torch.inference_mode():
                self.run()
        else:
            self.run()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the call is over.

        Args:
            timeout: No other limit than the group's own if it is zero.

        Raises:
            PeerLost: A rank ended, left, or did not come in time.
            RanksDisagree: A rank is in another call.
        """
        if not self._is_over:
            seconds = timeout.total_seconds()
            if not self._under_way.acquire(timeout=seconds if seconds > 0 else -1):
                raise PeerLost(
                    f"a call was not over after {seconds:g} s: other ranks have not made it (the timeout is over)"
                )
            self._under_way.release()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether the call is over, well or not."""
        return self._is_over

    def is_success(self) -> bool:
        """Return whether the call is over and went well."""
        return self._is_over and self._error is None

    def exception(self) -> BaseException | None:
        """Return what went wrong."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors that were overwritten."""
        return list(self._outputs)

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future of the outputs, which DDP's communication hooks wait for; it holds the error if there is one.

        Only what a callback raises reaches a future's waiters in C++, so the outputs are handed over by one.
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
    """Run calls one after another until None comes; what the thread of a group does.

    Callbacks of the calls' futures run here too, DDP's communication hooks among them; like the backward that they
    belong to they record nothing for autograd.
    """
    with torch.no_grad():
        while (work := works.get()) is not None:
            work.run_elsewhere()
            del work  # while this thread waits for the next one, tensors must not live on in it
