"""Contract between the loop and a strategy: three methods for each step, each one measured span."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.errors import SpecInvalid, TaskInvalid
from dure.records.sums import Sum
from dure.strategies.contract.batch_parts import BatchParts, DataShare
from dure.strategies.contract.batches import Microbatch, RowWatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.declarations import (
    BatchDivision,
    Findings,
    by_compilation,
    by_data,
    by_division,
    by_overflow,
    by_strategy,
    by_trial,
)
from dure.strategies.contract.local_sums import LocalSums
from dure.strategies.contract.loss_faults import faults_of_loss, hooks_added, refuse_unlike_optimizers
from dure.strategies.contract.loss_traits import NOTHING_SEEN, LossTraits
from dure.strategies.contract.replica_state import HasReplicas
from dure.strategies.contract.step_facts import LossTerm, Requests, StepFacts, checked_count, checked_loss
from dure.strategies.contract.watch.draws import DrawWatch
from dure.strategies.contract.watch.first_steps import FirstSteps
from dure.strategies.contract.watch.group_watch import ADDED, GroupWatch
from dure.strategies.contract.watch.hidden_state import StateGuard
from dure.strategies.contract.watch.parameter_watch import Freezing, ParameterWatch, freezing_fault
from dure.strategies.contract.watch.settings_watch import SettingsWatch
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.state.batchnorm import convert_sync_batchnorm
from dure.strategies.state.common_buffers import broadcast_buffers
from dure.strategies.state.hooks import gradient_hooks
from dure.strategies.state.optimizer import optimizer_to_names
from dure.strategies.state.saved_state import CarriedState, StateSource, StrategyState
from dure.strategies.state.tensor_shard import Needs, rectangles, whole_buffers
from dure.torchcompat.gradients import run_backward
from dure.torchcompat.modules import BatchNorm, Dropout, move_module
from dure.torchcompat.optimizers import step_hooks
from dure.torchcompat.tensors import multiply_

_AS_IT_IS = nullcontext()
LossFunction = Callable[[nn.Module, Any], "Tensor | Sum"]


class Strategy(ABC):
    """Way of dividing the work of a step.

    The loop calls `prepare` once and then, for every step, `forward_backward`, `sync_gradients` and `optimizer_step`.
    After `sync_gradients` every replica's gradient is that of the global batch's mean loss.

    The weights are exact for this reason: every microbatch's loss enters backward divided by the step's *expected*
    count, which all ranks know beforehand; gradients and counts are then only ever added. For a mean over samples the
    expected count is the true one. Other counts (tokens) are known after the forward passes, and one multiplication
    before the optimiser's step corrects the difference. The expectation is then a power of two, so that it never
    changes a bit of the result.
    """

    is_synchronous = True
    """True if ranks are never more than a step apart, and the run can continue from the state of any rank at any step.
    Otherwise it continues from its last checkpoint after a failure.
    """
    rules = WeightRules()
    """Rules for parameters and optimiser."""
    gradient_divisor: float = 1
    """Number by which the engine divides the summed gradients (DDP: the world size)."""

    def __init__(self, context: StrategyContext) -> None:
        self.info = context.info
        self.group = context.group
        self.devices = tuple(context.devices)
        self.device = self.devices[0]
        self.precision = context.precision
        self.spec = context.spec
        """Settings of the run."""
        self.options = self.info.option_class().of(self.spec)
        """Options of this strategy. A subclass declares their class."""
        self.share = DataShare(index=self.group.rank, count=self.group.world_size)
        """Share of every batch that is this rank's."""
        self.parts = BatchParts(self.spec, self.share.count)
        """Parts of a batch on which model and loss are called."""
        self.random_stream = self.group.rank
        """Number of the random stream: ranks with the same number draw the same random numbers (dropout)."""
        self.facts_lag = 0 if self.device.type == "cpu" else 1
        """Steps between the launch of a step and the time when its facts are known without waiting; the same on all
        ranks.
        """
        self.example: Callable[[int], Any] | None = None
        """Function that returns the first samples of the training data as a batch, for a trial of the model before it
        is cut.
        """
        self.phases: Callable[[], Generator[str]] = _no_phases
        """Generator function over later phases of the loss. It yields their descriptions, with the task in the state of
        each; a trial of the model is repeated there.
        """
        self.objects: Mapping[str, object] = {}
        """Objects in which the task's loss may keep state, by name."""
        self.last_gradient_time: float | None = None
        """`perf_counter` when the step's last gradient was ready and only communication remained; None if unknown."""
        self.expectation: float | None = None
        """Power of two in place of a step's count of items until the true one is known; None for means. It is in
        checkpoints, because under fp16 it decides with the loss scale whether a gradient overflows.
        """
        self.sums = LocalSums(self.device)
        """Losses of this process in the current step."""
        self.carried: CarriedState | None = None
        """State that this rank alone must keep to continue as if never interrupted, except weights and optimiser."""
        self.first_steps = FirstSteps(self.devices, has_other_ranks=self.group.world_size > 1)
        """Findings in the optimiser's first steps."""
        self.drawing = DrawWatch(self.devices)
        """Watch over the random number generators."""
        self.rows = RowWatch()
        """Watch over the batches of which a mean is taken."""
        self.traits: LossTraits = NOTHING_SEEN
        """Traits of the task's loss, as far as they were found before `prepare`."""

    def prepare(self, model: nn.Module, build_optimizer: Callable[[nn.Module], Optimizer], loss: LossFunction) -> None:
        """Place the model, build the optimiser over it and distribute both, in this fixed order."""
        self.loss = loss
        self.model = self.place(model)
        if self.spec.compile:
            self.compile_model()
        hooks = gradient_hooks(self.model)
        self.optimizer = self.built_optimizer = build_optimizer(self.model)
        self.stepped = self.optimizer
        """Optimiser whose `state` this rank keeps; differs from `optimizer` if that is divided."""
        if added := hooks_added(hooks, gradient_hooks(self.model), self.traits.hooked_parameters):
            hooked = tuple(dict.fromkeys((*self.traits.hooked_parameters, *added)))
            self.traits = replace(self.traits, hooked_parameters=hooked, nonlinear_gradients=True)
            if faults := self.check_traits(self.model):
                raise SpecInvalid([f"strategy is {self.info.name}: {fault}" for fault in faults])
        self.trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        refuse_unlike_optimizers(self.group, self.model, self.optimizer, orders_parameters=self.rules.orders_parameters)
        optimizer_to_names(self.model, self.optimizer)  # refuses what no checkpoint could name, before the first step
        self.distribute()
        self._groups = GroupWatch(self.optimizer, self.built_optimizer, parameters=self.model.parameters())
        self._settings = SettingsWatch(self.built_optimizer)
        self._is_divided = self.group.world_size > 1 or self.parts.calls_per_step() > 1
        """True if the loss sees a step's batch in parts, here or on other ranks."""
        self.state_guard: AbstractContextManager[None] = _AS_IT_IS
        """Context for calls of the task, in which it cannot use optimiser state of which this rank has only a part."""
        if self.rules.divides_state and self.group.world_size * len(self.devices) > 1:
            self.state_guard = StateGuard(
                self.built_optimizer, self.info.name, hides_parameters=self.rules.divides_groups
            )
        self.watch = self.watched_parameters()
        is_plain = type(self).computed is Strategy.computed and not self.precision.is_autocast
        self._is_bare = is_plain and self.watch.is_light and self.state_guard is _AS_IT_IS

    def compile_model(self) -> None:
        """Let `torch.compile` compile the placed model, which it does at the first call."""
        self.model.compile(mode=self.spec.compile_mode)

    def take_share(self, share: DataShare) -> None:
        """Work on another share of every batch from now on."""
        self.share = share
        self.parts.num_shares = share.count

    def watched_parameters(self) -> ParameterWatch:
        """Start to watch the parameters for changes by the loss."""
        return ParameterWatch(self.model, self.info.name, sees_writes=self.rules.undoes_writes)

    def place(self, model: nn.Module) -> nn.Module:
        """Move the model to the first device, with its BatchNorm layers synchronised if that was requested."""
        if self.spec.sync_batchnorm and not self.info.one_process:
            model = convert_sync_batchnorm(model, self.device)
        return move_module(model, self.device)

    def distribute(self) -> None:
        """Apply the parallelism to the placed model."""

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Compute this rank's gradients of the step: one backward per microbatch, unless the engine does it otherwise.

        Args:
            microbatches: This rank's share, at least one.
            global_samples: Samples of the step over all ranks.
            requests: Requests of this rank; all ranks receive them with the step's facts.
        """
        self.sums.begin(requests)
        for microbatch in microbatches:
            term = self.loss_term(self.model, microbatch, global_samples)
            run_backward(self.precision.scale(term.root))
            self.sums.add(term)

    @abstractmethod
    def sync_gradients(self) -> StepFacts:
        """Combine gradients and facts of all ranks, and return the facts."""

    def optimizer_step(self) -> None:
        """Correct the count, clip by the norm of the true global gradient, and step."""
        # each call takes half a microsecond here: two passes over the model have just filled the processor's caches
        if self.expectation is not None:
            self._correct_count()
        if self.precision.scaler is not None:
            self.unscale_gradients()
        if self.spec.clip_norm is not None:
            self.clip_gradients(self.stepped_parameters(), self.spec.clip_norm)
        if self.first_steps.is_over:
            self.precision.step(self.optimizer)
        else:
            self._take_first_step()
        self.zero_gradients()

    def _take_first_step(self) -> None:
        """Step, and look at what the optimiser does in its first steps.

        Raises:
            TaskInvalid: Its step draws random numbers, and so does the task, on ranks that must stay equal.
        """
        found = self.first_steps.take(self.optimizer, self.precision.step)
        if found.reduced is not None:
            self.traits = replace(self.traits, reduced_in_step=found.reduced)
        if found.draws and self.draws and isinstance(self, HasReplicas):
            raise TaskInvalid(
                f"the optimiser {type(self.optimizer).__name__} draws random numbers, and so do the model or the "
                "loss, of which each rank draws its own: the ranks' weights would part; give the optimiser a "
                "torch.Generator of its own, or train in one process"
            )

    def skip_step(self) -> None:
        """Leave the weights unchanged and drop the gradients; called on all ranks instead of `optimizer_step`."""
        self.zero_gradients()

    def unscale_gradients(self) -> None:
        """Divide fp16's gradients by the loss scale, and note whether one overflowed."""
        self.precision.unscale(self.optimizer)

    def stepped_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that this rank's optimiser steps; no other gradients are unscaled or enter the norm."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def clip_gradients(self, parameters: list[nn.Parameter], most: float) -> None:
        """Scale the gradients down to a norm of at most `most`; the norm is that of the whole model's gradient."""
        nn.utils.clip_grad_norm_(parameters, most)

    def zero_gradients(self) -> None:
        """Drop all gradients, also those outside the optimiser: a stale one would enter the norm."""
        for parameter in self.trainable:
            parameter.grad = None

    @abstractmethod
    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes that this rank sends to other ranks or devices in one step."""

    def describe(self) -> list[str]:
        """Return lines for the start of a run that describe how this strategy has divided model and batch."""
        return []

    def measured(self) -> "dict[str, float] | Callable[[], dict[str, float]] | None":
        """Return measurements of the last step that only this strategy makes, for its record.

        If they are a function, it is called when the step's facts are read: on an accelerator one step later.
        """
        return None

    def evaluation_models(self) -> list[nn.Module]:
        """Return one current model per device of this process, to evaluate on all of them."""
        return [self.model]

    def state_dict(self) -> StrategyState:
        """Return weights and optimiser state; valid until the next step."""
        return StrategyState(model=self.model.state_dict(), optimizer=optimizer_to_names(self.model, self.optimizer))

    def load_state_dict(self, source: StateSource) -> None:
        """Load a checkpoint's weights and optimiser state, saved under any strategy and world size."""
        source.load_model(self.model)
        source.load_optimizer(self.model, self.optimizer)

    def needs(self) -> Needs:
        """Return the part of a checkpoint that `load_state_dict` uses on this rank; nothing else is read."""
        return Needs(
            model=rectangles(self.model.state_dict().items()),
            optimizer=rectangles(self.model.named_parameters(remove_duplicate=False)),
            buffers=whole_buffers(self.model),
        )

    def before_reading(self) -> None:
        """Make buffers and weights equal on all ranks before an evaluation or a checkpoint reads them.

        Rank 0's buffers are sent to all: without synchronised BatchNorm each rank has statistics of its own samples.
        """
        if self.group.world_size > 1:
            broadcast_buffers(self.model, self.group)

    def missed_state(self, changed: Iterable[str]) -> list[str]:
        """Return the state that an evaluation changed on some ranks, and that others use without the change.

        Args:
            changed: Paths of the plain state that it changed on this rank.
        """
        return []

    def declared_by_row(self, found: Findings) -> list[str]:
        """Return the declarations of this strategy's row that apply to the run."""
        is_many = self.group.world_size * len(self.devices) > 1
        return by_strategy(self.info, self.spec, found) if is_many else []

    def not_preserved(self) -> list[str]:
        """Return the differences between this run, with its model and options, and the run on one device."""
        has_batchnorm = self.traits.learns_statistics and any(isinstance(m, BatchNorm) for m in self.model.modules())
        has_step_hooks = bool(step_hooks(self.optimizer))
        draws = self._model_draws if self.is_loss_whole else self.draws
        found = Findings(draws=draws, has_batchnorm=has_batchnorm, has_step_hooks=has_step_hooks)
        declared = self.declared_by_row(found)
        division = BatchDivision(
            num_parts=len(self.parts.of(self.spec.global_batch_size)),
            num_microbatches=len(self.parts.microbatches(self.spec.global_batch_size)),
            calls_per_step=self.parts.calls_per_step(),
            is_one_share=self.share.count == 1,
            is_loss_whole=self.is_loss_whole,
            is_one_device=self.share.count * len(self.devices) == 1,
            hooked=self._hooked_in_parts(),
        )
        return [
            *by_data(self.traits),
            *by_trial(self.traits),
            *by_compilation(self.spec, self.traits),
            *declared,
            *by_division(division, self.traits, found, declared),
            *by_overflow(
                has_overflowed=self.precision.has_overflowed(),
                is_divided=self.group.world_size * len(self.devices) > 1 or division.calls_per_step > 1,
            ),
        ]

    def _hooked_in_parts(self) -> list[str]:
        """Return parameters and modules whose hooks get gradients of parts; those of parameters get a whole loss's."""
        whole = {name for name, _ in self.model.named_parameters()} if self.is_loss_whole else ()
        return [name for name in self.traits.hooked_parameters if name not in whole]

    @property
    def is_loss_whole(self) -> bool:
        """True if the loss sees whole batches, and only the model's own calls are divided."""
        num_parts, num_calls = (len(of(self.spec.global_batch_size)) for of in (self.parts.of, self.parts.of_loss))
        return num_calls == 1 < num_parts

    @property
    def draws(self) -> bool:
        """True if model or loss are known to draw random numbers in training."""
        return self._model_draws or self.traits.draws

    @property
    def _model_draws(self) -> bool:
        has_dropout = any(isinstance(m, Dropout) and m.p > 0 for m in self.model.modules())
        return (has_dropout and self.traits.has_dropout) or self.traits.model_draws

    def check_traits(self, model: nn.Module) -> list[str]:
        """Return the reasons why this strategy cannot use the task's loss, one sentence each; called before `prepare`.

        Args:
            model: Whole model, as the task built it.
        """
        return faults_of_loss(
            self.traits,
            model,
            self.objects,
            self.rules,
            self.info.name,
            num_ranks=self.group.world_size,
            num_shares=self.share.count,
            clips=self.spec.clip_norm is not None,
        )

    def close(self) -> None:
        """Release threads and engines."""

    # shared by the strategies

    def loss_term(
        self, model: nn.Module, microbatch: Microbatch, global_samples: int, loss: LossFunction | None = None
    ) -> LossTerm:
        """Compute one microbatch's loss, by the task's own function unless another is given, weighted for this step."""
        result = self.watched(loss or self.loss, model, microbatch.batch)
        if isinstance(result, Sum):
            count = checked_count(result.count)
            if isinstance(result.total, Tensor) and not result.total.requires_grad and count == 0:
                raise TaskInvalid(
                    "the task's loss returned a total without a gradient for samples of which none counts: return "
                    "0 * the model's output, summed, so that backward finds the parameters there too"
                )
            total = checked_loss(result.total)
            weight = self.gradient_divisor / self.expected_items(global_samples)
            term = LossTerm(total * weight, total, 1.0, count)
        else:
            result = checked_loss(result)
            if self._is_divided:
                self.rows.see(microbatch)
            num_samples = microbatch.num_samples
            weight = num_samples * self.gradient_divisor / global_samples
            term = LossTerm(result if weight == 1 else result * weight, result, num_samples, num_samples)
        if microbatch.is_padding:
            return LossTerm(term.root * 0.0, torch.zeros_like(term.loss), 1.0, 0)
        return term

    def computed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the task, which may use the model in any way, and return its value as plain tensors.

        Args:
            function: The task's loss or metrics.
            *args: Arguments of the function.
        """
        return function(*args)

    def watched(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the task under autocast, and act on its changes to parameters and optimiser."""
        if self._is_divided:
            self._settings.note()
        if self._is_bare:  # entering contexts that do nothing takes two microseconds of every step
            calls = self.watch.calls
            calls.append(None)
            try:
                result = function(*args)
            finally:
                calls.pop()
        else:
            with self.watch, self.precision.autocast(), self.state_guard:
                result = self.computed(function, *args)
        if self._is_divided and self._settings.have_changed():
            raise TaskInvalid(
                "the task's loss changes the optimiser's settings or groups, which each of its calls on a part of a "
                "batch would do for itself: return a function of the samples seen from build_schedule, or write an "
                "optimiser that changes them in its step"
            )
        freezing = self.watch.freezing()
        if freezing is not None:
            self.follow_freezing(freezing)
        return result

    def check_groups(self) -> None:
        """Refuse parameters and groups that the optimiser got or lost during the run, if ranks would not follow them.

        Refuse parameters that the schedule has frozen or unfrozen as well, also on ranks that compute no loss.

        Raises:
            TaskInvalid: The optimiser was divided before, or it got parameters that were made on the way.
        """
        if self.rules.freezing == "refused" and (freezing := self.watch.freezing()) is not None:
            self.follow_freezing(freezing)
        if not self.rules.follows_groups and self.rules.freezing != "followed" and self.traits.unfrozen_later:
            # a rank's optimiser has only the trained parameters, so the schedule may not reach the others here
            raise TaskInvalid(freezing_fault(self.traits.unfrozen_later, "unfroze", self.info.name))
        if self.rules.follows_groups and self.group.world_size == 1:
            return
        change = self._groups.change()
        if not self.rules.follows_groups and (change := self.traits.regrouped or change):
            raise self._regrouped(change)
        if change is not None and self._groups.has_new_parameters():
            raise TaskInvalid(
                "the optimiser gets parameters during the run that the model did not begin with, which "
                f"{self.info.name} does not add up over ranks, and a resumed run, which begins with build_model, would "
                "not have: build the whole model in build_model, and let the schedule say which parts forward uses"
            )

    def refuse_group(self, param_group: dict[str, Any] | None = None) -> NoReturn:
        """Refuse a parameter group that is added during the run.

        Raises:
            TaskInvalid: Always.
        """
        raise self._regrouped(ADDED)

    def _regrouped(self, what: str) -> TaskInvalid:
        return TaskInvalid(
            f"{what}, and {self.info.name} divided the work when it began: give it all groups in build_optimizer, with "
            "a learning rate of 0 until they are to be trained, or use ddp"
        )

    def follow_freezing(self, freezing: Freezing) -> None:
        """Handle parameters that the loss has frozen or unfrozen, by the rule for these.

        Raises:
            TaskInvalid: This strategy fixed the set of trained parameters when the run began.
        """
        if self.rules.freezing == "followed":
            self.train_all()
        elif freezing.unfrozen:
            frozen = freezing.frozen if self.rules.freezing == "refused" else []
            raise TaskInvalid(freezing_fault([*freezing.unfrozen, *frozen], "unfroze", self.info.name))
        elif self.rules.freezing == "refused":
            raise TaskInvalid(freezing_fault(freezing.frozen, "froze", self.info.name))

    def train_all(self) -> None:
        """Train all parameters that require a gradient now or did before: gradients of both are zeroed."""
        known = {id(parameter) for parameter in self.trainable}
        self.trainable = [p for p in self.model.parameters() if p.requires_grad or id(p) in known]

    def expected_items(self, global_samples: int) -> float:
        """Return the power of two that replaces the step's count until the true one is known."""
        if self.expectation is None:
            self.expectation = 2.0 ** round(math.log2(global_samples))
        return self.expectation

    def expect(self, count: float) -> None:
        """Set the expectation for the next steps from the count of a step that is now known, if it had any items."""
        if self.expectation is not None and count > 0:
            self.expectation = 2.0 ** round(math.log2(count))

    def _correct_count(self) -> None:
        if self.expectation is not None:
            gradients = [p.grad for p in self.trainable if p.grad is not None]
            multiply_(gradients, self.expectation / self.sums.count)


def _no_phases() -> Generator[str]:
    yield from ()
