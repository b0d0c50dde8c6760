"""Session of a rank: everything it needs to train or evaluate, built from a spec in the required order."""

import dataclasses
import functools
import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dure.comm.groups import Group, Solo, open_group
from dure.data.partition import shares
from dure.errors import DataInvalid, RanksDisagree, SpecInvalid, TaskInvalid
from dure.host.backends import backend_name
from dure.host.device_kinds import device_kind
from dure.host.devices import check_devices, count_accelerators, resolve_device
from dure.process.context import Place
from dure.spec import RunSpec
from dure.strategies.contract.abilities import faults_of_model, role_of
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.declarations import depends_on_ranks
from dure.strategies.contract.loss_traits import LossTraits
from dure.strategies.contract.precision import Precision, allow_tf32
from dure.strategies.contract.strategy import LossFunction, Strategy
from dure.strategies.state.hooks import without_new_hooks
from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.objects.used_globals import state_outside
from dure.strategies.state.shared_storage import has_own_memory, sharing_memory
from dure.strategies.state.trial import is_equal
from dure.strategies.table import STRATEGIES, load_strategy
from dure.terminal import few, status_writer
from dure.torchcompat.devices import bind_to_numa_node
from dure.torchcompat.gradients import settle_engine
from dure.torchcompat.imports import import_late_parts
from dure.torchcompat.one_process import reads_of_world_size
from dure.training.objects.kept_state import KeptState
from dure.training.seeds import make_deterministic, seed_everything
from dure.training.session.data_state import DataState
from dure.training.session.evaluation import evaluation_batch_size
from dure.training.session.initial_draws import InitialDraws
from dure.training.session.loader import FetchRequest, Loader, SampleFetch, check_dataset
from dure.training.session.one_process_build import OneProcessBuild, TaskParts, build_as_one_process
from dure.training.session.sample_order import SampleOrder, total_samples
from dure.training.session.task_inspection import TaskInspection
from dure.training.session.task_products import built_model, checked_optimizer
from dure.training.task.digests import code_digest
from dure.training.task.given_task import make_task
from dure.training.task.identity import TaskIdentity, refuse_unlike_samples, sample_views
from dure.training.task.task import Task


@dataclass(kw_only=True)
class Session:
    """Task, data, model and strategy of one rank, ready to use."""

    spec: RunSpec
    place: Place
    task: Task
    group: Group
    strategy: Strategy
    train_loader: Loader
    order: SampleOrder
    total_samples: int
    eval_loader: Loader | None
    eval_samples: int
    eval_batch_size: int
    identity: TaskIdentity
    """Identity of the trained task, compared with that in a checkpoint."""
    data_state: DataState | None = None
    """State of the data that no checkpoint holds; None if it is not watched."""
    aliases: frozenset[str] = frozenset()
    """Paths of parameters that share memory with other state, and paths of that state."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Further differences from the undisturbed one-process run, found while the session was built."""
    reseeding_note: str = ""
    """Declaration for generators that a checkpoint could not restore; it applies once the task draws. Empty if all
    were."""
    one_process_build: OneProcessBuild = dataclasses.field(default_factory=OneProcessBuild)
    """Differences between this task and the same task built in one process."""
    kept: KeptState
    """Plain state other than that of model and optimiser."""
    set_by_evaluation: set[str] = dataclasses.field(default_factory=set)
    """Plain state that the rehearsed evaluation changed."""


def open_rank_group(spec: RunSpec, place: Place) -> tuple[Group, tuple[torch.device, ...]]:
    """Choose this rank's devices, and join the process group.

    Raises:
        SpecInvalid: The spec asks for more devices than are visible.
        EnvironmentLacks: The requested kind of device is not available.
    """
    info = STRATEGIES[spec.strategy]
    # parameter servers are the last ranks and have no device
    kind = resolve_device(spec.device) if info.one_process or place.rank.rank < spec.num_devices else "cpu"
    num_here = spec.nproc if info.one_process else min(spec.num_devices, place.rank.local_world_size)
    check_devices(kind, num_here, shared=spec.share_devices, is_launched=not place.is_supervised)
    devices = _devices(kind, spec, place, one_process=info.one_process)
    abilities = device_kind(kind)
    if abilities.has_several:
        torch.accelerator.set_device_index(devices[0])
    if abilities.times_convolutions:
        # before the task's own code, which may disable it
        torch.backends.cudnn.benchmark = not spec.deterministic
    if spec.numa_binding is not None and abilities.has_address:
        bind_to_numa_node(devices[0].index, spec.numa_binding)
    allow_tf32(spec.precision == "tf32")
    if spec.deterministic:
        make_deterministic()
    torch.set_num_threads(place.threads)
    settle_engine()
    if info.one_process:
        return Solo(), devices
    import_late_parts()
    backend = _backend(spec, place)
    group = open_group(
        place.rank, place.store, device=devices[0], backend=backend, timeout_seconds=spec.timeout_seconds
    )
    return group, devices


