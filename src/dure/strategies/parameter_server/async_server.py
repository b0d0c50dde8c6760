"""Servers' side of `async_worker`: pushes are applied in the order of arrival."""

import math
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

from dure.errors import PeerLost
from dure.failures.report import is_peer_lost
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.step_facts import Requests, StepFacts
from dure.strategies.parameter_server.async_worker import OwnPace, PullNumbers, PushNumbers
from dure.strategies.parameter_server.server import Server
from dure.strategies.state.saved_state import StateSource

_MARGIN_STEPS = 3
"""Steps between the last one that the fastest loader has planned and the first in which shares are divided again. One
is planned while the message is in transit, and a step may have fewer microbatches than the one before.
"""
_NO_LIMIT = timedelta(days=3650)
"""Timeout of a listener, which waits through evaluations; a rank that waits for a push has its own timeout."""


@dataclass(slots=True)
class Arrival:
    """Push that has arrived, or the failure of the worker that should have sent it."""

    worker: int
    time: float
    error: Exception | None = None


@dataclass(slots=True)
class Held:
    """Worker that waits for its reply."""

    worker: int
    since: float
    answer: PullNumbers


@dataclass(slots=True)
class Served:
    """Measurements of a server in one step of its loop."""

    staleness: list[float] = field(default_factory=list)
    queue_seconds: list[float] = field(default_factory=list)
    queue_depth: list[float] = field(default_factory=list)


