"""Session of a rank: all that it needs to train or evaluate, made from a spec in the order in which it must happen."""

import dataclasses
import math
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from dure.comm.groups import Group, Solo, open_group
from dure.data.partition import shares
from dure.errors import DataInvalid, RanksDisagree, SpecInvalid
from dure.host.devices import check_devices, count_accelerators, resolve_device
from dure.process.context import Place
from dure.spec import RunSpec
from dure.strategies.contract.declarations import depends_on_ranks
from dure.strategies.contract.loss_traits import LossTraits
from dure.strategies.contract.precision import Precision
from dure.strategies.contract.strategy import LossFunction, Strategy
from dure.strategies.state.hooks import without_new_hooks
from dure.strategies.state.objects.used_globals import used_globals
from dure.strategies.table import STRATEGIES, load_strategy
from dure.terminal import tell
from dure.torchcompat import import_late_parts, reads_of_world_size, settle_engine
from dure.training.objects.kept_state import KeptState
from dure.training.seeds import make_deterministic, seed_everything
from dure.training.session.built_alone import Alone, TaskParts, built_alone
from dure.training.session.evaluation import evaluation_batch_size
from dure.training.session.loader import FetchRequest, Loader, SampleFetch, check_dataset
from dure.training.session.sample_order import SampleOrder
from dure.training.session.task_inspection import inspected
from dure.training.session.task_products import built_model, checked_optimizer
from dure.training.task.digests import code_digest
from dure.training.task.given_task import make_task
from dure.training.task.identity import TaskIdentity, refuse_unlike_samples, sample_digests, sample_views
from dure.training.task.task import Task


@dataclass(kw_only=True)
class Session:
    """One rank's task, data, model and strategy, ready to go."""

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
    """Identity of the trained task, to be compared with that of a checkpoint."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Further differences from the undisturbed one-process run, found on the way."""
    draws_anew: str = ""
    """Declaration about the generators, if a checkpoint could not bring them back; it applies once the task draws."""
    alone: Alone = dataclasses.field(default_factory=Alone)
    """The process as the only one of a run, as far as the task's code can tell."""
    kept: KeptState
    """Plain state, apart from that of model and optimiser."""


def open_rank_group(spec: RunSpec, place: Place) -> tuple[Group, tuple[torch.device, ...]]:
    """Choose this rank's devices and join the others.

    Raises:
        SpecInvalid: More devices than are visible.
        EnvironmentLacks: The wanted kind of device is not here.
    """
    info = STRATEGIES[spec.strategy]
    # parameter servers are the last ranks and have no device
    kind = resolve_device(spec.device) if info.one_process or place.rank.rank < spec.num_devices else "cpu"
    num_here = spec.nproc if info.one_process else min(spec.num_devices, place.rank.local_world_size)
    check_devices(kind, num_here, shared=spec.share_devices, is_launched=not place.is_supervised)
    devices = _devices(kind, spec, place, one_process=info.one_process)
    if kind == "cuda":
        torch.accelerator.set_device_index(devices[0])
        # before the task's own code, which may switch it off
        torch.backends.cudnn.benchmark = not spec.deterministic
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
    """Return torch's word for how ranks talk: through shared memory wherever they have it in common."""
    rank, kind, info = place.rank, resolve_device(spec.device), STRATEGIES[spec.strategy]
    chosen: str = spec.backend
    if chosen == "auto":
        is_one_host = rank.local_world_size == rank.world_size > 1
        shared = "dure_shm" if kind == "cpu" and is_one_host and sys.platform == "linux" else "gloo"
        is_all_on_cuda = kind == "cuda" and not (info.extra_processes or info.exchanges_on_host)
        chosen = "nccl" if is_all_on_cuda and not spec.share_devices else shared
    return "cpu:dure_shm" if chosen == "dure_shm" else chosen


