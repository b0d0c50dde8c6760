"""Training loop, the same for every strategy, on one device or on many."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from dure.errors import DataInvalid, LossNotFinite, TaskInvalid
from dure.measure.backward_clock import BackwardClock, backward_seconds
from dure.measure.step_clock import StepClock
from dure.records.step_record import StepRecord
from dure.strategies.contract.step_facts import Requests, StepFacts
from dure.strategies.contract.strategy import Strategy
from dure.torchcompat.tensors import copy_all
from dure.training.session.loader import Loader
from dure.training.session.sample_order import GlobalBatch, SampleOrder
from dure.training.step_samples import PlannedStep, RankBatch, samples_of
from dure.training.task.task import Schedule

MOST_SKIPPED = 10
"""Maximum consecutive steps that may be skipped. After that many, the weights are at fault, not the batches."""
_LOOK, _SKIP = "look at these samples and the learning rate", ", or leave such steps out with --on-nonfinite skip"
_EMPTY_PART = (
    "this loss is no mean over samples, and the parts of a batch that ranks and microbatches compute may hold nothing "
    "that it counts: return dure.Sum(total, count)"
)
_SHOWN_INDICES = 32


@dataclass(slots=True)
class LaunchedStep:
    """Step that has been launched, but is not yet known to have succeeded."""

    number: int
    batch: GlobalBatch
    share: RankBatch
    facts: StepFacts
    marks: list[Any]
    """Ends of: the previous step, the wait for data, forward and backward, synchronisation, the optimiser's step."""
    backwards: list[Any]
    """Begin and end of each backward."""
    data_seconds: float
    gradients_ready: float | None
    known: tuple[float, float, Requests] | None = None
    """Facts of the step, once they have been read and found finite."""
    measured: dict[str, float] | Callable[[], dict[str, float]] | None = None
    sent_bytes: int = 0
    skipped: LossNotFinite | None = None
    """Reason why the weights were left unchanged; None if they were updated."""

    def forget(self, seconds: float) -> None:
        """Exclude seconds from the time of the step, because they were spent on something else."""
        if isinstance(self.marks[0], float):  # an accelerator's marks are events, and it continues to compute meanwhile
            self.marks[:] = [mark + seconds for mark in self.marks]  # those of backwards are only compared in pairs
            if self.gradients_ready is not None:
                self.gradients_ready += seconds


class StepOutcome(NamedTuple):
    """Completed step: its record, and the requests that ranks made in it."""

    record: StepRecord
    requests: Requests
    skipped: LossNotFinite | None = None
    """Reason why it left the weights unchanged; None if it updated them."""


class Boundary(NamedTuple):
    """Boundary between two steps, at which weights may be read."""

    step: int
    """Number of steps launched."""
    batch: GlobalBatch
    """Batch of the last step launched; its `samples_seen` is the position."""
    outcomes: list[StepOutcome]
    """Outcomes of the steps known by now; on an accelerator one step behind."""


