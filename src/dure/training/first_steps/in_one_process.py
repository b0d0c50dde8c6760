"""First steps of a run as one process takes them, and their comparison with those that the run has taken.

Inspections find the known ways in which dividing a batch or a model changes a result. This comparison assumes nothing:
before training rank 0 takes the first steps by itself, in a trial that is undone, with the strategy `single` and whole
batches. After these steps of the run every rank compares its part of weights and optimiser state with some values of
that trial.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dure.comm.groups import Solo
from dure.host.device_kinds import memory_of
from dure.host.devices import available_memory_bytes
from dure.records.sums import Sum
from dure.strategies.contract.abilities import own_state
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.contract.step_facts import Requests
from dure.strategies.contract.strategy import Strategy
from dure.strategies.state.hooks import without_new_hooks
from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.objects.used_globals import state_outside
from dure.strategies.state.saved_state import StrategyState
from dure.strategies.state.tensor_shard import TensorShard, own_shard
from dure.strategies.state.trial import Trial, sharing_state
from dure.strategies.table import STRATEGIES, load_strategy
from dure.torchcompat.modules import move_module
from dure.training.first_steps.values import (
    DTYPES,
    NUM_STEPS,
    OPTIMIZER,
    Difference,
    Recording,
    SomeValues,
    StepsFound,
    chosen,
    difference,
    judged,
)
from dure.training.inspection.collectives import CollectiveCalled, no_collectives
from dure.training.inspection.loss_calls import aside
from dure.training.loop import TrainingLoop, check_schedule
from dure.training.session.loader import FetchRequest, Loader
from dure.training.session.sample_order import GlobalBatch, SampleOrder, total_samples
from dure.training.session.session import Session
from dure.training.session.task_products import checked_optimizer
from dure.training.task.task import Task

_MOST_SECONDS, _MOST_FRACTION, _MOST_SECONDS_EVER = 1.5, 0.01, 30.0
"""Seconds of the steps in one process, estimated or passed, after which nothing is compared: as many always, or up to
that fraction of the estimated time of training, but never more than the last number.
"""
_TRIED_SAMPLES = 8
"""Samples of the call by which the time of a step is estimated."""
_COPIES = 8
"""Memory that the steps may take, in multiples of the model's bytes: gradients, optimiser state and copies."""
_DISTURBED_PLACES = 16
"""Units of the last place by which parameters are changed to find out what rounding decides."""


class OneProcessSteps:
    """First steps of a run in one process, on rank 0."""

    def __init__(self) -> None:
        """Begin without values: nothing is compared until `take` has found some."""
        self.values: dict[str, SomeValues] = {}
        """Values of the tensors of model and optimiser, by name; empty if the steps were not taken."""

    def take(self, strategy: Strategy, task: Task, model: nn.Module, loader: Loader, order: SampleOrder) -> None:
        """Take the steps in a trial, if they can be repeated and take little time and memory.

        Errors are not raised, because training will raise them.

        Args:
            strategy: Strategy of the run with its `objects` and `traits`, not prepared yet.
            task: Task to train.
            model: Whole model on the CPU; it is there again afterwards.
            loader: Loader of the training data.
            order: Order of the training data.
        """
        if strategy.group.rank or not _is_comparable(strategy, model):
            return
        started, objects = time.monotonic(), dict(strategy.objects)
        steps = _Steps(strategy, task, model, loader.in_process(), order, math.inf, objects)
        try:
            move_module(model, strategy.device)
            with sharing_state():
                seconds_each = steps.seconds_of_sample()
                most_seconds = _most_seconds(strategy, order, seconds_each)
                steps = replace(steps, deadline=started + most_seconds)
                if 2 * NUM_STEPS * seconds_each * strategy.spec.global_batch_size <= most_seconds:
                    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
                    recording = Recording(parameters=names)
                    steps.record(recording, order)
                    disturbed = Recording(like=recording)
                    steps.record(disturbed, _Reversed.of(order), is_disturbed=True)
                    self.values = dict(chosen(recording, disturbed))
        except (Exception, CollectiveCalled):
            self.values = {}
        finally:
            move_module(model, "cpu")
            if memory_of(strategy.device) is not None:
                torch.accelerator.empty_cache()  # a part of the model needs less in training

    def compare(self, session: Session, declared: Sequence[str]) -> StepsFound:
        """Compare the state of the run after these steps with that in one process; called on all ranks.

        Args:
            session: Session after `NUM_STEPS` steps.
            declared: Declarations on this rank; if there are any on rank 0, nothing is compared.

        Communication: two gathered JSON messages, the first of up to a megabyte.
        """
        group = session.group
        sent = {} if declared else {name: asdict(values) for name, values in self.values.items()}
        values = {name: SomeValues(**each) for name, each in group.all_gather_json(sent)[0].items()}
        self.values = {}
        if not values:
            return StepsFound(0, None)
        own = _named(own_state(session.strategy))
        found = {name: difference(own[name], each) for name, each in values.items() if name in own}
        by_rank = group.all_gather_json({name: each for name, each in found.items() if each is not None})
        return judged([{name: Difference(*each) for name, each in one.items()} for one in by_rank])


