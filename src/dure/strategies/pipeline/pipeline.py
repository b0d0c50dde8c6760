"""Pipeline: the model in stages on several ranks, which work on different microbatches at the same time.

The engine is torch.distributed.pipelining, which runs the stages in the order of a schedule (`schedule`). dure adds:
stages are cut out of any chain of blocks from outside (`sections.plan`, `sections.sectioned_model`), the task's loss is
used unchanged, microbatches may have unequal sizes without padding (`sections.values`), and losses are weighted so that
gradients are only added. Along the axis `data` of the mesh, whole pipelines share each batch as ranks of ddp do. Along
its axis `tensor`, ranks with the same stages work on the same samples and divide layers as `tensor_parallel` does.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dure.comm.mesh import Mesh
from dure.data.randomness import GeneratorStates
from dure.errors import DureError, SpecInvalid, TaskInvalid, message_of
from dure.host.backends import backend_cure, sends_between_devices
from dure.measure.step_clock import StepClock
from dure.spec import RunSpec
from dure.spec.mesh import parse_mesh
from dure.strategies.contract.batch_parts import BatchParts, DataShare
from dure.strategies.contract.batches import Microbatch, own_copy
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.declarations import Findings
from dure.strategies.contract.reduced_facts import reduced_facts
from dure.strategies.contract.replica_state import ReplicaState, replica_state
from dure.strategies.contract.step_facts import LossTerm, Requests, StepFacts
from dure.strategies.data_parallel.gradient_sums import used_by_any
from dure.strategies.division.local_shards import (
    LocalShards,
    faults_of_common_loss,
    faults_of_cutting,
    faults_of_shards,
)
from dure.strategies.pipeline.cut import decide
from dure.strategies.pipeline.options import PipelineOptions
from dure.strategies.pipeline.schedule import Schedule, num_scheduled
from dure.strategies.pipeline.sequential import Sweeps
from dure.strategies.sections.absent_tensors import guarded
from dure.strategies.sections.cuts import cut_names, faults_of, registered_chain
from dure.strategies.sections.plan import CURE
from dure.strategies.sections.sectioned_model import SectionedModel
from dure.strategies.sections.sectioned_strategy import SectionedStrategy
from dure.strategies.sections.stand_in import call_of, called_again, derivatives_refused, stand_in
from dure.strategies.sections.values import Description, Lanes, lanes_of, nothing, num_bytes, packed, unpacked
from dure.strategies.sections.verify import hooks_gradients
from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.saved_state import StateSource, StrategyState
from dure.strategies.tensor_parallel.plan import axis_faults, needless_options, plan_of
from dure.strategies.tensor_parallel.tensor_division import TensorDivision
from dure.strategies.tensor_parallel.values import undivided
from dure.terminal import few
from dure.torchcompat.compilation import with_compilation

AXES = ("data", "pipeline", "tensor")

_STAGES_PER_RANK = 2
_MICROBATCHES_PER_STAGE = 4
"""Microbatches for each stage if the user sets no size. GPipe found the bubble to be negligible with this many (section
2.3)."""
_KEPT_SCHEDULES = 4
"""Maximum number of cached schedules, each with buffers for every microbatch. A run has one for most steps and one for
the short batch.
"""


@dataclass(slots=True)
class _Call:
    """Microbatch on its way through the stages."""

    microbatch: Microbatch
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: GeneratorStates | None
    """States of the generators before the loss was called, for the stage that calls it again."""
    seed: int
    known: list[Description]
    """Description of each block's output."""


