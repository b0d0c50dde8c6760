"""Servers of `ParameterServerDDP`: all workers together, or each at its own pace."""

import math
import queue
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch

from dure.errors import PeerLost, TaskInvalid
from dure.strategies.parameter_server.shards import Message
from dure.strategies.parameter_server.transport import Transport

GOES_ON, LEAVES, UNEVEN = 0.0, -1.0, 1.0
"""Only number of a header: a worker goes on or leaves, and a server goes on or has found an uneven number of steps."""
UNEVEN_TEXT = (
    "some workers have left the parameter servers and others have not, so they have made different numbers of "
    "backwards: give every worker as many batches"
)
_LEFT_OPEN = "has ended without close(): call it on every worker after its last step"
_NO_LIMIT = timedelta(days=3650)
"""Timeout of a listener, which waits through evaluations."""


def serve_together(transport: Transport, pushes: Sequence[Message], reply: Message) -> None:
    """Send all workers the mean of their gradients in each step, until they leave.

    A gradient that some workers lack counts as zero there; the reply's flag is zero for one that no worker has.

    Args:
        transport: Transport of messages.
        pushes: Message of each worker, by rank.
        reply: Message to all.

    Raises:
        TaskInvalid: Only some leave.
        PeerLost: A worker is gone.
    """
    first, *others = pushes
    while True:
        under_way = [transport.receive(push.buffer, rank) for rank, push in enumerate(pushes)]
        for rank, message in enumerate(under_way):
            try:
                message.wait()
            except RuntimeError as error:
                raise PeerLost(f"rank {rank} {_LEFT_OPEN}") from error
        num_leaving = sum(push.numbers[0].item() == LEAVES for push in pushes)
        is_uneven = 0 < num_leaving < len(pushes)
        reply.numbers[0] = UNEVEN if is_uneven else GOES_ON
        reply.numbers[1:] = torch.stack([push.numbers[1:] for push in pushes]).amax(0)
        for position, mean in enumerate(reply.tensors):
            # the sum of scaled gradients in halves would be infinite
            is_half = mean.dtype is torch.float16
            mean.copy_(first.tensors[position] / len(pushes) if is_half else first.tensors[position])
            for push in others:
                mean.add_(push.tensors[position], alpha=1 / len(pushes) if is_half else 1)
            if not is_half:
                mean.div_(len(pushes))
        for sent in [transport.send(reply.buffer, rank) for rank in range(len(pushes))]:
            sent.wait()
        if is_uneven:
            raise TaskInvalid(UNEVEN_TEXT)
        if num_leaving:
            return


class AsyncService:
    """Server that moves its weights by every push on arrival, and sends them back."""

    def __init__(
        self, transport: Transport, pushes: Sequence[Message], weights: Message, staleness: int | None
    ) -> None:
        """Begin with weights.

        Args:
            transport: Transport of messages.
            pushes: Message of each worker, by rank.
            weights: Weights of this server, which are the reply too.
            staleness: Most steps that a worker may be ahead of the slowest; None for any number.
        """
        self._transport = transport
        self._pushes = pushes
        self._weights = weights
        self._most_ahead = math.inf if staleness is None else staleness
        self._inbox = queue.SimpleQueue[tuple[int, Exception | None]]()
        self._taken = [threading.Semaphore(0) for _ in pushes]
        self._steps = dict.fromkeys(range(len(pushes)), 0)
        """Steps of each worker that has not left."""
        self._held: list[int] = []
        """Workers that wait for a reply."""
        self._left: list[int] = []

    def run(self) -> None:
        """Serve until every worker has left, then send all of them the last weights.

        Raises:
            PeerLost: No worker has left in order.
        """
        for worker in self._steps:
            threading.Thread(target=self._listen, args=(worker,), name=f"dure-worker{worker}", daemon=True).start()
        while self._steps:
            worker, error = self._inbox.get()
            self._take(worker, error)
            self._answer()
        if not self._left:
            raise PeerLost(f"every worker {_LEFT_OPEN}")
        self._send(self._left)

    def _listen(self, worker: int) -> None:
        push = self._pushes[worker]
        try:
            while True:
                self._transport.receive(push.buffer, worker).wait(_NO_LIMIT)
                is_last = push.numbers[0].item() == LEAVES
                self._inbox.put((worker, None))
                self._taken[worker].acquire()
                if is_last:
                    return
        except Exception as error:
            self._inbox.put((worker, error))

    def _take(self, worker: int, error: Exception | None) -> None:
        if error is not None:  # the others go on without it
            self._steps.pop(worker, None)
            self._held = [held for held in self._held if held != worker]
            return
        push = self._pushes[worker]
        for weights, movement in zip(self._weights.tensors, push.tensors, strict=True):
            weights.add_(movement, alpha=1 / len(self._pushes))
        if push.numbers[0].item() == LEAVES:
            del self._steps[worker]
            self._left.append(worker)
        else:
            self._steps[worker] += 1
            self._held.append(worker)
        self._taken[worker].release()

    def _answer(self) -> None:
        """Reply to every worker that is not too far ahead of the slowest."""
        if not self._steps:
            return
        slowest = min(self._steps.values())
        free = [worker for worker in self._held if self._steps[worker] - slowest <= self._most_ahead]
        self._held = [worker for worker in self._held if worker not in free]
        self._send(free)

    def _send(self, workers: Sequence[int]) -> None:
        for worker in workers:
            try:
                self._transport.send(self._weights.buffer, worker).wait()
            except RuntimeError:  # the listener tells of its loss
                continue