def _backend(spec: RunSpec, place: Place) -> str:
    rank, kind, info = place.rank, resolve_device(spec.device), STRATEGIES[spec.strategy]
    is_on_host = info.extra_processes or info.exchanges_on_host or spec.share_devices
    is_one_host = rank.local_world_size == rank.world_size > 1
    return backend_name(spec.backend, kind, is_one_host=is_one_host, sends_from_devices=not is_on_host)


def _devices(kind: str, spec: RunSpec, place: Place, *, one_process: bool) -> tuple[torch.device, ...]:
    if not device_kind(kind).has_several:
        # on the CPU (and on MPS, which has one device) the replicas of one process are virtual devices
        return (torch.device(kind),) * (spec.nproc if one_process else 1)
    if one_process:
        return tuple(torch.device(kind, index % count_accelerators(kind)) for index in range(spec.nproc))
    return (torch.device(kind, place.rank.local_rank % count_accelerators(kind)),)


def open_session(
    spec: RunSpec,
    place: Place,
    group: Group,
    devices: tuple[torch.device, ...],
    around_loss: Callable[[LossFunction], LossFunction] | None = None,
    traits: LossTraits | None = None,
    draws: InitialDraws | None = None,
    before_prepare: Callable[[Strategy, Task, nn.Module, Loader, SampleOrder], None] | None = None,
) -> Session:
    """Build task, data, model and strategy, and check that every rank built the same.

    Args:
        spec: Spec of the run.
        place: Context of this rank.
        group: Process group of all ranks.
        devices: Devices of this rank.
        around_loss: Wrapper of the task's loss, for fault injection.
        traits: Traits of the loss if they are known; None to find them.
        draws: Draws of an earlier build of the model, to which those of this one are added; None for none.
        before_prepare: Called with the whole model and the loss's traits known, before the strategy divides the model.

    Raises:
        TaskInvalid: A method of the task returns an invalid value.
        DataInvalid: The data are empty, or of a kind on which no run can be defined.
        RanksDisagree: The ranks did not build the same.
    """
    # a trial of the loss redirects stderr
    startup = group.startup(None if spec.quiet else status_writer())
    with reads_of_world_size() as reads:
        seed_everything(spec.seed)
        task = make_task(spec.task, spec.task_options)
        with startup.step("preparing the data"):
            if place.rank.local_rank == 0:
                _prepare_data(task, is_alone=place.rank.local_world_size == 1)
        seed_everything(spec.seed)
        with startup.step("loading the data"):
            train_data, eval_data = task.train_data(), task.eval_data()
        # in one process nothing reads evaluation data before the first evaluation, and a change by reading is no state
        data_state = DataState(train_data, eval_data if group.world_size > 1 else None)
        data = _Data.of(spec, task, train_data, eval_data, devices[0])
        seed_everything(spec.seed)
        with startup.step("building the model"), (draws or InitialDraws()).of_build():
            model = built_model(task)
    check_ranks_agree(group, _fingerprint(spec, task, model, data.order, data.eval_samples))
    strategy = _build_strategy(spec, group, devices)
    if faults := faults_of_model(load_strategy(spec.strategy), model, spec):
        raise SpecInvalid([f"strategy is {spec.strategy}: {fault}" for fault in faults])
    # before rank 0 tries the loss: a collate may change samples that the data set holds
    identity = TaskIdentity.of(task, data.order.num_samples, data.eval_samples, data.train_loader.sample)
    data.refuse_unlike(group, identity)
    data_state.leave_out_changed()
    strategy.example = data.first_samples
    strategy.objects = {"task": task, **state_outside(task, model)}
    for loader in filter(None, (data.train_loader, data.eval_loader)):
        loader.watch_collate(strategy.objects)
    one_process_build = OneProcessBuild()
    inspection = TaskInspection(strategy=strategy, task=task, model=model, loader=data.train_loader, order=data.order)
    with startup.step("trying the task on a few samples"):
        if reads and group.rank == 0 and group.world_size > 1:
            parts = TaskParts(task=task, train_data=train_data, eval_data=eval_data, model=model)
            one_process_build = build_as_one_process(spec, parts)
        strategy.traits = _traits(inspection, traits, one_process_build)
    if faults := strategy.check_traits(model):
        raise SpecInvalid([f"strategy is {spec.strategy}: {fault}" for fault in faults])
    not_kept, aliases = _not_kept_by_state_dict(model), sharing_memory(model, strategy.objects)
    if before_prepare is not None:
        with startup.step("taking the first steps in one process"):
            before_prepare(strategy, task, model, data.train_loader, data.order)
    if later := strategy.traits.phases:
        strategy.phases = functools.partial(inspection.phases().entered, later)
    strategy.prepare(model, checked_optimizer(task), around_loss(task.loss) if around_loss else task.loss)
    if not strategy.draws:
        strategy.random_stream = 0  # all ranks make the same draws for the optimiser, as one process does
    notes = [depends_on_ranks(one_process_build.difference)] if one_process_build.difference else []
    notes += not_kept

    def read_sample(samples: Any, index: int, epoch: int) -> Any:
        return SampleFetch(samples, task.collate, spec.seed).sample(index, epoch)

    if read_counts := data_state.changed_by_reading(read_sample):
        notes.append(_CHANGED_BY_READING.format(few(read_counts)))
    elif data_state.follows_from_other_reads(read_sample):
        notes.append(_FOLLOWS_FROM_READS)
    if data_state.keeps_random_values(read_sample):
        notes.append(_KEPT_DRAWS)
    data_state.record()  # trials have put tensors back, which counts as a change
    return Session(
        spec=spec,
        place=place,
        task=task,
        group=strategy.group,
        strategy=strategy,
        train_loader=data.train_loader,
        order=data.order,
        total_samples=total_samples(spec, data.order),
        eval_loader=data.eval_loader,
        eval_samples=data.eval_samples,
        eval_batch_size=evaluation_batch_size(data.eval_samples, spec.eval_batch_size) if data.eval_samples else 1,
        identity=identity,
        notes=notes,
        data_state=data_state,
        aliases=frozenset(aliases),
        one_process_build=one_process_build,
        kept=KeptState(task, strategy.model, strategy.built_optimizer),
    )