class TrainingLoop:
    """Steps from a position to the end of the run.

    On the CPU a step's facts are read before the optimiser's step, so that a loss that is not finite never affects the
    weights. On an accelerator they are read one step later, so that the device never waits for the host. The weights
    are then lost, but the checkpoints are not. If the strategy needs the facts, or steps may be skipped, it is as on
    the CPU.
    """

    def __init__(
        self,
        strategy: Strategy,
        loader: Loader,
        order: SampleOrder,
        *,
        microbatch_size: int | None,
        schedule: Schedule | None,
        requested: Callable[[], Requests],
        record_samples: bool,
        skips_nonfinite: bool = False,
        begin_step: Callable[[int], None] | None = None,
        before_change: Callable[[], float] | None = None,
    ) -> None:
        self.strategy = strategy
        self.group = strategy.group
        self.samples = samples_of(strategy, loader, order, microbatch_size)
        self.schedule = schedule
        self.requested = requested
        self.record_samples = record_samples
        self.clock = StepClock(strategy.device)
        self.backwards = BackwardClock(self.clock)
        """Observer of the backwards, once the trainer lets it see them."""
        self.skips_nonfinite = skips_nonfinite
        """True if a step whose loss is not finite is skipped, instead of ending the run."""
        self._num_skipped = 0
        """Number of steps skipped in a row."""
        self.lag = 0 if skips_nonfinite else strategy.facts_lag
        """Number of steps between the launch of a step and reading its facts."""
        self.begin_step = begin_step
        """Callback before each step is computed, in which injected faults happen."""
        self.before_change = before_change
        """Callback between the gradients and the change of the weights; returns the seconds that it took."""
        self._pending: deque[LaunchedStep] = deque()
        self._last_end = self.clock.mark()

    def boundaries(self, samples_seen: int, total_samples: int, step: int) -> Iterator[Boundary]:
        """Train from a position, and yield between any two steps for the caller to act."""
        self.samples.begin(samples_seen, total_samples, step)
        self.restart_clock()
        try:
            while (planned := self.samples.next_step()) is not None:
                step += 1
                self._pending.append(self._launch(step, planned))
                self.samples.is_under_way = False
                outcomes = [self._finish(self._pending.popleft())] if len(self._pending) > self.lag else []
                yield Boundary(step, planned.batch, outcomes)
        finally:
            self.samples.end()

    def microbatch_under_way(self) -> int | None:
        """Return the maximum samples that a device computes at once in the current step; None between two steps."""
        return self.samples.microbatch_under_way()

    def drain(self) -> list[StepOutcome]:
        """Return the outcomes of all steps that were launched and not yet read."""
        outcomes = []
        while self._pending:
            outcomes.append(self._finish(self._pending.popleft()))
        return outcomes

    def restart_clock(self) -> None:
        """Start the next step's wall time now, because the time in between was not spent on training."""
        self._last_end = self.clock.mark()

    def _launch(self, number: int, planned: PlannedStep) -> LaunchedStep:
        strategy, samples, mark = self.strategy, self.samples, self.clock.mark
        batch, share = planned
        marks: list[Any] = [self._last_end, mark()]
        if self.begin_step is not None:
            self.begin_step(number)
        first_wait = samples.wait_seconds
        buffers, values = self._kept_buffers() if self.skips_nonfinite else ([], [])
        self.backwards.take()  # those of comparisons between the steps
        samples.compute(planned, self.requested())
        backwards = self.backwards.take()
        marks.append(mark())
        facts = strategy.sync_gradients()
        marks.append(mark())
        waited, ready = samples.wait_seconds, strategy.last_gradient_time
        step = LaunchedStep(number, batch, share, facts, marks, backwards, waited, ready)
        if self.lag == 0:
            if isinstance(marks[1], float):
                marks[1] += samples.wait_seconds - first_wait  # waits for later microbatches were inside the span
            step.known = self._check_finite(step)
        if self.before_change is not None and (waited := self.before_change()):
            step.forget(waited)
        if step.skipped is None:
            if self.schedule is not None:
                self._set_learning_rates(self.schedule, batch.samples_seen - len(batch.indices))
            strategy.check_groups()
            strategy.optimizer_step()
        else:
            strategy.skip_step()
            copy_all(buffers, values)
        step.measured = strategy.measured()
        step.sent_bytes = strategy.sent_bytes(len(share.microbatches))
        self._last_end = mark()
        marks.append(self._last_end)
        return step

    def _kept_buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the model's buffers and copies of them: running statistics would keep values that are not finite."""
        buffers = [buffer for model in self.strategy.evaluation_models() for buffer in model.buffers()]
        return buffers, [buffer.clone() for buffer in buffers]

    def _set_learning_rates(self, schedule: Schedule, samples_seen: int) -> None:
        factor = schedule(samples_seen)
        if not math.isfinite(factor):
            raise TaskInvalid(
                f"the task's schedule gave {factor} at {samples_seen} samples seen: return a finite factor on the "
                "learning rate"
            )
        for group in self.strategy.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor  # a group may have been added later

    def _finish(self, step: LaunchedStep) -> StepOutcome:
        loss_sum, loss_count, requests = step.known or self._check_finite(step)
        spans = self.clock.spans(step.marks)
        _, compute_seconds, sync_seconds, optimizer_seconds = spans
        in_backward = backward_seconds(step.backwards)
        if step.gradients_ready is not None:
            only_communication = step.marks[2] - step.gradients_ready
            sync_seconds += only_communication
            compute_seconds -= only_communication
            if in_backward is not None:  # gradients are waited for at its end
                in_backward = max(0.0, in_backward - only_communication)
        if step.skipped is None:
            self.strategy.expect(loss_count)
        # an accelerator that still has work does not wait for data, although the host does
        data_seconds = step.data_seconds if self.lag == 0 else min(step.data_seconds, spans[0])
        record = StepRecord(
            time=time.time(),
            step=step.number,
            epoch=step.batch.epoch,
            samples_seen=step.batch.samples_seen,
            loss_sum=loss_sum,
            loss_count=loss_count,
            data_seconds=data_seconds,
            forward_backward_seconds=compute_seconds,
            sync_seconds=sync_seconds,
            optimizer_seconds=optimizer_seconds,
            wall_seconds=sum(spans),
            sent_bytes=step.sent_bytes,
            samples=self._recorded_samples(step) if self.record_samples else None,
            measured=step.measured() if callable(step.measured) else step.measured,
            backward_seconds=None if in_backward is None else min(in_backward, compute_seconds),
        )
        return StepOutcome(record, requests, step.skipped)

    def _recorded_samples(self, step: LaunchedStep) -> list[int]:
        is_mine = self.strategy.share.takes_samples and self.strategy.share.leads
        return step.share.indices.tolist() if is_mine else []

    def _check_finite(self, step: LaunchedStep) -> tuple[float, float, Requests]:
        facts = step.facts.read()
        loss_sum, loss_count, requests = facts
        # a rank with facts of its own may have had no samples in this step
        if math.isfinite(loss_sum) and (loss_count > 0 or step.facts.is_local):
            self._num_skipped = 0
            return facts
        if math.isfinite(loss_sum):
            raise DataInvalid(
                f"the loss of step {step.number} has a count of {loss_count:g} over all ranks: there is nothing to "
                "divide by; a batch needs at least one counted item"
            )
        error = LossNotFinite(*self._who_is_not_finite(step, loss_sum))
        self._num_skipped += 1
        if not self.skips_nonfinite:
            way_on = _LOOK + (_SKIP if "on_nonfinite" in self.strategy.info.settings else "")
            is_in_parts = len(self.strategy.parts.of_loss(len(step.batch.indices))) > 1
            if is_in_parts and self.strategy.traits.not_additive is not None:
                way_on = f"{_EMPTY_PART}; or {way_on}"
            raise LossNotFinite(f"{error}; {way_on}", error.culprits)
        if self._num_skipped > MOST_SKIPPED:
            raise LossNotFinite(f"{error}; the {MOST_SKIPPED} steps before it were skipped too", error.culprits)
        step.skipped = error
        return 0.0, 0.0, requests

    def _who_is_not_finite(self, step: LaunchedStep, loss_sum: float) -> tuple[str, list[dict[str, Any]]]:
        samples = step.share.indices.tolist()
        mine = {"rank": self.group.rank, "finite": step.facts.is_locally_finite(), "samples": samples}
        everyone = [mine] if step.facts.is_local else self.group.all_gather_json(mine)
        # finite on every rank but not in sum: the sum itself overflowed, and every rank contributed
        culprits = [one for one in everyone if not one["finite"]] or everyone
        where = f"step {step.number} of epoch {step.batch.epoch + 1}"
        named = "; ".join(f"rank {one['rank']}, samples {_shown(one['samples'])}" for one in culprits)
        if len(culprits) == len(everyone) > 1:
            named = f"on every rank: {named}"
        return f"the loss is {loss_sum:g} at {where}: {named}", culprits


