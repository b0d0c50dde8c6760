"""The contract between the loop and a strategy: three verbs, each one measured span."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure import torchcompat
from dure.errors import SpecInvalid, TaskInvalid
from dure.records.sums import Sum
from dure.strategies.contract.batch_parts import BatchParts, DataShare
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.declarations import (
    BatchDivision,
    Findings,
    by_data,
    by_division,
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
from dure.strategies.contract.watch.hidden_state import StateGuard
from dure.strategies.contract.watch.parameter_watch import Freezing, ParameterWatch, freezing_fault
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.state.common_buffers import broadcast_buffers
from dure.strategies.state.hooks import gradient_hooks
from dure.strategies.state.optimizer import optimizer_to_names, settings_of
from dure.strategies.state.saved_state import CarriedState, StateSource, StrategyState
from dure.strategies.state.sync_batchnorm import convert_sync_batchnorm
from dure.strategies.state.tensor_shard import Needs, rectangles, whole_buffers
from dure.torchcompat import run_backward

_AS_IT_IS = nullcontext()
LossFunction = Callable[[nn.Module, Any], "Tensor | Sum"]


class Strategy(ABC):
    """One way to divide the work of a step.

    The loop calls `prepare` once and then, for every step, `forward_backward`, `sync_gradients` and
    `optimizer_step`. After `sync_gradients` every replica's gradient is that of the global batch's mean loss.

    How the weights come out exact: every microbatch's loss enters backward divided by the step's *expected* count,
    which all ranks know beforehand; gradients and counts are then only ever added. For a mean over samples the
    expected count is the true one. For other counts (tokens) the true one is known after the forward passes, and
    one multiplication before the optimiser's step corrects the difference; the expectation is a power of two there,
    so that it never changes a bit of the result.
    """

    is_synchronous = True
    """True if ranks are never more than a step apart, and the run can go on from the state of a rank at any step.
    Otherwise it goes on from its last checkpoint after a failure."""
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
        """Parts in which model and loss see a batch."""
        self.random_stream = self.group.rank
        """Number of the stream of random numbers: ranks with the same number draw the same (dropout)."""
        self.facts_lag = 0 if self.device.type == "cpu" else 1
        """Steps between launching one and knowing its facts without waiting; the same on all ranks."""
        self.example: Callable[[int], Any] | None = None
        """Function that returns the first samples of the training data as a batch, for a trial of the model before it
        is cut."""
        self.phases: Callable[[], Generator[str]] = _no_phases
        """Function that yields descriptions of later phases of the loss, with the task in the state of each meanwhile;
        a trial of the model is repeated there."""
        self.objects: Mapping[str, object] = {}
        """Objects that the task's loss may keep state in, by name."""
        self.last_gradient_time: float | None = None
        """`perf_counter` when this step's last gradient was ready and only communication remained, if known."""
        self.expectation: float | None = None
        """Power of two in place of a step's count of items until the true one is known; None for means. Checkpoints
        keep it: under fp16 it decides with the loss scale whether a gradient overflows."""
        self.sums = LocalSums(self.device)
        """Losses of this process in the step under way."""
        self.carried: CarriedState | None = None
        """State that this rank alone must keep to go on as if never interrupted, except weights and optimiser."""
        self.first_steps = FirstSteps(self.devices, has_other_ranks=self.group.world_size > 1)
        """Findings in the optimiser's first steps."""
        self.drawing = DrawWatch(self.devices)
        """Watch over the generators of random numbers."""
        self.traits: LossTraits = NOTHING_SEEN
        """Traits of the task's loss, as far as they were found before `prepare`."""

    def prepare(self, model: nn.Module, build_optimizer: Callable[[nn.Module], Optimizer], loss: LossFunction) -> None:
        """Place the model, build the optimiser over it and make both ready, in the one visible order."""
        self.loss = loss
        self.model = self.place(model)
        if self.spec.compile:
            self.model.compile()
        hooks = gradient_hooks(self.model)
        self.optimizer = self.built_optimizer = build_optimizer(self.model)
        self.stepped = self.optimizer
        """Optimiser whose `state` this rank keeps; another one than `optimizer` where that is divided."""
        if added := hooks_added(hooks, gradient_hooks(self.model), self.traits.hooked_parameters):
            hooked = tuple(dict.fromkeys((*self.traits.hooked_parameters, *added)))
            self.traits = replace(self.traits, hooked_parameters=hooked, nonlinear_gradients=True)
            if faults := self.check_traits(self.model):
                raise SpecInvalid([f"strategy is {self.info.name}: {fault}" for fault in faults])
        self.trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        refuse_unlike_optimizers(self.group, self.model, self.optimizer, orders_parameters=self.rules.orders_parameters)
        optimizer_to_names(self.model, self.optimizer)  # refuses what no checkpoint could name, before the first step
        self._num_groups = len(self.optimizer.param_groups)
        self.distribute()
        self._is_divided = self.group.world_size > 1 or self.parts.calls_per_step() > 1
        """True if the loss sees a step's batch in parts, here or on other ranks."""
        self.state_guard: AbstractContextManager[None] = _AS_IT_IS
        """Context of calls of the task, in which it cannot use state of the optimiser that is not whole there."""
        if self.rules.divides_state and self.group.world_size * len(self.devices) > 1:
            self.state_guard = StateGuard(self.built_optimizer, self.info.name)
        self._is_bare = self.state_guard is _AS_IT_IS and self.precision.name == "fp32"
        self.watch = self.watched_parameters()

    def take_share(self, share: DataShare) -> None:
        """Work on another share of every batch from here on."""
        self.share = share
        self.parts.num_shares = share.count

    def watched_parameters(self) -> ParameterWatch:
        """Begin to watch over what the loss does to parameters."""
        return ParameterWatch(self.model, self.info.name, sees_writes=self.rules.undoes_writes)

    def place(self, model: nn.Module) -> nn.Module:
        """Move the model to the first device, its BatchNorm layers synchronised if that is asked for."""
        if self.spec.sync_batchnorm and not self.info.one_process:
            model = convert_sync_batchnorm(model, self.device)
        return model.to(self.device)

    def distribute(self) -> None:
        """Apply the parallelism to the placed model."""

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Compute this rank's gradients of the step: one backward for each microbatch, unless the engine is another's.

        Args:
            microbatches: This rank's share, at least one.
            global_samples: Samples of the step over all ranks.
            requests: This rank's; all ranks learn them with the step's facts.
        """
        self.sums.begin(requests)
        for microbatch in microbatches:
            term = self.loss_term(self.model, microbatch, global_samples)
            run_backward(self.precision.scale(term.root))
            self.sums.add(term)

    @abstractmethod
    def sync_gradients(self) -> StepFacts:
        """Bring gradients and facts together over all ranks and return the facts."""

    def optimizer_step(self) -> None:
        """Correct the count, clip by the true global gradient's norm, and step."""
        self._correct_count()
        self.unscale_gradients()
        if self.spec.clip_norm is not None:
            self.clip_gradients(self.stepped_parameters(), self.spec.clip_norm)
        found = self.first_steps.take(self.optimizer, self.precision.step)
        if found.reduced is not None:
            self.traits = replace(self.traits, reduced_in_step=found.reduced)
        if found.draws and self.draws and isinstance(self, HasReplicas):
            raise TaskInvalid(
                f"the optimiser {type(self.optimizer).__name__} draws random numbers, and so do the model or the "
                "loss, of which each rank draws its own: the ranks' weights would part; give the optimiser a "
                "torch.Generator of its own, or train in one process"
            )
        self.zero_gradients()

    def skip_step(self) -> None:
        """Leave the weights as they are, and drop the gradients; called instead of `optimizer_step`, on all ranks."""
        self.zero_gradients()

    def unscale_gradients(self) -> None:
        """Bring fp16's gradients back to their true size, and note whether one overflowed."""
        self.precision.unscale(self.optimizer)

    def stepped_parameters(self) -> list[nn.Parameter]:
        """Return what this rank's optimiser steps: other gradients are not unscaled, nor part of the norm."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def clip_gradients(self, parameters: list[nn.Parameter], most: float) -> None:
        """Scale the gradients down to a norm of `most`, the norm being that of the whole model's gradient."""
        nn.utils.clip_grad_norm_(parameters, most)

    def zero_gradients(self) -> None:
        """Drop all gradients, those outside the optimiser too: a stale one would enter the norm."""
        for parameter in self.trainable:
            parameter.grad = None

    @abstractmethod
    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes that this rank sends to other ranks or devices in one step."""

    def describe(self) -> list[str]:
        """Return lines for the start of a run: how this strategy has divided what it was given."""
        return []

    def measured(self) -> "dict[str, float] | Callable[[], dict[str, float]] | None":
        """Return what this strategy alone has to tell of the step that was just done, for its record.

        A function is called when the step's facts are read: on an accelerator one step later.
        """
        return None

    def evaluation_models(self) -> list[nn.Module]:
        """Return one up-to-date model per device of this process, to evaluate on all of them."""
        return [self.model]

    def state_dict(self) -> StrategyState:
        """Return weights and optimiser state; valid until the next step."""
        return StrategyState(model=self.model.state_dict(), optimizer=optimizer_to_names(self.model, self.optimizer))

    def load_state_dict(self, source: StateSource) -> None:
        """Take over a checkpoint's weights and optimiser state, saved under whatever strategy and world size."""
        source.load_model(self.model)
        source.load_optimizer(self.model, self.optimizer)

    def needs(self) -> Needs:
        """Return which part of a checkpoint `load_state_dict` takes up on this rank: nothing else is read."""
        return Needs(
            model=rectangles(self.model.state_dict().items()),
            optimizer=rectangles(self.model.named_parameters(remove_duplicate=False)),
            buffers=whole_buffers(self.model),
        )

    def before_reading(self) -> None:
        """Make buffers and weights the same everywhere before an evaluation or a checkpoint reads them.

        Rank 0's buffers are sent to all: without synchronised BatchNorm each rank has statistics of its own samples.
        """
        if self.group.world_size > 1:
            broadcast_buffers(self.model, self.group)

    def declared_by_row(self, found: Findings) -> list[str]:
        """Return the declarations of this strategy's row that apply to the run."""
        is_many = self.group.world_size * len(self.devices) > 1
        return by_strategy(self.info, self.spec, found) if is_many else []

    def not_preserved(self) -> list[str]:
        """Return what this run, with its model and options, does not preserve of the one-device run."""
        has_batchnorm = any(isinstance(m, torchcompat.BatchNorm) for m in self.model.modules())
        has_step_hooks = bool(torchcompat.step_hooks(self.optimizer))
        found = Findings(draws=self.draws, has_batchnorm=has_batchnorm, has_step_hooks=has_step_hooks)
        declared = self.declared_by_row(found)
        division = BatchDivision(
            num_parts=len(self.parts.of(self.spec.global_batch_size)),
            calls_per_step=self.parts.calls_per_step(),
            is_one_share=self.share.count == 1,
            is_one_device=self.share.count * len(self.devices) == 1,
        )
        return [
            *by_data(self.traits),
            *by_trial(self.traits),
            *declared,
            *by_division(division, self.traits, found, declared),
        ]

    @property
    def draws(self) -> bool:
        """True if model or loss draw random numbers in training, as far as is known."""
        has_dropout = any(isinstance(m, torchcompat.Dropout) and m.p > 0 for m in self.model.modules())
        return has_dropout or self.traits.draws

    def check_traits(self, model: nn.Module) -> list[str]:
        """Return why this strategy cannot take the task's loss, a sentence each; asked before `prepare`.

        Args:
            model: Whole, as the task built it.
        """
        return faults_of_loss(
            self.traits,
            model,
            self.objects,
            self.rules,
            self.info.name,
            num_ranks=self.group.world_size,
            num_shares=self.share.count,
        )

    def close(self) -> None:
        """Let go of threads and engines."""

    # what the strategies share

    def loss_term(
        self, model: nn.Module, microbatch: Microbatch, global_samples: int, loss: LossFunction | None = None
    ) -> LossTerm:
        """Compute one microbatch's loss, by the task's own unless another is given, weighted for this step."""
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
            num_samples = microbatch.num_samples
            weight = num_samples * self.gradient_divisor / global_samples
            term = LossTerm(result if weight == 1 else result * weight, result, num_samples, num_samples)
        if microbatch.is_padding:
            return LossTerm(term.root * 0.0, torch.zeros_like(term.loss), 1.0, 0)
        return term

    def computed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the task, which may use the model as it likes, and return its value as plain tensors.

        Args:
            function: The task's loss or metrics.
            *args: Its arguments.
        """
        return function(*args)

    def watched(self, function: Callable[..., Any], *args: Any) -> Any:
        """Compute a function of the task under autocast, and act on what it did to parameters and optimiser."""
        settings = settings_of(self.built_optimizer) if self._is_divided else None
        if self._is_bare:  # to enter contexts that do nothing takes a microsecond of every step
            with self.watch:
                result = self.computed(function, *args)
        else:
            with self.watch, self.precision.autocast(), self.state_guard:
                result = self.computed(function, *args)
        if settings is not None and settings_of(self.built_optimizer) != settings:
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
        """Refuse groups of parameters that were added to the optimiser during the run, where it was divided before.

        Raises:
            TaskInvalid: There are others than at the beginning.
        """
        if self.rules.follows_groups or len(self.optimizer.param_groups) == self._num_groups:
            return
        self.refuse_group()

    def refuse_group(self, param_group: dict[str, Any] | None = None) -> NoReturn:
        """Refuse a group of parameters that is added during the run.

        Raises:
            TaskInvalid: In any case.
        """
        raise TaskInvalid(
            f"a parameter group was added to the optimiser during the run, and {self.info.name} divided the work when "
            "it began: give it all groups in build_optimizer, with a learning rate of 0 until they are to be trained, "
            "or use ddp"
        )

    def follow_freezing(self, freezing: Freezing) -> None:
        """Take note of parameters that the loss has frozen or unfrozen, by the rule for these.

        Raises:
            TaskInvalid: This strategy decided when the run began which parameters are trained.
        """
        if self.rules.freezing == "followed":
            self.train_all()
        elif freezing.unfrozen:
            frozen = freezing.frozen if self.rules.freezing == "refused" else []
            raise TaskInvalid(freezing_fault([*freezing.unfrozen, *frozen], "unfroze", self.info.name))
        elif self.rules.freezing == "refused":
            raise TaskInvalid(freezing_fault(freezing.frozen, "froze", self.info.name))

    def train_all(self) -> None:
        """Train whatever requires a gradient now, or did before: gradients of both are zeroed."""
        known = {id(parameter) for parameter in self.trainable}
        self.trainable = [p for p in self.model.parameters() if p.requires_grad or id(p) in known]

    def expected_items(self, global_samples: int) -> float:
        """Return the power of two that stands in for the step's count until the true one is known."""
        if self.expectation is None:
            self.expectation = 2.0 ** round(math.log2(global_samples))
        return self.expectation

    def expect(self, count: float) -> None:
        """Expect the next steps to count about as many items as a step that is now known, if it had any."""
        if self.expectation is not None and count > 0:
            self.expectation = 2.0 ** round(math.log2(count))

    def _correct_count(self) -> None:
        if self.expectation is not None:
            gradients = [p.grad for p in self.trainable if p.grad is not None]
            torchcompat.multiply_(gradients, self.expectation / self.sums.count)


def _no_phases() -> Generator[str]:
    yield from ()