class AsyncServer(Server):
    """Server that applies pushes in the order of arrival."""

    is_synchronous = False

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.pace = OwnPace(self.serving)
        self.group = self.pace.survivors
        self.num_pull_numbers = self.pace.num_pull_numbers
        self._leads = self.number == 0
        self._living = list(self.serving.worker_ranks)
        self._gone_from = [math.inf] * self.serving.num_workers
        self._inbox: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._taken = [threading.Semaphore(0) for _ in self.serving.worker_ranks]
        self._listeners: list[threading.Thread] = []
        self._version = 0
        self._held: list[Held] = []
        self._facts: dict[int, dict[int, tuple[float, float]]] = {}
        self._served = Served()
        self._sent_bytes = 0

    def distribute(self) -> None:
        """Count the learning rates in a push."""
        self.num_push_numbers = self.pace.num_push_numbers(self.optimizer)
        super().distribute()

    def load_state_dict(self, source: StateSource) -> None:
        """Continue at the saved step."""
        super().load_state_dict(source)
        self.pace.step = source.position.step

    # listening

    def _listen(self) -> None:
        """Start to receive, with a thread per worker: c10d cannot wait for the first of several messages."""
        self._clocks = [float(self.pace.step)] * self.serving.num_workers
        self._planned = [float(self.pace.step)] * self.serving.num_workers
        self._listeners = [
            threading.Thread(target=self._receive_pushes, args=(worker,), name=f"dure-worker{worker}", daemon=True)
            for worker in self.serving.worker_ranks
        ]
        for listener in self._listeners:
            listener.start()

    def _receive_pushes(self, worker: int) -> None:
        message = self.pushes[worker]
        try:
            while True:
                self.serving.transport.receive(message.buffer, worker).wait(_NO_LIMIT)
                if message.numbers[0] < 0:
                    return
                self._inbox.put(Arrival(worker, time.perf_counter()))
                self._taken[worker].acquire()
        except Exception as error:
            self._inbox.put(Arrival(worker, time.perf_counter(), error))

    # the loop's step

    def serve_step(self, requests: Requests) -> None:
        """Begin the step that the slowest worker has begun."""
        if not self._listeners:
            self._listen()
        self.pace.step += 1
        self._served, self._sent_bytes = Served(), 0
        super().serve_step(requests)
        if self._leads:
            self._agree_on(requests, self.pace.step)

    def sync_gradients(self) -> StepFacts:
        """Serve until every living worker has pushed this step; return the facts that the pushes contained.

        Communication: G bytes of this server's rows from each worker and W bytes to each, for every push.
        """
        while min(self._clocks[worker] for worker in self._living) < self.pace.step:
            self._handle(self._next_arrival())
        facts = self._facts.pop(self.pace.step, {})
        loss_sum = sum(facts[worker][0] for worker in sorted(facts))
        loss_count = sum(facts[worker][1] for worker in sorted(facts))
        return self.pace.facts(self.sums.terms, loss_sum, loss_count)

    def optimizer_step(self) -> None:
        """Do nothing: every push was applied on arrival."""

    def _next_arrival(self) -> Arrival:
        try:
            return self._inbox.get(timeout=self.spec.timeout_seconds)
        except queue.Empty:
            late = [str(worker) for worker in self._living if self._clocks[worker] < self.pace.step]
            raise PeerLost(
                f"rank {', '.join(late)} did not push step {self.pace.step} within {self.spec.timeout_seconds:g} s"
            ) from None

    def _handle(self, arrival: Arrival) -> None:
        if arrival.error is not None:
            self._lose(arrival.worker, arrival.error)
        elif arrival.worker in self._living:
            self._take(arrival)
        self._answer_whom_nothing_holds()

    def _take(self, arrival: Arrival) -> None:
        """Apply a push."""
        turn = time.perf_counter()
        depth = self._inbox.qsize()
        worker, message = arrival.worker, self.pushes[arrival.worker]
        count = len(PushNumbers._fields)
        numbers = message.numbers.tolist()
        push, rates = PushNumbers(*numbers[:count]), numbers[count : self.num_push_numbers]
        staleness = self._version - push.version
        if push.fraction:
            self._apply(message.tensors, numbers[self.num_push_numbers :], rates, push.fraction)
            self._served.staleness.append(staleness)
        self._served.queue_seconds.append(turn - arrival.time)
        self._served.queue_depth.append(depth)
        self._taken[worker].release()
        self._clocks[worker], self._planned[worker] = push.step, push.planned_step
        self._facts.setdefault(int(push.step), {})[worker] = push.loss_sum, push.loss_count
        if self._leads:
            self._agree_on(Requests(stop=push.stop > 0, save=push.save > 0), int(push.step))
        else:
            self.pace.stop_step = min(self.pace.stop_step, push.stop_step)
            if math.isfinite(push.save_step):
                known = self.pace.save_step
                self.pace.save_step = push.save_step if math.isinf(known) else max(known, push.save_step)
        answer = PullNumbers(staleness=staleness, queue_seconds=turn - arrival.time, queue_depth=depth)
        self._held.append(Held(worker, turn, answer))

    def _apply(self, gradients: list[Tensor], used: list[float], rates: list[float], fraction: float) -> None:
        for piece, gradient, is_used in zip(self.pieces, gradients, used, strict=True):
            piece.grad = gradient if is_used else None
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * fraction
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # as set by the schedule, for a checkpoint
        self.zero_gradients()
        self._version += 1

    # replies

    def _answer_whom_nothing_holds(self) -> None:
        """Reply to every worker that is not too far ahead of the slowest."""
        most = math.inf if self.options.staleness is None else self.options.staleness
        while True:
            # repeated after each reply: a worker that turns out to be dead may have been the slowest
            slowest = min(self._clocks[worker] for worker in self._living)
            free = next((held for held in self._held if self._clocks[held.worker] - slowest <= most), None)
            if free is None:
                return
            self._held.remove(free)
            ahead, waited = self._clocks[free.worker] - slowest, time.perf_counter() - free.since
            self._send(free.worker, free.answer._replace(steps_ahead=ahead, held_seconds=waited))

    def _send(self, worker: int, answer: PullNumbers) -> None:
        numbers = answer._replace(
            version=self._version,
            stop=float(self.requests.stop),
            save=float(self.requests.save),
            stop_step=self.pace.stop_step,
            save_step=self.pace.save_step,
        )
        message = self.pull_message
        message.numbers.copy_(torch.tensor([*numbers, *self._gone_from], dtype=torch.float64))
        try:
            self.serving.transport.send(message.buffer, worker).wait()
            self._sent_bytes += message.num_bytes
        except (RuntimeError, PeerLost) as error:
            self._lose(worker, error)

    def _agree_on(self, wishes: Requests, step: int) -> None:
        """Schedule a stop or a save for the first step that no worker has begun; each learns of it before that step."""
        first_free = int(max(self._clocks[worker] for worker in self._living)) + 2
        if wishes.stop and math.isinf(self.pace.stop_step):
            self.pace.stop_step = first_free
        if wishes.save and (math.isinf(self.pace.save_step) or step > self.pace.save_step):
            self.pace.save_step = first_free

    def _lose(self, worker: int, error: Exception) -> None:
        """Continue without a worker, from a step that no worker has planned yet."""
        if worker not in self._living:
            return
        if not is_peer_lost(error):
            raise error
        if len(self._living) == 1:
            raise PeerLost(f"no worker is left: rank {worker} is gone, too ({error})") from error
        self._living.remove(worker)
        self._held = [held for held in self._held if held.worker != worker]
        self.pace.survivors.bury(worker)
        if self._leads:
            unplanned = max(self._planned[other] for other in self._living) + _MARGIN_STEPS
            # It may have run ahead of all others. The steps that it has pushed stay its share, and so does a step that
            # only another server may have received.
            self._gone_from[worker] = max(unplanned, self._clocks[worker] + 2)

    # reading, measuring, closing

    def before_reading(self) -> None:
        """Synchronise the living ranks, and send every worker the parameters: all have pushed as many steps."""
        if not self._listeners:
            self._listen()
        self.pace.survivors.agree(self._clocks)
        for worker in [worker for worker in self._living if worker not in self.pace.survivors.members]:
            self._lose(worker, PeerLost("it left the group"))
        for worker in list(self._living):
            self._send(worker, PullNumbers())
        self.serving.broadcast_buffers(self.model, self.group)

    def measured(self) -> dict[str, float]:
        """Return the updates of this step of the loop, their staleness, and the queueing of pushes."""
        served = self._served
        return {
            "updates": float(len(served.staleness)),
            "staleness": _mean(served.staleness),
            "staleness_max": max(served.staleness, default=0.0),
            "queue_seconds": _mean(served.queue_seconds),
            "queue_depth": max(served.queue_depth, default=0.0),
        }

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes of the replies in this step of the loop."""
        return self._sent_bytes

    def close(self) -> None:
        """Receive the last message of every living worker."""
        if not self._listeners:
            self._listen()
        for worker in self._living:
            self._listeners[worker].join(timeout=self.spec.timeout_seconds)
        super().close()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