def _shown(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:_SHOWN_INDICES]))
    return f"[{shown}]" if len(indices) <= _SHOWN_INDICES else f"[{shown}, … {len(indices) - _SHOWN_INDICES} more]"


def check_schedule(schedule: Any, optimizer: Optimizer) -> Schedule | None:
    """Check that a schedule is a function of samples, and record the learning rates that its factor applies to.

    Raises:
        TaskInvalid: It is a torch LRScheduler (which counts steps), a function that counts its calls, or anything else
            that returns no number.
    """
    if schedule is None:
        return None
    seen: Any = schedule
    what = "build_schedule"
    if callable(schedule) and not hasattr(schedule, "get_last_lr"):
        seen = schedule(0)
        what = "what build_schedule returned"
        if isinstance(seen, int | float):
            if (again := schedule(0)) != seen:
                raise TaskInvalid(
                    f"the task's schedule gave {seen:g} and then {again:g} for no samples seen: its factor must follow "
                    "from the samples alone, for steps are repeated after a restart and resumed elsewhere"
                )
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
            return schedule  # type: ignore[no-any-return]
    raise TaskInvalid(
        f"{what} gave {type(seen).__name__}: return a function from samples seen to the factor on the learning "
        "rate, such as `lambda seen: 1 - seen / total_samples`"
    )
