"""The contract between the loop and a strategy: three verbs, each one measured span."""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure import torchcompat
from dure.comm.groups import Group
from dure.data.randomness import GeneratorStates
from dure.errors import SpecInvalid, TaskInvalid
from dure.records.sums import Sum
from dure.spec import RunSpec
from dure.strategies.contract.batch_parts import BatchParts
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.data_share import DataShare
from dure.strategies.contract.declarations import (
    BatchDivision,
    Findings,
    by_data,
    by_division,
    by_strategy,
    by_trial,
    few,
)
from dure.strategies.contract.local_sums import LocalSums
from dure.strategies.contract.loss_traits import NOTHING_SEEN, LossTraits
from dure.strategies.contract.own_collectives import watched_collectives
from dure.strategies.contract.parameter_watch import Freezing, ParameterWatch, freezing_fault, write_fault
from dure.strategies.contract.replica_state import ReplicaState
from dure.strategies.contract.step_facts import LossTerm, LostShare, Requests, StepFacts, checked_count, checked_loss
from dure.strategies.contract.sync_batchnorm import convert_sync_batchnorm
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.state.common_buffers import broadcast_buffers
from dure.strategies.state.hooks import gradient_hooks
from dure.strategies.state.optimizer import optimizer_to_names, order_digest, plain_settings, settings_of
from dure.strategies.state.saved_state import CarriedState, StateSource, StrategyState
from dure.strategies.state.tensor_shard import Needs, rectangles, whole_buffers
from dure.torchcompat import run_backward

LossFunction = Callable[[nn.Module, Any], "Tensor | Sum"]

