"""Asynchronous parameter servers (without `sync`): every push is applied on arrival. Not exact.

Downpour SGD (Dean et al. 2012, section 4.1) with bounded staleness (Ho et al. 2013, section 3): a worker whose push of
step `c` has been applied may begin step `c + 1` only when the slowest has pushed step `c - k`; until then its reply is
held back. One push moves the weights by the learning rate times the worker's fraction of the global batch, so that all
pushes of a step move them as far as a synchronous step would.

A server's step `t` ends when every worker has pushed step `t`, so servers go through the same loop as workers, at the
pace of the slowest. Actions that all ranks take at the same step (stop, save, replace a dead worker's share) are
scheduled by the first server for a step that no worker has begun, and sent to each worker with its next reply.

The run continues without a worker that dies, even the first: the lowest living rank then acts for all. Each server has
rows that no other process has, so its death ends the run.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from dure.comm.survivors import SurvivorsGroup
from dure.errors import PeerLost
from dure.strategies.contract.batch_parts import DataShare
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.step_facts import LossTerm, LostShare, Requests, StepFacts
from dure.strategies.parameter_server.serving import Serving
from dure.strategies.parameter_server.worker import Worker
from dure.strategies.state.saved_state import StateSource
from dure.torchcompat.optimizers import found_overflows
from dure.torchcompat.tensors import multiply_


class PushNumbers(NamedTuple):
    """Header of a push, before the gradients. After it: the learning rates of all parameter groups."""

    step: float
    """Step that was computed; -1 when the worker leaves."""
    planned_step: float
    """Last step for which the worker's loader has planned samples."""
    version: float
    """Number of updates that this server had applied when the worker pulled."""
    fraction: float
    """Fraction of the global batch that the gradient covers; 0 if there is nothing to apply."""
    loss_sum: float
    loss_count: float
    stop: float
    save: float
    stop_step: float
    save_step: float
    """Agreed step of the next save that the worker knows of, for servers that do not agree on it themselves."""


class PullNumbers(NamedTuple):
    """Header of a pull, before the parameters. After it: for each worker, the first step in which it has no share."""

    version: float = 0.0
    staleness: float = 0.0
    """Updates by other workers between this worker's pull and its push."""
    queue_seconds: float = 0.0
    """Seconds from the push's arrival to its turn."""
    queue_depth: float = 0.0
    """Number of pushes that were waiting then."""
    steps_ahead: float = 0.0
    """Steps by which the worker is ahead of the slowest one when it gets its reply."""
    held_seconds: float = 0.0
    """Seconds from the push's turn to the reply."""
    stop: float = 0.0
    save: float = 0.0
    """Nonzero if the server itself requests a save. Workers pass this and `stop` on to the first server."""
    stop_step: float = math.inf
    save_step: float = math.inf
    """Agreed steps after which all ranks stop, or save; infinite if there is none."""


class OwnPace:
    """Steps of a rank that does not wait for all others, and the living ranks."""

    def __init__(self, serving: Serving) -> None:
        self.survivors = SurvivorsGroup(
            serving.everyone, leader=serving.server_ranks[0], expendable=serving.worker_ranks
        )
        self.num_pull_numbers = len(PullNumbers._fields) + serving.num_workers
        self.step = 0
        """Steps begun since the start of the run."""
        self.stop_step = self.save_step = math.inf

    @staticmethod
    def num_push_numbers(optimizer: Optimizer) -> int:
        """Return the length of the header of a push, including the learning rates."""
        return len(PushNumbers._fields) + len(optimizer.param_groups)

    def facts(self, terms: Sequence[LossTerm], loss_sum: float, loss_count: float) -> StepFacts:
        """Return facts that no other rank knows, with the agreed requests for this step."""
        stop, save = self.step >= self.stop_step, self.step == self.save_step
        return StepFacts([loss_sum, loss_count, stop, save], terms, is_local=True)


