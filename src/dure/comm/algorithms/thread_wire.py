"""Ranks as threads of this process: the same wire without sockets, to demonstrate and test algorithms."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dure.comm.algorithms.wire import CountedWire, Message, Peered, Transfer
from dure.errors import PeerLost

Answer = TypeVar("Answer")

TIMEOUT_SECONDS = 20.0
"""Maximum wait for a message, which no correct algorithm reaches between threads."""


class ThreadWire(CountedWire):
    """Wire of one thread.

    It is stricter than a network. A receive buffer is filled with the maximum value until it was waited for, and a sent
    tensor is compared afterwards. An algorithm that reads or overwrites too early is therefore caught every time, and
    not one time in a thousand.
    """

    def __init__(
        self, rank: int, mailboxes: "Mailboxes", hosts: Sequence[int] | None = None, log: list[Message] | None = None
    ) -> None:
        super().__init__(rank, mailboxes.world_size, hosts, log)
        self._mailboxes = mailboxes
        self._expected: dict[int, deque[_Landing]] = {peer: deque() for peer in range(self.world_size)}

    def _carry(self, outgoing: Sequence[Peered], incoming: Sequence[Peered]) -> Transfer:
        landings = [_Landing(tensor, peer) for tensor, peer in incoming]
        for landing in landings:
            self._expected[landing.peer].append(landing)
        copies = [(tensor, tensor.clone()) for tensor, _ in outgoing]
        for (_, copy), (_, peer) in zip(copies, outgoing, strict=True):
            self._mailboxes.between(self.rank, peer).put(copy)
        return _ThreadTransfer(self, landings, copies)

    def receive_until(self, landing: "_Landing") -> None:
        """Receive the messages of this landing's peer in order until this landing is filled."""
        expected = self._expected[landing.peer]
        mailbox = self._mailboxes.between(landing.peer, self.rank)
        while not landing.is_filled:
            try:
                sent = mailbox.get(timeout=TIMEOUT_SECONDS)
            except queue.Empty:
                raise PeerLost(
                    f"rank {landing.peer} sent nothing to rank {self.rank} for {TIMEOUT_SECONDS:g} s: ranks wait for "
                    "each other in a circle, or one waits for a message that nobody sends"
                ) from None
            if sent is None:
                mailbox.put(None)
                raise PeerLost(f"rank {landing.peer} ended while rank {self.rank} waited for a message from it")
            expected.popleft().fill(sent)


class Mailboxes:
    """Messages sent and not yet received, by pair of ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        ranks = range(world_size)
        self._queues: dict[tuple[int, int], queue.SimpleQueue[Tensor | None]] = {
            (source, destination): queue.SimpleQueue() for source in ranks for destination in ranks
        }

    def between(self, source: int, destination: int) -> "queue.SimpleQueue[Tensor | None]":
        """Return the queue from one rank to another."""
        return self._queues[source, destination]

    def close(self, rank: int) -> None:
        """Wake all ranks that wait for a rank that has ended."""
        for destination in range(self.world_size):
            self.between(rank, destination).put(None)


class _Landing:
    """Buffer for an expected message."""

    def __init__(self, tensor: Tensor, peer: int) -> None:
        self.peer = peer
        self.is_filled = False
        self._tensor = tensor
        limits = torch.finfo(tensor.dtype) if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype)
        tensor.fill_(limits.max)

    def fill(self, sent: Tensor) -> None:
        if (sent.numel(), sent.dtype) != (self._tensor.numel(), self._tensor.dtype):
            raise RuntimeError(
                f"rank {self.peer} sent {sent.numel()} elements of {sent.dtype} where {self._tensor.numel()} of "
                f"{self._tensor.dtype} were expected: both sides have to cut the vector alike"
            )
        self._tensor.copy_(sent)
        self.is_filled = True


class _ThreadTransfer(Transfer):
    def __init__(self, wire: ThreadWire, landings: list[_Landing], copies: list[tuple[Tensor, Tensor]]) -> None:
        self._wire = wire
        self._landings = landings
        self._copies = copies

    def wait(self) -> None:
        """Receive, and check that sent tensors are unchanged."""
        for tensor, copy in self._copies:
            if not torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8)):  # bytes, so that NaN equals itself
                raise RuntimeError("a tensor was overwritten while it was being sent: wait for the transfer first")
        for landing in self._landings:
            self._wire.receive_until(landing)


def on_threads(
    world_size: int,
    work: Callable[[ThreadWire], Answer],
    *,
    hosts: Sequence[int] | None = None,
    log: list[Message] | None = None,
) -> list[Answer]:
    """Run `work(wire)` for every rank in its own thread and return the results by rank.

    Args:
        world_size: Number of ranks.
        work: Function of each rank; its wire has its bytes and messages.
        hosts: Host number of each rank; None if all are on one host.
        log: Receives the messages of all ranks, in the order in which they were started.

    Raises:
        Exception: The first error of a rank that was not caused by the loss of another.
        PeerLost: A rank waited for a message from one that had ended.
    """
    mailboxes = Mailboxes(world_size)
    answers: list[Any] = [None] * world_size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            answers[rank] = work(ThreadWire(rank, mailboxes, hosts, log))
        except BaseException as error:
            failures.append(error)
        finally:
            mailboxes.close(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((error for error in failures if not isinstance(error, PeerLost)), failures[0])
    return answers