_WATCHED_STEPS = 3
"""Steps of the optimiser in which random numbers are looked for."""


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
        self.parts = BatchParts(self.spec, lambda: self.share)
        """Parts in which model and loss see a batch."""
        self.random_stream = self.group.rank
        """Number of the stream of random numbers: ranks with the same number draw the same (dropout)."""
        self.facts_lag = 0 if self.device.type == "cpu" else 1
        """Steps between launching one and knowing its facts without waiting; the same on all ranks."""
        self.example: Callable[[int], Any] | None = None
        """Function that returns the first samples of the training data as a batch, for a trial of the model before it
        is cut."""
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
        self.optimizer_draws = False
        """True if the optimiser drew random numbers in its first steps."""
        self._num_steps = 0
        """Steps of the optimiser since this object was made."""
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
        self._take_hooks([name for name, number in gradient_hooks(self.model).items() if number > hooks.get(name, 0)])
        self.trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._refuse_unlike_settings()
        optimizer_to_names(self.model, self.optimizer)  # refuses what no checkpoint could name, before the first step
        self._num_groups = len(self.optimizer.param_groups)
        self.distribute()
        self.watch = self.watched_parameters()

    def _take_hooks(self, names: Sequence[str]) -> None:
        """Take over hooks on gradients that `build_optimizer` registered, unless a trial of the loss saw them."""
        known = self.traits.hooked_parameters
        if all(name in known for name in names):
            return
        hooked = tuple(dict.fromkeys((*known, *names)))
        self.traits = replace(self.traits, hooked_parameters=hooked, nonlinear_gradients=True)
        if faults := self.check_traits(self.model):
            raise SpecInvalid([f"strategy is {self.info.name}: {fault}" for fault in faults])

    def _refuse_unlike_settings(self) -> None:
        """Refuse settings of the optimiser that follow from a rank's part of the weights, or from its number.

        Communication: one gathered JSON message.
        """
        if self.group.world_size == 1:
            return
        order = order_digest(self.model, self.optimizer) if self.rules.orders_parameters else None
        everyones = self.group.all_gather_json([plain_settings(self.optimizer), order])
        for rank, (settings, theirs) in enumerate(everyones):
            if settings != everyones[0][0]:
                raise TaskInvalid(
                    f"build_optimizer gave {type(self.optimizer).__name__} other settings on rank {rank} than on rank "
                    "0: compute them in build_model, where weights are whole, and not from the number of a rank"
                )
            if theirs != everyones[0][1]:
                raise TaskInvalid(
                    f"build_optimizer gave {type(self.optimizer).__name__} the parameters in another order on rank "
                    f"{rank} than on rank 0: give them in the model's order (a set has another one in each process)"
                )

    @classmethod
    def role_for(cls, group: Group, spec: RunSpec) -> "type[Strategy]":
        """Return the class of this rank's part in the strategy, where ranks have different ones."""
        return cls

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
        self._num_steps += 1
        is_watched = self._num_steps <= _WATCHED_STEPS and self.group.world_size > 1
        before = GeneratorStates.now(*self.devices) if is_watched else None
        called: list[str] = []
        with watched_collectives(self.optimizer, called) if is_watched else nullcontext():
            self.precision.step(self.optimizer)
        if called:
            self.traits = replace(self.traits, reduced_in_step=called[0])
        if before is not None and not before.is_same_as(GeneratorStates.now(*self.devices)):
            self.optimizer_draws = True
            if self.draws and self.replica() is not None:
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

    def share_at(self, step: int) -> tuple[int, int]:
        """Return which share of a step's batch is this rank's, and of how many.

        Asked once for every step, in order: ahead of the step as far as loader processes fetch ahead.
        """
        return self.share.index, self.share.count

    def lost_shares(self) -> list[LostShare]:
        """Return the shares that were lost with their rank, each once; known whenever weights have been read."""
        return []

    def measured(self) -> "dict[str, float] | Callable[[], dict[str, float]] | None":
        """Return what this strategy alone has to tell of the step that was just done, for its record.

        A function is called when the step's facts are read: on an accelerator one step later.
        """
        return None

    @classmethod
    def import_late_parts(cls) -> None:
        """Import what every rank would import later; called once, in the process that forks them."""

    @classmethod
    def check_model(cls, model: nn.Module, spec: RunSpec) -> list[str]:
        """Return why this strategy cannot take a model, a sentence each: the module's name and what to use instead.

        Asked before any process starts, of strategies whose row says `checks_model`.

        Args:
            model: As the task builds it, on the meta device where that works: shapes are there, values are not.
            spec: The run, which says over how many devices the model is to be spread.
        """
        return []

    @classmethod
    def check_optimizer(cls, optimizer: Optimizer) -> list[str]:
        """Return why this strategy cannot take the task's optimiser, a sentence each; asked when `check_model` is.

        Args:
            optimizer: As the task builds it, over a model that may be on the meta device. It is left as it is.
        """
        return []

    def evaluation_models(self) -> list[nn.Module]:
        """Return one up-to-date model per device of this process, to evaluate on all of them."""
        return [self.model]

    def state_dict(self) -> StrategyState:
        """Return weights and optimiser state; valid until the next step."""
        return StrategyState(model=self.model.state_dict(), optimizer=optimizer_to_names(self.model, self.optimizer))

    def own_state(self) -> StrategyState:
        """Return this rank's part of `state_dict`, without exchanging anything: for a snapshot in memory.

        What other ranks know better is left out. The same groups of all ranks are brought together when it is read.
        """
        return self.state_dict()

    @property
    def stepped(self) -> Optimizer:
        """The optimiser whose `state` this rank keeps; that of `optimizer` unless it is divided."""
        return self.optimizer

    def steady_names(self) -> frozenset[str]:
        """Return the names of the parameters that only `optimizer_step` changes, as its state does; none if unsure.

        Frozen parameters are not among them: that of a teacher, say, may follow its pupil whenever the task likes.
        """
        if not self.rules.changes_in_step_only:
            return frozenset()
        named = self.model.named_parameters(remove_duplicate=False)
        return frozenset(name for name, parameter in named if parameter.requires_grad)

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

    def replica(self) -> ReplicaState | None:
        """Return the tensors that are equal bit by bit on all ranks that hold them, between any two steps, or None."""
        return None

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

    def has_drawn_since(self, before: GeneratorStates) -> bool:
        """Return whether code of the task has drawn from the global generators since they were in these states."""
        return not before.is_same_as(GeneratorStates.now(*self.devices))

    @property
    def draws(self) -> bool:
        """True if model or loss draw random numbers in training, as far as is known."""
        has_dropout = any(isinstance(m, torchcompat.Dropout) and m.p > 0 for m in self.model.modules())
        return has_dropout or self.traits.draws

    @functools.cached_property
    def _is_divided(self) -> bool:
        """True if the loss sees a step's batch in parts, here or on other ranks."""
        return self.group.world_size > 1 or self.parts.calls_per_step() > 1

    def check_traits(self, model: nn.Module) -> list[str]:
        """Return why this strategy cannot take the task's loss, a sentence each; asked before `prepare`.

        Args:
            model: Whole, as the task built it.
        """
        faults = []
        if self.traits.collective is not None and self.group.world_size > 1:
            faults.append(
                f"the task's loss, metrics or model call {self.traits.collective} of torch.distributed: dure brings "
                "together what ranks computed, so leave that out, and return dure.Sum(total, count) where a loss is "
                "divided by a count over all ranks (for nn.SyncBatchNorm: nn.BatchNorm with --sync-batchnorm)"
            )
        sparse = [name for name, buffer in model.named_buffers() if buffer.layout is not torch.strided]
        if sparse and self.group.world_size > 1:
            faults.append(
                f"{few(sparse)} is a sparse buffer, which ranks cannot send each other: make it dense, or keep indices "
                "and values in buffers and make it of these in forward"
            )
        if self.rules.undoes_writes and (written := self.traits.changed_parameters):
            faults.append(write_fault(written, self.info.name))
        elif self.rules.holds_memory and self.group.world_size > 1 and (rebound := self.traits.rebound_parameters):
            faults.append(
                f"the task's loss gives {few(rebound)} other memory (p.data = ...), which {self.info.name} would not "
                "see: change it in place (p.data.copy_(...)), or use ddp"
            )
        elif self.share.count > 1 and (learned := self.traits.learned_writes):
            faults.append(
                f"the task's loss sets {few(learned)} by what is in a batch, of which every rank has its own part: "
                "keep them as buffers, set them from a few samples in build_model, or use --strategy single"
            )
        return faults

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
        with self.watch, self.precision.autocast():
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
            self.refuse_freezing([*freezing.unfrozen, *frozen], "unfroze")
        elif self.rules.freezing == "refused":
            self.refuse_freezing(freezing.frozen, "froze")

    def refuse_freezing(self, names: Sequence[str], what: str) -> NoReturn:
        """Raise the sentence about parameters that were frozen or unfrozen during the run."""
        raise TaskInvalid(freezing_fault(names, what, self.info.name))

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
        """Expect the next steps to count about as many items as a step that is now known."""
        if self.expectation is not None:
            self.expectation = 2.0 ** round(math.log2(count))

    def _correct_count(self) -> None:
        if self.expectation is not None:
            gradients = [p.grad for p in self.trainable if p.grad is not None]
            torchcompat.multiply_(gradients, self.expectation / self.counted_items())

    def counted_items(self) -> "Tensor | float":
        """Return the step's count over all ranks; a tensor where reading it would make the host wait."""
        return self.sums.count
