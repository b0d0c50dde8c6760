"""Inspection of a task before training: its loss, its data, and its behaviour in an evaluation."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.data.partition import shares
from dure.host.device_kinds import memory_of
from dure.strategies.contract.loss_traits import LossTraits
from dure.strategies.contract.strategy import Strategy
from dure.strategies.contract.watch.group_watch import GroupWatch
from dure.strategies.state.containers import tensors_in
from dure.strategies.state.hooks import gradient_hooks
from dure.strategies.state.objects.generator_state import GENERATORS, generator_state
from dure.strategies.state.objects.namespaces import ATOMS
from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.optimizer import difference_of_settings, plain_settings
from dure.strategies.state.trial import Trial, is_equal, sharing_state
from dure.torchcompat.modules import move_module
from dure.training.inspection.additivity import Additivity
from dure.training.inspection.collectives import CollectiveCalled, no_collectives
from dure.training.inspection.first_loss import FirstLoss, difference_of_ranks, difference_of_worlds
from dure.training.inspection.loss_calls import NUM_SAMPLES, LossCalls, aside, perturb
from dure.training.inspection.loss_inspection import LossInspection
from dure.training.inspection.phases import Phases, positions_of
from dure.training.session.collate_state import CollateChanges
from dure.training.session.loader import FetchRequest, Loader
from dure.training.session.one_process_build import OneProcessBuild
from dure.training.session.sample_order import SampleOrder, total_samples
from dure.training.task.task import Task

_MOST_PARTS = 100
"""Maximum items of a container in a data set that are searched for generators."""
_COPIED = "data"
"""First path component of data set state that loader processes have copies of."""


@dataclass
class ScheduleChanges:
    """Changes that a schedule makes, which a part of the optimiser would not show."""

    regrouped: str | None = None
    """Change to the parameters of the optimiser's groups."""
    unfrozen: dict[str, None] = field(default_factory=dict)
    """Names of parameters that it unfreezes."""