def _devices(kind: str, spec: RunSpec, place: Place, *, one_process: bool) -> tuple[torch.device, ...]:
    if kind != "cuda":
        # on the CPU (and MPS, which has one device) the replicas of one process are virtual devices
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
) -> Session:
    """Build task, data, model and strategy; every rank builds the same, and checks that it did.

    Args:
        spec: What is run.
        place: Which rank this is.
        group: All of them.
        devices: This rank's.
        around_loss: Changes the task's loss, for failures on purpose.
        traits: Traits of the loss that are known already; None to find them.

    Raises:
        TaskInvalid: A method of the task returns what it must not.
        DataInvalid: Data that is empty or of a kind that a run cannot be defined on.
        RanksDisagree: Ranks that did not build the same.
    """
    startup = group.startup(None if spec.quiet else tell)
    with reads_of_world_size() as reads:
        seed_everything(spec.seed)
        task = make_task(spec.task, spec.task_options)
        with startup.step("preparing the data"):
            if place.rank.local_rank == 0:
                task.prepare_data()
        seed_everything(spec.seed)
        with startup.step("loading the data"):
            train_data, eval_data = task.train_data(), task.eval_data()
        data = _Data.of(spec, task, train_data, eval_data, devices[0])
        seed_everything(spec.seed)
        with startup.step("building the model"):
            model = built_model(task)
    check_ranks_agree(group, _fingerprint(spec, task, model, data.order, data.eval_samples))
    strategy = _build_strategy(spec, group, devices)
    if faults := strategy.check_model(model, spec):
        raise SpecInvalid([f"strategy is {spec.strategy}: {fault}" for fault in faults])
    strategy.example = lambda num_samples: _first_samples(data.train_loader, min(num_samples, data.order.num_samples))
    strategy.objects = {"task": task, **used_globals(type(task), *dict.fromkeys(type(m) for m in model.modules()))}
    alone = Alone()
    with startup.step("trying the loss"):
        if reads and group.rank == 0 and group.world_size > 1:
            parts = TaskParts(task=task, train_data=train_data, eval_data=eval_data, model=model)
            alone = built_alone(spec, parts)
        strategy.traits = _traits(strategy, task, model, data.train_loader, data.order, traits, alone)
    if faults := strategy.check_traits(model):
        raise SpecInvalid([f"strategy is {spec.strategy}: {fault}" for fault in faults])
    strategy.prepare(model, checked_optimizer(task), around_loss(task.loss) if around_loss else task.loss)
    if not strategy.draws:
        strategy.random_stream = 0  # what the optimiser draws, all ranks draw alike, as one process does
    identity = TaskIdentity.of(task, data.order.num_samples, data.eval_samples, data.train_loader.sample)
    data.refuse_unlike(group, identity)
    return Session(
        spec=spec,
        place=place,
        task=task,
        group=strategy.group,
        strategy=strategy,
        train_loader=data.train_loader,
        order=data.order,
        total_samples=spec.samples or max(1, round((spec.epochs or 1.0) * data.order.epoch_samples)),
        eval_loader=data.eval_loader,
        eval_samples=data.eval_samples,
        eval_batch_size=evaluation_batch_size(data.eval_samples, spec.eval_batch_size) if data.eval_samples else 1,
        identity=identity,
        notes=[depends_on_ranks(alone.difference)] if alone.difference else [],
        alone=alone,
        kept=KeptState(task, strategy.model, strategy.built_optimizer),
    )


@dataclass(frozen=True, kw_only=True)
class _Data:
    """A task's data, and how a run reads it."""

    order: SampleOrder
    train_loader: Loader
    eval_loader: Loader | None
    eval_samples: int

    @classmethod
    def of(cls, spec: RunSpec, task: Task, train_data: Any, eval_data: Any, device: torch.device) -> "_Data":
        """Check what a task returned.

        Raises:
            DataInvalid: It is of a kind that a run cannot be defined on, or empty.
        """

        def loader(data: Any, method: str) -> Loader:
            check_dataset(data, f"{type(task).__name__}.{method}")
            return Loader(SampleFetch(data, task.collate, spec.seed), device, spec.num_workers)

        train_loader = loader(train_data, "train_data")
        return cls(
            order=SampleOrder(
                len(train_data), spec.global_batch_size, seed=spec.seed, shuffle=spec.shuffle, drop_last=spec.drop_last
            ),
            train_loader=train_loader,
            eval_loader=None if eval_data is None else loader(eval_data, "eval_data"),
            eval_samples=0 if eval_data is None else len(eval_data),
        )

    def refuse_unlike(self, group: Group, identity: TaskIdentity) -> None:
        """Refuse data of which ranks do not read the same samples.

        Communication: one gathered JSON message.

        Raises:
            DataInvalid: Names the kind of data, the sample and the rank.
        """
        if group.world_size == 1:
            return
        samples = {"training": sample_views(identity.samples, self.train_loader.sample)}
        if self.eval_loader is not None:
            fetch = self.eval_loader.sample
            samples["evaluation"] = sample_views(sample_digests(self.eval_samples, fetch), fetch)
        refuse_unlike_samples(group.all_gather_json(samples))