class PipelineParts(BatchParts):
    """Microbatches of a pipeline, by default four for every stage."""

    def __init__(self, spec: RunSpec, num_shares: int, num_stages: int) -> None:
        super().__init__(spec, num_shares)
        self._num_stages = num_stages

    def default_size(self) -> int:
        """Return the size with which there are four microbatches for every stage."""
        share = -(-self.spec.global_batch_size // self.num_shares)
        return max(1, -(-share // (_MICROBATCHES_PER_STAGE * self._num_stages)))

    def calls_per_step(self) -> int:
        """Return the calls on the last stage: one finds out how the model is called, one computes the loss."""
        return super().calls_per_step() * (2 if self._num_stages > 1 else 1)


class Pipeline(SectionedStrategy):
    """Stages over the axis `pipeline` of a mesh, replicas over `data`, and divided layers over `tensor`."""

    options: PipelineOptions
    parts: PipelineParts

    rules = replace(SectionedStrategy.rules, changes_in_step_only=True)

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        axes = parse_mesh(self.spec.mesh, AXES, self.group.world_size, main="pipeline")
        if fault := fault_of_backend(self.device.type, dist.get_backend(), axes["pipeline"]):
            raise SpecInvalid([f"strategy is {self.info.name}: {fault}"])
        self.mesh = Mesh(axes, self.group, self.device, divides_tensors=axes["tensor"] > 1)
        self.section_ranks = self.mesh.group("pipeline")
        self.replicas = self.mesh.group("data")
        self.num_stages = _num_stages(self.mesh.size("pipeline"), self.options)
        self.stages = list(range(self.section_ranks.rank, self.num_stages, self.section_ranks.world_size))
        """Stages of this rank."""
        self.has_loss = self.num_stages - 1 in self.stages
        """True if this rank computes the task's loss."""
        self.division: TensorDivision | None = None
        """Division of layers, if the mesh has several ranks along its axis `tensor`."""
        self.random_stream = self.mesh.coordinate("data")
        self.share = DataShare(
            index=self.mesh.coordinate("data"),
            count=self.mesh.size("data"),
            leads=self.has_loss and self.mesh.coordinate("tensor") == 0,
            is_joint=True,
        )
        self.parts = PipelineParts(self.spec, self.share.count, self.num_stages)

    @classmethod
    def check_model(cls, model: nn.Module, spec: RunSpec) -> list[str]:
        """Refuse a model with fewer blocks than stages, with ties across the cuts, or without a place to cut."""
        faults = []
        options = PipelineOptions.of(spec)
        if options.stages_per_rank is not None and options.schedule != "interleaved":
            faults.append(
                "stages_per_rank is for the schedule interleaved: other schedules have one stage on each rank"
            )
        axes = parse_mesh(spec.mesh, AXES, spec.num_devices, main="pipeline")
        if axes["tensor"] > 1:
            settings = {"compile": spec.compile}
            faults += axis_faults(model, axes["tensor"], options.tensor_plan, settings, "data and pipeline")
        else:
            faults += needless_options("pipeline", options.tensor_plan, is_sequence_parallel=options.sequence_parallel)
        num_stages = _num_stages(axes["pipeline"], options)
        return faults + faults_of(registered_chain(model), num_stages, cut_names(options.cuts), CURE)

    def check_traits(self, model: nn.Module) -> list[str]:
        """Refuse a loss that passes the model state of an earlier call: only the rank of the last stage has that."""
        faults = super().check_traits(model)
        if self.num_stages > 1 and (fed := self.traits.fed_state):
            faults.append(
                f"the task keeps {few(fed)} from one batch to the next and hands it to the model, and only the rank of "
                "the last stage has it: use ddp"
            )
        if self.num_stages > 1 and (names := self.traits.hooked_by_loss):
            faults.append(hooks_gradients(names))
        num_alike = self.mesh.size("tensor")
        if num_alike > 1:
            faults += faults_of_shards(model, self.traits)
        return faults + faults_of_common_loss(self.traits, num_alike)

    # the cut

    def decide(self, model: nn.Module) -> dict[str, Any]:
        """Return the plan of the cut, and its faults."""
        return decide(self, model, self.num_stages, self.options.cuts)

    def place(self, model: nn.Module) -> nn.Module:
        """Decide where to cut, and divide layers of this rank's stages, before the optimiser is built.

        Communication: that of the decision, and a broadcast of each divided parameter over the tensor group.
        """
        model = super().place(model)
        if self.mesh.size("tensor") > 1:
            plan = plan_of(model, self.mesh.size("tensor"), self.options.tensor_plan)
            own = None
            if self.num_stages > 1:
                plan.leave_out_others(model, self.plan.calls)
                own = [name for name in self.plan.calls if self.plan.section_of_block(name) in self.stages]
            alike = self.mesh.group("tensor")
            self.division = TensorDivision(
                plan, self.mesh, alike, self.device, is_sequence_parallel=self.options.sequence_parallel
            )
            self.division.divide(model, own)
        return model

    def sectioned_model(self) -> SectionedModel:
        """Return the model of which a section is computed at a time; what leaves a section is whole."""
        if self.division is None:
            return super().sectioned_model()
        return SectionedModel(self.model, self.plan, self.division.dividing, undivided)

    def compile_model(self) -> None:
        """Do nothing yet: `distribute` compiles the blocks that this rank keeps."""

    def distribute(self) -> None:
        """Keep this rank's stages, of the model and of the optimiser, and release the others."""
        if self.division is not None and (faults := faults_of_cutting(self.optimizer)):
            raise SpecInvalid([f"strategy is {self.info.name}: {fault}" for fault in faults])
        self.keep(self.stages)
        own = [(name, p) for name, p in self.model.named_parameters() if self.part.is_own(name)]
        self.shards = LocalShards(own, self.optimizer)
        self.trainable = self.shards.parameters
        if self.division is not None:
            common = [parameter for parameter in self.trainable if not self.shards.axes_of(parameter)]
            self.division.watch_undivided(common, self.options.bucket_bytes)
        if self.spec.compile:
            self._compile_blocks()
        self.sweeps = Sweeps(self.sections, self.part, self.mesh, self.device, self.precision)
        self.evaluated = stand_in(self.model, self.sweeps.evaluate, self.part.state_dict)
        self._clock = StepClock(self.device)
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._schedules: dict[Any, Schedule] = {}
        self._schedule: Schedule | None = None
        self._calls: list[_Call | None] = []
        self._lanes: list[Lanes] = []
        self._failure: Exception | None = None
        self._is_kind_known = False
        self._global_samples = 0

    def _compile_blocks(self) -> None:
        """Compile the blocks of this rank's stages; what the model does between them runs as it is written."""
        for name in dict.fromkeys(self.plan.calls):
            if self.plan.section_of_block(name) in self.stages:
                block = self.model.get_submodule(name)
                block.forward = with_compilation(torch.compile(block.forward, mode=self.spec.compile_mode))

    def check_groups(self) -> None:
        """Refuse parameters of the optimiser's groups that the schedule has frozen: the model has others."""
        super().check_groups()
        self.shards.refuse_frozen(self.info.name)

    # the size of microbatches

    def microbatch_samples(self) -> int:
        """Return the maximum samples of a microbatch."""
        return self.spec.microbatch_size or self.parts.default_size()

    # a step

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Run the schedule over all microbatches.

        Communication: point to point, per microbatch and cut the activations forward and their gradients back.
        """
        self.sums.begin(requests)
        self._global_samples = global_samples
        self._found: dict[int, LossTerm] = {}
        if self.division is None:
            self._run(microbatches)
        else:
            self.division.traffic.sent_bytes = 0
            with self.division.differentiating():
                self._run(microbatches)
        self.part.refuse_lost_gradients()
        for index in sorted(self._found):
            self.sums.add(self._found[index])
        self._calls = []

    def _run(self, microbatches: Iterable[Microbatch]) -> None:
        # the rank that calls the loss again starts from the state at this point
        changes = self.has_loss and (self.traits.learned_state or self.traits.counted_state)
        state = ObjectState(self.objects) if changes else None
        self._calls = [self._noted(microbatch) for microbatch in microbatches]
        if state is not None:
            state.put_back()
        number = num_scheduled(self._schedule_name(), len(self._calls), self.section_ranks.world_size, self.num_stages)
        self._calls += [None] * (number - len(self._calls))
        self._schedule = self._schedule_for(number)
        try:
            self._schedule.run()
        except RuntimeError as error:
            # torch replaces the exception of a stage by one of its own
            if self._failure is not None:
                raise self._failure from None
            traits = self.traits
            changed = (*traits.learned_buffers, *traits.counted_buffers)
            if changed and "modified by an inplace operation" in str(error.__cause__):
                raise TaskInvalid(
                    f"the model's forward changes {few(changed)} in place, and the backward of an earlier microbatch, "
                    "which is still to come in a pipeline, needs the values from before: let forward put a new tensor "
                    "there (self.mask = self.mask.roll(1)) or compute with a clone, or use ddp or fsdp"
                ) from error
            raise

    def computed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the task, which may not use tensors of other ranks.

        Raises:
            TaskInvalid: It fails in an evaluation, on a rank that has not run the whole model.
        """
        try:
            return super().computed(self._undivided(function), *args)
        except Exception as error:
            if isinstance(error, DureError) or self.has_loss or torch.is_grad_enabled():
                raise
            reason = " ".join(f"{type(error).__name__}: {message_of(error)}".split())[:200]
            raise TaskInvalid(
                f"the task's {function.__name__} failed in an evaluation ({reason}), for which every rank computes "
                "it from the model's output, having run its own stages alone: if it uses what blocks of other "
                f"stages keep or hooks see, return that from the model, or use {CURE}"
            ) from error

    def _undivided(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the task that may use divided weights and values, and returns whole values."""
        if (division := self.division) is None:
            return function
        return functools.wraps(function)(functools.partial(division.computed, function))

    def _schedule_name(self) -> str:
        if self.num_stages == 1:
            return "gpipe"
        return self.options.schedule

    def _noted(self, microbatch: Microbatch) -> _Call | None:
        """Record how the task's loss calls the model; None for a microbatch without samples, which is not computed."""
        if microbatch.is_padding:
            return None
        states = GeneratorStates.now(self.device) if self.has_loss else None
        # the loss is called once more for the last stage, and may change the batch
        batch = own_copy(microbatch.batch) if self.has_loss else microbatch.batch
        args, kwargs = self.watched(call_of, self.loss, self.model, batch)
        seed = self._seeds.draw()
        known = self.sweeps.known(args, kwargs) if self.num_stages > 1 else []
        return _Call(microbatch, args, kwargs, states, seed, known)

    def _schedule_for(self, number: int) -> Schedule:
        cuts = [self.plan.begins[stage] - 1 for stage in range(1, self.num_stages)]
        known = [call.known for call in self._calls if call is not None]
        self._lanes = [lanes_of(values[cut] for values in known) for cut in cuts]
        key = (number, tuple(tuple(lanes.items()) for lanes in self._lanes))
        if key not in self._schedules:
            while len(self._schedules) >= _KEPT_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = Schedule.build(
                self._schedule_name(), self._compute, self.stages, self._lanes, number,
                device=self.device, group=self.mesh.process_group("pipeline"), clock=self._clock,
            )  # fmt: skip
        return self._schedules[key]

    def _compute(self, stage: int, index: int, buffers: tuple[Tensor, ...]) -> "Tensor | tuple[Tensor, ...]":
        """Compute the forward pass of one stage on one microbatch."""
        try:
            call = self._calls[index]
            is_last = stage == self.num_stages - 1
            lanes = None if is_last else self._lanes[stage]
            if call is None:
                zeros = nothing(buffers, lanes, self._anchor)
                return zeros[0] if is_last else zeros
            begin, end = self.plan.bounds(stage)
            received = unpacked(buffers, call.known[begin - 1], self._lanes[stage - 1]) if stage else None
            if is_last:
                return self._loss_root(index, call, begin, received)
            assert lanes is not None
            with self._drawing_of(call, begin), self.precision.autocast(), guarded():
                several = len(self.stages) > 1  # the model may work in place, and is called for each
                args, kwargs = own_copy((call.args, call.kwargs)) if several else (call.args, call.kwargs)
                value = self.sections.run(
                    (begin, end), args, kwargs, received=received, known=call.known, device=self.device
                )
            return packed(value, call.known[end - 1], lanes, self._anchor, self.plan.calls[end - 1])
        except Exception as error:
            self._failure = error
            raise

    def _drawing_of(self, call: _Call, begin: int) -> AbstractContextManager[None]:
        return self._draws.of(call.seed, begin, in_training=self.model.training)

    def _loss_root(self, index: int, call: _Call, begin: int, received: Any) -> Tensor:
        """Compute the task's loss of a microbatch; its call of the model continues from the received values."""
        is_called = False

        def answer(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_called
            if is_called:
                raise TaskInvalid(called_again(self.model))
            is_called = True
            with self._drawing_of(call, begin):
                return self.sections.run(
                    (begin, None), args, kwargs, received=received, known=call.known, device=self.device
                )

        here = GeneratorStates.now(self.device)
        assert call.states is not None
        call.states.put_back()
        try:
            with derivatives_refused(self.model):
                term = self.loss_term(stand_in(self.model, answer), call.microbatch, self._global_samples)
        finally:
            here.put_back()
        self._found[index] = term
        return self.precision.scale(term.root).double()

    def square_of_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return the square of the norm of the gradients of this rank's stages, of all ranks of its tensor group."""
        groups = {} if self.division is None else {"tensor": self.mesh.group("tensor")}
        return self.shards.square_of_norm(parameters, groups, dtype=self.sums.dtype, device=self.device)

    def sync_gradients(self) -> StepFacts:
        """Sum the facts over all ranks, and gradients over the replicas of the pipeline.

        Communication: 4 float64 over all; one all_reduce per bucket of this rank's gradients over the axis `data`.
        """
        self.shards.take_gradients()
        facts = self._agreed_facts()
        assert self._schedule is not None
        self._schedule.end()  # all stages are done: a last stage is idle while the first is in its backward
        self._add_up_over_replicas()
        if self.division is not None:
            self.division.keep_alike()
        return facts

    def _agreed_facts(self) -> StepFacts:
        beside = [] if self.division is None else [self.division.draws()]
        if not self._is_kind_known:
            # only the last stages know whether the loss has its own count of items
            beside.append(float(self.expectation is not None))
        # filled on the device where that is possible: a copy of a list would wait for it
        numbers = [torch.full((1,), number, dtype=self.sums.dtype, device=self.device) for number in beside]
        agreed = torch.cat(numbers) if numbers else None
        facts = reduced_facts(self, agreed)
        if self.division is not None:
            assert agreed is not None
            self.division.check_draws(agreed[:1])
        if not self._is_kind_known:
            assert agreed is not None
            if agreed[-1].item() > 0:
                self.expected_items(self._global_samples)
            self._is_kind_known = True
        return facts

    def _add_up_over_replicas(self) -> None:
        if self.replicas.world_size == 1 or not self.trainable:
            return
        # a parameter that no replica used keeps no gradient, so that the optimiser skips it as on one device
        used = used_by_any(self.trainable, self.replicas)
        for bucket in _in_buckets(used, self.options.bucket_bytes):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self.replicas.all_reduce_sum(flat)
            parts = flat.split([p.numel() for p in bucket])
            for parameter, gradient, part in zip(bucket, gradients, parts, strict=True):
                parameter.grad = gradient.copy_(part.view_as(gradient))

    def declared_by_row(self, found: Findings) -> list[str]:
        """Return the row's declarations; draws of divided heads are declared only if there are any."""
        has_own_draws = self.division is not None and self.division.values.have_own_draws
        texts = super().declared_by_row(found)
        return [text for text in texts if has_own_draws or not text.startswith("random numbers inside")]

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes sent by this rank over its cuts in the last step, plus 2 (D-1)/D of its gradients' bytes."""
        if self._schedule is None:
            return 0
        once = 0
        for stage in self.stages:
            once += num_bytes(self._lanes[stage]) if stage < self.num_stages - 1 else 0
            once += num_bytes(self._lanes[stage - 1]) if stage > 0 else 0
        reduced = sum(p.numel() * p.element_size() for p in self.trainable)
        replicas = self.replicas.world_size
        layers = 0 if self.division is None else self.division.sent_bytes()
        return once * self._schedule.num_microbatches + 2 * (replicas - 1) * reduced // replicas + layers

    def measured(self) -> Any:
        """Return the idle fraction of this rank within the schedule, the bubble."""
        assert self._schedule is not None
        bubble = self._schedule.bubble()
        return bubble() if self.device.type == "cpu" else bubble

    def describe(self) -> list[str]:
        """Return lines about the cuts of the model and the order of the stages' work."""
        lines = [] if self.division is None else self.division.describe(self.model)
        if self.num_stages == 1:
            return lines
        layout = f"cut before {self.plan.first_blocks()}: {self.num_stages} stages, schedule {self._schedule_name()}"
        return [f"{layout}, microbatches of at most {self.microbatch_samples()}", *lines]

    # evaluation and checkpoints

    def replica(self) -> ReplicaState:
        """Return this rank's tensors; ranks with the same stages hold the same."""
        part = f"stages of pipeline rank {self.section_ranks.rank}"
        if self.division is not None:
            part += f", divided for tensor rank {self.mesh.coordinate('tensor')}"
        return replica_state(part, self.shards.named, self.optimizer)

    def rank_of(self, section: int) -> int:
        """Return the first rank with a section."""
        return super().rank_of(section) * self.mesh.size("tensor")

    def state_dict(self) -> StrategyState:
        """Return this rank's tensors and optimiser state."""
        with self.shards.whole():
            return super().state_dict()

    def load_state_dict(self, source: StateSource) -> None:
        """Load this rank's part of a checkpoint."""
        with self.shards.whole():
            super().load_state_dict(source)

    def before_reading(self) -> None:
        """Synchronise what several ranks have: buffers over replicas, tensors outside the blocks over stages."""
        self.replicas.broadcast([buffer for buffer in self.part.own_buffers() if buffer.numel()])
        super().before_reading()

    def close(self) -> None:
        """Release the schedules, which hold process groups, and restore torch's settings."""
        self._schedules.clear()
        self._schedule = None
        if self.division is not None:
            self.division.close()


def _in_buckets(parameters: Sequence[nn.Parameter], most_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield groups of parameters of one dtype, as many as fit into `most_bytes`, or a larger one alone."""
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in (p for p in parameters if p.dtype == dtype):
            num_bytes = parameter.numel() * parameter.element_size()
            if bucket and size + num_bytes > most_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += num_bytes
        yield bucket


def fault_of_backend(device_type: str, backend: str, num_ranks: int) -> str | None:
    """Return the reason why stages on such devices cannot communicate over a backend, or None if they can."""
    if num_ranks == 1 or device_type == "cpu" or sends_between_devices(backend, device_type):
        return None
    return (
        f"stages on {device_type} devices send activations from device to device, which {backend} cannot: give every "
        f"rank a device of its own ({backend_cure(device_type)}), or use --device cpu, or model_parallel"
    )


def _num_stages(num_ranks: int, options: PipelineOptions) -> int:
    if num_ranks == 1 or options.schedule != "interleaved":
        return num_ranks
    return num_ranks * (options.stages_per_rank or _STAGES_PER_RANK)