class AsyncWorker(Worker):
    """Worker that pushes as soon as it has a gradient, and continues with the current parameters."""

    is_synchronous = False

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.pace = OwnPace(self.serving)
        self.group = self.pace.survivors
        self.num_pull_numbers = self.pace.num_pull_numbers
        self._own = context.group.rank
        self._gone_from = [math.inf] * self.serving.num_workers
        self._planned_step = 0
        self._passed_on = Requests()
        self._answers: list[PullNumbers] = []
        self._noted_lost = set[int]()
        self._lost: list[LostShare] = []

    def distribute(self) -> None:
        """Count the learning rates in a push."""
        self.num_push_numbers = self.pace.num_push_numbers(self.optimizer)
        super().distribute()

    def load_state_dict(self, source: StateSource) -> None:
        """Continue at the saved step."""
        super().load_state_dict(source)
        self.pace.step = source.position.step

    def share_at(self, step: int) -> tuple[int, int]:
        """Return this worker's share among those alive at a step; it is recorded, because it can no longer change."""
        self._planned_step = max(self._planned_step, step)
        living = [worker for worker in self.serving.worker_ranks if self._gone_from[worker] > step]
        return living.index(self._own), len(living)

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Accumulate the gradients of this worker's share, and count its samples."""
        self.pace.step += 1
        self._num_samples, self._global_samples = 0, global_samples

        def counted() -> Iterator[Microbatch]:
            for microbatch in microbatches:
                self._num_samples += 0 if microbatch.is_padding else microbatch.num_samples
                yield microbatch

        super().forward_backward(counted(), global_samples=global_samples, requests=requests)

    def sync_gradients(self) -> StepFacts:
        """Return this worker's own facts; it pushes once they are known to be finite."""
        self._loss_sum, self._loss_count, self._stop, self._save = self.known_facts()
        return self.pace.facts(self.sums.terms, self._loss_sum, self._loss_count)

    def optimizer_step(self) -> None:
        """Push the mean gradient of the share, clipped by its own norm, and pull when the servers reply.

        Communication: G bytes in one message to each server, W bytes in one from each; waits for both.
        """
        fraction = self._num_samples / self._global_samples
        if fraction and self._loss_count:
            # the losses were weighted for the global batch
            items = self._global_samples / self._num_samples
            if gradients := [p.grad for p in self.trainable if p.grad is not None]:
                factor = items if self.expectation is None else self.expectation / self._loss_count
                multiply_(gradients, factor)
            if self.has_overflowed():
                fraction = 0.0
            elif self.spec.clip_norm is not None:
                self.clip_gradients(self.stepped_parameters(), self.spec.clip_norm)
            self.write_gradients()
        else:
            fraction = 0.0
        self._write_numbers(fraction)
        self.push()
        self.pull()
        self._learn()
        self.zero_gradients()

    def has_overflowed(self) -> bool:
        """Unscale fp16's gradients, update this worker's loss scale, and return whether one overflowed."""
        scaler = self.precision.scaler
        if scaler is None:
            return False
        self.precision.unscale(self.optimizer)
        overflows = found_overflows(scaler, self.optimizer)
        has_overflowed = any(bool(found.item()) for found in overflows)
        self.precision.update()
        return has_overflowed

    def _write_numbers(self, fraction: float) -> None:
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        for push, pull in zip(self.pushes, self.pulls, strict=True):
            numbers = PushNumbers(
                step=self.pace.step,
                planned_step=max(self._planned_step, self.pace.step),
                version=pull.numbers[0].item(),
                fraction=fraction,
                loss_sum=self._loss_sum,
                loss_count=self._loss_count,
                stop=self._stop or self._passed_on.stop,
                save=self._save or self._passed_on.save,
                stop_step=self.pace.stop_step,
                save_step=self.pace.save_step,
            )
            push.numbers[: self.num_push_numbers] = torch.tensor([*numbers, *rates], dtype=torch.float64)

    def _learn(self) -> None:
        """Record the numbers that the servers sent with the parameters."""
        count = len(PullNumbers._fields)
        pulled = [pull.numbers.tolist() for pull in self.pulls]
        self._answers = [PullNumbers(*numbers[:count]) for numbers in pulled]
        self._passed_on = Requests(
            stop=any(answer.stop for answer in self._answers), save=any(answer.save for answer in self._answers)
        )
        self.pace.stop_step, self.pace.save_step = self._answers[0].stop_step, self._answers[0].save_step
        for worker, step in enumerate(pulled[0][count:]):
            if step != self._gone_from[worker] and step <= self._planned_step:
                raise PeerLost(
                    f"rank {worker} was lost, and the shares of step {step:g} were divided again too late for rank "
                    f"{self._own}, whose loader is at step {self._planned_step}: use fewer --num-workers"
                )
            self._gone_from[worker] = step

    def measured(self) -> dict[str, float]:
        """Return the servers' measurements of this step's push, the maximum over all servers."""
        names = ("staleness", "queue_seconds", "queue_depth", "steps_ahead", "held_seconds")
        return {name: max(getattr(answer, name) for answer in self._answers) for name in names}

    def before_reading(self) -> None:
        """Synchronise with the other living ranks, and take the parameters, the same on all.

        Communication: one exchange of the survivors, then W bytes to each worker.
        """
        agreed = self.pace.survivors.agree(None)
        living = [member for member in self.pace.survivors.members if member in self.serving.worker_ranks]
        self.take_share(DataShare(index=living.index(self._own), count=len(living)))
        self.pull()
        self._learn()
        self._note_lost(living, [clocks for clocks in agreed if clocks is not None])
        self.serving.broadcast_buffers(self.model, self.group)

    def _note_lost(self, living: list[int], clocks: list[list[float]]) -> None:
        """Record the shares that a dead worker did not push, or not to all servers, until others take them over."""
        for worker in set(self.serving.worker_ranks) - set(living) - self._noted_lost:
            self._noted_lost.add(worker)
            on_all, on_any = min(of[worker] for of in clocks), max(of[worker] for of in clocks)
            # workers that died earlier have no share any more
            for step in range(int(on_all) + 1, int(self._gone_from[worker])):
                sharing = [w for w in self.serving.worker_ranks if self._gone_from[w] > step]
                self._lost.append(
                    LostShare(
                        rank=worker,
                        step=step,
                        data_rank=sharing.index(worker),
                        data_world_size=len(sharing),
                        is_partly_used=step <= on_any,
                    )
                )

    def lost_shares(self) -> list[LostShare]:
        """Return the shares that were lost with their worker, once."""
        lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        """Send the last message to the servers, which wait for it."""
        for push in self.pushes:
            push.numbers[0] = -1.0
        self.push()
        super().close()