def _traits(
    strategy: Strategy,
    task: Task,
    model: nn.Module,
    loader: Loader,
    order: SampleOrder,
    known: LossTraits | None,
    alone: Alone,
) -> LossTraits:
    """Return the traits of the task's loss on all ranks, those that are known or those that are found now."""

    def shared() -> LossTraits:
        if known is None:
            return inspected(strategy, task, model, loader, order, alone)
        return LossTraits.from_json(strategy.group.all_gather_json(asdict(known))[0])

    traits = shared()
    if not traits.has_failed and not traits.needs_optimizer:
        return traits
    with without_new_hooks(model):
        task.build_optimizer(model)  # for what it sets in the task; the strategy builds its own
    if known is not None:
        return traits
    again = shared()
    return traits if again.has_failed else replace(again, needs_optimizer=True)


def _first_samples(loader: Loader, num_samples: int) -> Any:
    return next(loader.without_workers().batches([FetchRequest(0, np.arange(num_samples))]))


def check_parts(session: Session, samples_seen: int) -> None:
    """Refuse parts of batches that the loss does not take as it takes whole ones.

    Args:
        samples_seen: Position at which the run goes on; batches before it do not matter.

    Raises:
        SpecInvalid: The loss sets gradients, and sees batches in parts; it reads them, and is called several times a
            step; or it takes no sample alone, and a batch, of which the size is named, has a part of one.
    """
    is_in_parts = len(session.strategy.parts_of(session.spec.global_batch_size)) > 1
    if session.strategy.traits.sets_gradients and is_in_parts:
        raise SpecInvalid(
            [
                "the task's loss sets gradients itself (by a backward pass of its own, say), which is not weighted as "
                "the parts of a batch are: add that term to the loss that it returns, or let one process compute "
                "whole batches"
            ]
        )
    if session.strategy.traits.uses_gradients and session.strategy.calls_per_step() > 1:
        raise SpecInvalid(
            [
                "the task's loss reads or changes the parameters' gradients, which hold those of the batch's earlier "
                "parts where it is called several times a step: use a --microbatch-size that holds a process's whole "
                "share, or ddp on more ranks"
            ]
        )
    fault = session.strategy.traits.fails_alone
    if fault is None:
        return
    for size in sorted(session.order.batch_sizes(samples_seen, session.total_samples)):
        if size > 1 and 1 in session.strategy.parts_of(size):
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
    return load_strategy(name).role_for(group, spec)(STRATEGIES[name], group, devices, precision, spec)


def _fingerprint(spec: RunSpec, task: Task, model: nn.Module, order: SampleOrder, eval_samples: int) -> dict[str, Any]:
    """Return what must be the same on every rank, about 100 bytes per parameter."""
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
    """Compare what every rank built, or was asked for, before a difference becomes silent nonsense or an abort.

    Communication: one gathered JSON message.

    Raises:
        RanksDisagree: Names the first field that differs, and both values.
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
    """Refuse a batch that leaves a rank without samples: a stand-in would enter the statistics.

    Args:
        samples_seen: Where the run goes on; batches before that do not matter.

    Raises:
        SpecInvalid: Names the size of the smallest such batch.
    """
    spec, world_size = session.spec, session.strategy.data_world_size
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