def _is_comparable(strategy: Strategy, model: nn.Module) -> bool:
    """Return whether the run claims to compute what one process computes, and can be repeated."""
    spec, traits = strategy.spec, strategy.traits
    is_divided = strategy.group.world_size * len(strategy.devices) > 1 or strategy.parts.calls_per_step() > 1
    is_plain = strategy.info.is_exact and strategy.is_synchronous and strategy.precision.is_exact and not spec.compile
    differs = (
        traits.reason_unknown
        or traits.draws
        or traits.collate_draws
        or traits.collate_state
        or traits.collates_in_loaders * len(traits.collate_count)
        or traits.data_changes
        or traits.autocasts
        or traits.loss_rounding
        or traits.left_state
        or traits.outer_state
        or traits.collective
    )
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if not is_divided or not is_plain or differs or not dtypes <= DTYPES:
        return False
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])
    memory = memory_of(strategy.device)  # unknown where it is the host's
    free = [available_memory_bytes() // 2, *([] if memory is None else [memory[0]])]
    return _COPIES * num_bytes <= min(free)


def _most_seconds(strategy: Strategy, order: SampleOrder, seconds_of_sample: float) -> float:
    """Return the seconds that the steps may take, in which the other ranks wait."""
    num_devices = strategy.group.world_size * len(strategy.devices)
    training_seconds = seconds_of_sample * total_samples(strategy.spec, order) / num_devices
    return min(max(_MOST_SECONDS, _MOST_FRACTION * training_seconds), _MOST_SECONDS_EVER)


class _Reversed(SampleOrder):
    """Order with the samples of every batch reversed, so that sums over samples round differently."""

    @classmethod
    def of(cls, order: SampleOrder) -> "_Reversed":
        reverse = cls.__new__(cls)
        vars(reverse).update(vars(order))
        return reverse

    def batches(self, samples_seen: int, total_samples: int) -> Iterator[GlobalBatch]:
        """Yield the batches of the order, each reversed."""
        for batch in super().batches(samples_seen, total_samples):
            yield batch._replace(indices=batch.indices[::-1].copy())


@dataclass(frozen=True)
class _Steps:
    """Steps of a task in one process, undone each time."""

    strategy: Strategy
    task: Task
    model: nn.Module
    loader: Loader
    order: SampleOrder
    deadline: float
    """Time on the monotonic clock after which training is not kept waiting any longer."""
    objects: dict[str, object]
    """Objects in which task, model, optimiser and schedule may keep state, by name."""

    def seconds_of_sample(self) -> float:
        """Return the time per sample of a call of the loss on a few of them; infinite if it cannot be undone."""
        few_samples = self.order.permutation(0)[:_TRIED_SAMPLES]
        started = time.monotonic()
        with self._undone():  # the code of its optimiser is not known before it is built
            optimizer = self.task.build_optimizer(self.model)
            schedule = self.task.build_schedule(optimizer, total_samples(self.strategy.spec, self.order))
            self.objects.update(state_outside(self.task, self.model, optimizer, schedule))
        if any(map(_is_iterator, ObjectState(self.objects).first.values())):
            return math.inf
        with self._undone(), self.strategy.precision.autocast():
            batch = next(self.loader.batches([FetchRequest(0, few_samples)]))
            self.model.train()
            result = self.task.loss(self.model, batch)
            total: Any = result.total if isinstance(result, Sum) else result
            total.backward()
            seconds = time.monotonic() - started
        return seconds / len(few_samples)

    def record(self, recording: Recording, order: SampleOrder, *, is_disturbed: bool = False) -> None:
        """Take the steps, and record the tensors of model and optimiser at first and after each step.

        Args:
            recording: Gets them.
            order: Order of the samples.
            is_disturbed: Whether the last places of all parameters are changed before.

        Raises:
            TimeoutError: The deadline has passed after a step.
        """
        with self._undone():
            if is_disturbed:
                _disturb(self.model)
            strategy = self._single()
            recording.begin(_tensors(strategy))
            for _ in self._steps(strategy, order):
                if time.monotonic() > self.deadline:
                    raise TimeoutError
                recording.add(_tensors(strategy))
            strategy.close()

    @contextmanager
    def _undone(self) -> Iterator[None]:
        alone = no_collectives if self.strategy.group.world_size > 1 else nullcontext  # other ranks take no steps now
        trial = Trial(self.model, self.objects, watches_writes=None, copies_parameters=True)
        with aside(), without_new_hooks(self.model), trial, alone():
            yield

    def _single(self) -> Strategy:
        """Return the strategy of one process over the model, ready to train."""
        run = self.strategy
        alone = {"strategy": "single", "nproc": 1, "total_devices": None, "microbatch_size": None, "options": {}}
        spec = run.spec.model_copy(update={**alone, "sync_batchnorm": False})
        precision = Precision(spec.precision, run.device.type)
        context = StrategyContext(STRATEGIES["single"], Solo(), run.devices[:1], precision, spec)
        strategy = load_strategy("single")(context)
        strategy.objects, strategy.traits = run.objects, run.traits
        strategy.prepare(self.model, checked_optimizer(self.task), self.task.loss)
        return strategy

    def _steps(self, strategy: Strategy, order: SampleOrder) -> Iterator[int]:
        """Yield the number of each step when it has been taken."""
        total = total_samples(self.strategy.spec, order)
        given = self.task.build_schedule(strategy.optimizer, total)
        # a run asks for its first factor before training too, and undoes what that sets
        with Trial(self.model, {**self.objects, "schedule": given}, watches_writes=None):
            schedule = check_schedule(given, strategy.optimizer)
        loop = TrainingLoop(
            strategy,
            self.loader,
            order,
            microbatch_size=None,
            schedule=schedule,
            requested=Requests,
            record_samples=False,
        )
        self.model.train()
        for boundary in loop.boundaries(0, total, 0):
            loop.drain()
            yield boundary.step
            if boundary.step == NUM_STEPS:
                break


@torch.no_grad()
def _disturb(model: nn.Module) -> None:
    """Change the last places of all parameters, so that every sum of what they compute rounds differently."""
    for parameter in model.parameters():
        eps = torch.finfo(parameter.dtype).eps
        parameter.mul_(1 + _DISTURBED_PLACES * eps * torch.rand_like(parameter).sub_(0.5))


def _tensors(strategy: Strategy) -> dict[str, Tensor]:
    """Return the tensors of a strategy that has them whole, by name."""
    return {name: shard.tensor for name, shard in _named(strategy.state_dict()).items()}


def _named(state: StrategyState) -> dict[str, TensorShard]:
    """Return the tensors of a strategy's state on this rank, by name, without empty ones."""
    found = {name: value for name, value in state.model.items() if isinstance(value, Tensor)}
    for parameter, of_parameter in state.optimizer.get("state", {}).items():
        kept = of_parameter if isinstance(of_parameter, Mapping) else {}
        found |= {f"{OPTIMIZER}{parameter}.{key}": value for key, value in kept.items()}
    shards = {name: own_shard(value) for name, value in found.items() if isinstance(value, Tensor | TensorShard)}
    return {name: shard for name, shard in shards.items() if _is_plain(shard.tensor)}


def _is_iterator(value: object) -> bool:
    """Return whether a value is an iterator of Python's own, which cannot be set back to where it was."""
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


def _is_plain(tensor: Tensor) -> bool:
    has_numbers = tensor.dtype in DTYPES or not (tensor.is_floating_point() or tensor.is_complex())
    return has_numbers and tensor.layout == torch.strided and tensor.numel() > 0 and not tensor.is_meta