@dataclass(frozen=True, kw_only=True)
class TaskInspection:
    """Task whose loss is inspected, and what it is tried with."""

    strategy: Strategy
    """Strategy that divides batches, with its `objects`."""
    task: Task
    model: nn.Module
    """Whole model."""
    loader: Loader
    """Loader of the training data."""
    order: SampleOrder
    """Order of the training data; its first samples are those of the first step."""

    def traits(self, one_process_build: OneProcessBuild) -> LossTraits:
        """Inspect the loss on rank 0, call it once on the other ranks, and return the traits on all of them.

        Called before the strategy is prepared. The model is on the CPU, and is there again afterwards.

        Args:
            one_process_build: Differences from a build in one process, on rank 0.

        Communication: two gathered JSON messages.
        """
        strategy, group = self.strategy, self.strategy.group
        traits, first = LossTraits(), FirstLoss()
        if group.rank == 0:
            traits, first = self._as_one_process(one_process_build)
        traits = LossTraits.from_json(group.all_gather_json(asdict(traits))[0])
        # a loss that does not repeat its value need not agree on two ranks; ranks would also write to the same files
        if group.world_size == 1 or traits.reason_unknown or traits.data_changes or traits.outer_state:
            return traits
        is_server = bool(strategy.info.extra_processes) and not strategy.share.takes_samples
        if group.rank and not is_server and self._fits():
            inspection = self.of_loss()
            with self._on_device():
                inspection.call_once(self.order.num_samples)
            first = inspection.first_loss
        by_rank = [FirstLoss(**message) for message in group.all_gather_json(asdict(first))]
        return replace(traits, differs_by_rank=difference_of_ranks(by_rank))

    def of_loss(self) -> LossInspection:
        """Return an inspection of the loss on the first training samples; the model is on the strategy's device."""
        strategy, loader = self.strategy, self.loader
        copied = {_COPIED: loader.data} if loader.has_workers else {}
        batch_size, num_shares = strategy.spec.global_batch_size, strategy.share.count * len(strategy.devices)
        even = -(-batch_size // num_shares)
        parts = strategy.parts.of(batch_size)
        if sum(parts) != batch_size or len(parts) == 1:  # with padding, or shares of devices that are not known yet
            parts = [part for part in shares(batch_size, num_shares) if part]
        objects = {**copied, **strategy.objects}
        additivity = Additivity(
            LossCalls(self.task.loss, self.model, self._fetch(), objects, strategy.precision.autocast),
            is_exact=strategy.precision.is_exact,
            is_divided=strategy.group.world_size * len(strategy.devices) > 1 or bool(strategy.spec.microbatch_size),
            most_at_once=strategy.spec.microbatch_size or strategy.parts.default_size() or even,
            has_random_batches=lambda: loader.has_collate_drawn,
        )
        return LossInspection(
            additivity,
            parts=parts,
            model_parts=strategy.parts.of_model(batch_size),
            is_alone=strategy.group.world_size > 1,
        )

    def phases(self, changes: ScheduleChanges | None = None) -> Phases:
        """Return the phases that the task's schedule begins.

        Args:
            changes: Receives what the schedule changes in the optimiser's groups and the model; None if it does not
                matter.
        """
        task, model, order = self.task, self.model, self.order
        total = total_samples(self.strategy.spec, order)

        def schedule() -> Any:
            optimizer = task.build_optimizer(model)
            given = task.build_schedule(optimizer, total)
            if changes is None or not callable(given):
                return given
            groups = GroupWatch(optimizer)
            frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}

            def watched(seen: int) -> Any:
                factor = given(seen)
                changes.regrouped = changes.regrouped or groups.change()
                changes.unfrozen.update((name, None) for name, parameter in frozen.items() if parameter.requires_grad)
                return factor

            return watched

        positions = positions_of(total, order.epoch_samples, order.global_batch_size)
        return Phases(model, self.strategy.objects, schedule, positions)

    def _as_one_process(self, one_process_build: OneProcessBuild) -> tuple[LossTraits, FirstLoss]:
        if not self._fits():
            return LossTraits(reason_unknown="the whole model does not fit the device, to be tried"), FirstLoss()
        loader, num_samples = self.loader, self.order.num_samples
        fetch = self._fetch()
        once = [tensor.clone() for tensor in tensors_in(fetch(range(min(2, num_samples))))]
        states = [*_generator_states(loader.data)]
        of_collate = self._changes_of_collate()
        with self._on_device():
            inspection = self.of_loss()
            traits = inspection.traits(num_samples)
            if not traits.has_failed and not traits.collective:
                settings, stepped_state, with_optimizer = self._rehearsed_optimizer()
                traits = replace(with_optimizer or traits, stepped_state=stepped_state)
                traits = self._with_phases(inspection, traits)
                traits = replace(traits, **self._tried_in_evaluation())
                if self.strategy.group.world_size > 1:
                    with one_process_build.entered(self.task):
                        difference = self._difference_of_worlds(inspection, settings)
                    traits = replace(traits, differs_by_world=difference)
        # after the loss, which may have modified the data set in place
        again = list(tensors_in(fetch(range(min(2, num_samples)))))
        is_same = len(once) == len(again) and all(map(is_equal, once, again))
        has_drawn = states != [*_generator_states(loader.data)]
        state = (*traits.learned_state, *traits.counted_state)
        varies = of_collate.learned or of_collate.counted or loader.has_collate_own_draws
        if has_drawn or not is_same or varies:  # nothing can be compared on samples that differ each time
            traits = replace(traits, not_additive=None, differs_by_world=None)
        traits = replace(
            traits,
            collate_draws=loader.has_collate_drawn,
            collate_state=of_collate.learned,
            collate_count=of_collate.counted,
            collate_tables=of_collate.tables,
            left_by_collate=loader.left_by_collate,
            collates_in_loaders=loader.has_workers,
            data_changes=has_drawn or not is_same,
            copied_state=tuple(path for path in state if path.startswith(f"{_COPIED}.")),
        )
        return traits, inspection.first_loss

    def _changes_of_collate(self) -> CollateChanges:
        first = self.order.permutation(0)[:NUM_SAMPLES].tolist()
        half = len(first) // 2
        return self.loader.collate_changes([first[:half], first[half:]])

    def _fits(self) -> bool:
        """Return whether the device has memory for the whole model, its gradients and the copies that trials make."""
        memory = memory_of(self.strategy.device)  # unknown where it is the host's
        return memory is None or 4 * _num_bytes(self.model) <= memory[0]

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        move_module(self.model, self.strategy.device)
        try:
            with sharing_state():
                yield
        finally:
            move_module(self.model, "cpu")

    def _fetch(self) -> Callable[[Sequence[int]], Any]:
        first = self.order.permutation(0)
        own = self.loader.without_workers()
        return lambda places: next(own.batches([FetchRequest(0, first[list(places)])]))

    def _rehearsed_optimizer(self) -> tuple[Any, tuple[str, ...], LossTraits | None]:
        """Build the optimiser in a trial; return its settings, its state that the loss changes, and traits of the loss.

        The build may register hooks, freeze parameters, or set state that the loss reads. Traits are None if it does
        none of these. All are empty if the build fails; the strategy will fail in the same way.
        """
        model, objects = self.model, self.strategy.objects
        with aside(), Trial(model, objects):
            before = ObjectState({**objects, "model": model})
            found = _hooks_and_frozen(model)
            try:
                with no_collectives():  # other ranks build no optimiser now
                    optimizer = self.task.build_optimizer(model)
                    settings = plain_settings(optimizer)
            except (Exception, CollectiveCalled):
                return None, (), None
            with_optimizer = None
            if before.changed() or _hooks_and_frozen(model) != found:
                with_optimizer = self.of_loss().traits(self.order.num_samples)
            stepped_state = self._stepped_state(optimizer)
        return settings, stepped_state, with_optimizer

    def _stepped_state(self, optimizer: Optimizer) -> tuple[str, ...]:
        """Return the state, in the task or elsewhere, that an optimiser of the task's own holds and the loss changes.

        It may only be called in a trial, which undoes the changes.
        """
        batch = self._fetch()(range(1))
        if not self.strategy.rules.steps_elsewhere or type(optimizer).__module__.startswith("torch."):
            return ()
        held = ObjectState({"optimizer": optimizer})
        suppressed = contextlib.suppress(Exception, CollectiveCalled)  # errors are those of training
        with suppressed, no_collectives(), self.strategy.precision.autocast():
            self.model.train()
            self.task.loss(self.model, batch)
        changed = held.changed()
        held.put_back()
        return tuple(changed)

    def _with_phases(self, inspection: LossInspection, traits: LossTraits) -> LossTraits:
        """Return the traits of the loss together with those in the phases that the task's schedule begins."""
        has_schedule = type(self.task).build_schedule is not Task.build_schedule
        if not (has_schedule and inspection.is_divided) or traits.reason_unknown is not None:
            return traits
        changes = ScheduleChanges()
        traits = self.phases(changes).traits(inspection, self.order.num_samples, traits)
        return replace(traits, regrouped=changes.regrouped, unfrozen_later=tuple(changes.unfrozen))

    def _difference_of_worlds(self, inspection: LossInspection, settings: Any) -> str | None:
        """Return how the loss, or the optimiser's settings, differ in the current environment, or None."""
        here = inspection.first_loss
        inspection.call_once(self.order.num_samples)
        in_one_process, inspection.first_loss = inspection.first_loss, here
        if difference := difference_of_worlds(here, in_one_process):
            return f"of the loss, {difference}"
        with aside(), Trial(self.model, self.strategy.objects), contextlib.suppress(Exception, CollectiveCalled):
            with no_collectives():
                one_process_settings = plain_settings(self.task.build_optimizer(self.model))
            if settings is not None:
                return difference_of_settings(settings, one_process_settings, "here", "in one process")
        return None

    def _tried_in_evaluation(self) -> dict[str, Any]:
        """Return the parameters that loss and metrics write in an evaluation, and whether they accept training data."""
        written: dict[str, None] = {}
        try:
            for call in (self.task.metrics, self.task.loss):
                names = self._written_in_evaluation(call)
                if names and self._still_writes(call):
                    written |= dict.fromkeys(names)
        except CollectiveCalled as called:
            return {"collective": called.name}
        except Exception:
            return {}  # the evaluation data may be of another kind
        return {"writes_in_evaluation": tuple(written), "is_evaluable": True}

    def _still_writes(self, call: Callable[[nn.Module, Any], Any]) -> bool:
        """Return whether a method of the task writes parameters in an evaluation after a step of training.

        Weights that the first call of all sets are set in training, before any evaluation.
        """
        try:
            return bool(self._written_in_evaluation(call, is_after_training=True))
        except Exception:
            return True  # training may need what is not there yet

    def _written_in_evaluation(
        self, call: Callable[[nn.Module, Any], Any], *, is_after_training: bool = False
    ) -> list[str]:
        """Return the parameters that a method of the task writes in an evaluation."""
        strategy, model, fetch = self.strategy, self.model, self._fetch()
        without_collectives = no_collectives if strategy.group.world_size > 1 else contextlib.nullcontext
        trial = Trial(model, strategy.objects, seed=0, watches_writes=False)
        with aside(), trial, without_collectives():
            perturb(model)  # a momentum encoder may start as a copy: a write of equal values is not seen
            if is_after_training:
                model.train()
                with torch.enable_grad(), strategy.precision.autocast():
                    self.task.loss(model, fetch(range(2)))
                perturb(model)  # as a step does: else a write of what is there already would not be seen
            with torch.no_grad(), strategy.precision.autocast():
                model.eval()
                before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
                memory = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
                call(model, fetch(range(2)))
            now = dict(model.named_parameters())
            written = [name for name, value in before.items() if name in now and not is_equal(now[name], value)]
            rebound = [name for name, place in memory.items() if name in now and now[name].data_ptr() != place]
        # a strategy that goes on with the memory that it knows does not see what is written elsewhere
        is_held = (strategy.rules.holds_memory or strategy.rules.undoes_writes) and strategy.group.world_size > 1
        return written + rebound * is_held


def _hooks_and_frozen(model: nn.Module) -> list[Any]:
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    return [gradient_hooks(model), hooks, [parameter.requires_grad for parameter in model.parameters()]]


def _generator_states(data: Any, depth: int = 4) -> Iterator[str]:
    """Yield the states of the generators in a data set and its parts."""
    if isinstance(data, GENERATORS):
        yield repr(generator_state(data))
    elif depth and isinstance(data, list | tuple | dict):
        for item in [*(data.values() if isinstance(data, dict) else data)][:_MOST_PARTS]:
            yield from _generator_states(item, depth - 1)
    elif depth and not isinstance(data, (*ATOMS, Tensor, type)) and hasattr(data, "__dict__"):
        for value in vars(data).values():
            yield from _generator_states(value, depth - 1)


def _num_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])