def _not_kept_by_state_dict(model: nn.Module) -> list[str]:
    """Return declarations of the tensors that the model's own `state_dict` leaves out or changes, if there are any."""
    buffers = {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    kept, texts = model.state_dict(), []
    own: dict[str, Tensor] = {**dict(model.named_parameters()), **buffers}
    if left_out := [name for name in own if name not in kept]:
        texts.append(
            f"weights: the model's own state_dict leaves out {few(left_out)}, which no checkpoint holds; a resume "
            "begins with those of build_model"
        )
    if changed := [name for name, tensor in own.items() if name in kept and _is_changed(tensor, kept[name])]:
        texts.append(
            f"weights: the model's own state_dict has other values of {few(changed)} than the model, such as rounded "
            "ones; a resume or a restart begins with these"
        )
    return texts


def _is_changed(tensor: Tensor, kept: object) -> bool:
    """Return whether a state_dict has anything but the tensor itself, without its graph, in place of a tensor."""
    if not isinstance(kept, Tensor):
        return True
    if kept is tensor or not (has_own_memory(kept) and has_own_memory(tensor)):
        return False
    is_view = kept.data_ptr() == tensor.data_ptr() and kept.dtype == tensor.dtype and kept.shape == tensor.shape
    return not is_view and not is_equal(kept.to(tensor.device), tensor.detach())


_CHANGED_BY_READING = (
    "state of the data set that changes with each read ({}): no checkpoint holds it, and each rank and each loader "
    "process has its own; a sample that follows from it is another one after a resume, and on other ranks"
)
_FOLLOWS_FROM_READS = (
    "data: a sample follows from the samples that were read before it, of which each rank and each loader process has "
    "its own, and a resume has none (compute it from its index alone)"
)
_KEPT_DRAWS = (
    "data: samples keep the random values that they had when they were first read, which other ranks, loader processes "
    "and a resume do not have (draw them for each read, or in __init__ from a seed)"
)


@dataclass(frozen=True, kw_only=True)
class _Data:
    """Data of a task, and how a run reads them."""

    order: SampleOrder
    train_loader: Loader
    eval_loader: Loader | None
    eval_samples: int

    @classmethod
    def of(cls, spec: RunSpec, task: Task, train_data: Any, eval_data: Any, device: torch.device) -> "_Data":
        """Check the data that a task returned, and build their loaders and order.

        Raises:
            DataInvalid: The data are empty, or of a kind on which no run can be defined.
        """

        def loader(data: Any, method: str) -> Loader:
            check_dataset(data, f"{type(task).__name__}.{method}")
            return Loader(SampleFetch(data, task.collate, spec.seed), device, spec.num_workers, spec.prefetch_factor)

        train_loader = loader(train_data, "train_data")
        return cls(
            order=SampleOrder(
                len(train_data), spec.global_batch_size, seed=spec.seed, shuffle=spec.shuffle, drop_last=spec.drop_last
            ),
            train_loader=train_loader,
            eval_loader=None if eval_data is None else loader(eval_data, "eval_data"),
            eval_samples=0 if eval_data is None else len(eval_data),
        )

    def first_samples(self, num_samples: int) -> Any:
        """Return a batch of the first samples of the training data, of at most so many."""
        indices = np.arange(min(num_samples, self.order.num_samples))
        return next(self.train_loader.without_workers().batches([FetchRequest(0, indices)]))

    def refuse_unlike(self, group: Group, identity: TaskIdentity) -> None:
        """Refuse data of which the ranks do not read the same samples.

        Communication: one gathered JSON message.

        Raises:
            DataInvalid: The data differ; the message names the kind of data, the sample and the rank.
        """
        if group.world_size == 1:
            return
        samples = {"training": identity.samples}
        if self.eval_loader is not None:
            samples["evaluation"] = sample_views(self.eval_samples, self.eval_loader.sample)
        refuse_unlike_samples(group.all_gather_json(samples))


def _prepare_data(task: Task, *, is_alone: bool) -> None:
    """Call the task's `prepare_data`.

    Args:
        task: Task whose data are prepared.
        is_alone: Whether this is the only rank of the host, so that no other lacks what is set.

    Raises:
        TaskInvalid: It sets attributes or global variables, which the other ranks do not have.
    """
    if is_alone or type(task).prepare_data is Task.prepare_data:
        task.prepare_data()
        return
    before = ObjectState({"task": task, **state_outside(task, nn.Identity())})
    task.prepare_data()
    if changed := [*before.changed()]:
        raise TaskInvalid(
            f"prepare_data sets {few(changed)}, which the other ranks of this host do not have, because one rank alone "
            "calls it: write files there, and set what the task needs in train_data, which all ranks call"
        )


def _traits(inspection: TaskInspection, known: LossTraits | None, one_process_build: OneProcessBuild) -> LossTraits:
    """Return the traits of the task's loss on all ranks, either the known ones or those of a new inspection."""

    def shared() -> LossTraits:
        if known is None:
            return inspection.traits(one_process_build)
        return LossTraits.from_json(inspection.strategy.group.all_gather_json(asdict(known))[0])

    traits = shared()
    if not traits.has_failed and not traits.needs_optimizer:
        return traits
    with without_new_hooks(inspection.model):
        # for its side effects on the task; the strategy builds its own
        inspection.task.build_optimizer(inspection.model)
    if known is not None:
        return traits
    again = shared()
    return traits if again.has_failed else replace(again, needs_optimizer=True)


def check_parts(session: Session, samples_seen: int) -> None:
    """Refuse parts of batches that the loss does not treat as it treats whole batches.

    Args:
        session: Session of this rank.
        samples_seen: Position from which the run continues; earlier batches do not matter.

    Raises:
        SpecInvalid: The loss sets gradients, and sees batches in parts; or it reads gradients, and is called several
            times a step; or it fails on a single sample, and a batch has a part of one sample. The message names that
            batch size.
    """
    is_in_parts = len(session.strategy.parts.of(session.spec.global_batch_size)) > 1
    if session.strategy.traits.sets_gradients and is_in_parts:
        raise SpecInvalid(
            [
                "the task's loss sets gradients itself (by a backward pass of its own, say), which is not weighted as "
                "the parts of a batch are: add that term to the loss that it returns, or let one process compute "
                "whole batches"
            ]
        )
    if session.strategy.traits.uses_gradients and session.strategy.parts.calls_per_step() > 1:
        raise SpecInvalid(
            [
                "the task's loss reads or changes the parameters' gradients, which hold those of the batch's earlier "
                "parts where it is called several times a step: use a --microbatch-size that holds a process's whole "
                "share, or ddp on more ranks"
            ]
        )
    fault, parts = session.strategy.traits.fails_alone, session.strategy.parts
    if fault is None:
        return
    parts_of = parts.of if session.strategy.traits.model_fails_alone else parts.of_loss
    for size in sorted(session.order.batch_sizes(samples_seen, session.total_samples)):
        if size > 1 and 1 in parts_of(size):
            raise SpecInvalid(
                [
                    f"a batch of this run has {size} samples, of which {session.spec.strategy} gives one alone to the "
                    f"loss, and that takes more ({fault}): use --drop-last, another --global-batch-size or "
                    "--microbatch-size, or fewer ranks"
                ]
            )


def _build_strategy(spec: RunSpec, group: Group, devices: tuple[torch.device, ...]) -> Strategy:
    name = spec.strategy
    precision = Precision(spec.precision, devices[0].type)
    return role_of(load_strategy(name), group, spec)(StrategyContext(STRATEGIES[name], group, devices, precision, spec))


def _fingerprint(spec: RunSpec, task: Task, model: nn.Module, order: SampleOrder, eval_samples: int) -> dict[str, Any]:
    """Return what must be equal on every rank, about 100 bytes per parameter."""
    return {
        "Python version": platform.python_version(),
        "torch version": torch.__version__,
        "task code": code_digest(type(task)),
        "seed": spec.seed,
        "global_batch_size": spec.global_batch_size,
        "training samples": order.num_samples,
        "evaluation samples": eval_samples,
        "parameters": [[name, list(p.shape), str(p.dtype)] for name, p in model.named_parameters()],
    }


def check_ranks_agree(group: Group, mine: Mapping[str, Any]) -> None:
    """Compare what the ranks built, or were asked for, before a difference causes silently wrong results or an abort.

    Communication: one gathered JSON message.

    Raises:
        RanksDisagree: The ranks differ; the message names the first field that differs, and both values.
    """
    if group.world_size == 1:
        return
    everyone = group.all_gather_json(mine)
    for rank, theirs in enumerate(everyone):
        for field, value in everyone[0].items():
            if theirs[field] == value:
                continue
            if field == "parameters":
                first = next(
                    ((a, b) for a, b in zip(value, theirs[field], strict=False) if a != b),
                    (len(value), len(theirs[field])),
                )
                field, value, theirs = "first differing parameter", first[0], {"first differing parameter": first[1]}
            raise RanksDisagree(
                f"rank 0 and rank {rank} do not run the same: {field} is {value} on rank 0 and {theirs[field]} on rank "
                f"{rank}; start all ranks with the same code, data and settings"
            )


def check_sync_batchnorm(session: Session, samples_seen: int) -> None:
    """Refuse a batch that leaves a rank without samples, because its padding would enter the statistics.

    Args:
        session: Session of this rank.
        samples_seen: Position from which the run continues; earlier batches do not matter.

    Raises:
        SpecInvalid: There is such a batch; the message names the size of the smallest.
    """
    spec, world_size = session.spec, session.strategy.share.count
    if not spec.sync_batchnorm:
        return
    for size in sorted(session.order.batch_sizes(samples_seen, session.total_samples)):
        counts = shares(size, world_size)
        num_microbatches = 1 if spec.microbatch_size is None else math.ceil(counts[0] / spec.microbatch_size)
        if counts[-1] < num_microbatches:
            within = "" if num_microbatches == 1 else f" in {num_microbatches} microbatches"
            if session.place.orders.microbatch_size is not None:
                within += ", memory having run out with fewer"
            raise SpecInvalid(
                [
                    f"a batch of this run has {size} sample(s) for {world_size} ranks{within}, and --sync-batchnorm "
                    "needs one on each in each: use --drop-last, or another --global-batch-size or --microbatch-size"
                ]
            )


def evaluation_data_or_refuse(session: Session) -> Loader:
    """Return the evaluation loader.

    Raises:
        DataInvalid: The task has no evaluation data.
    """
    if session.eval_loader is None:
        raise DataInvalid(f"{type(session.task).__name__}.eval_data returned None: there is nothing to evaluate on")
    return session.eval_loader
