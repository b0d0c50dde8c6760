"""Faults of a start that are known before a folder or a process exists."""

import torch

from dure.api.forked_check import found_in_fork
from dure.api.local import count_processes
from dure.cluster.rank import Launched
from dure.errors import EnvironmentLacks, SpecInvalid
from dure.host.backends import backend_cure, backend_name, fault_of_backend, is_available, reaches, takes_devices_only
from dure.host.device_kinds import can_compile, device_kind
from dure.host.devices import check_devices, count_all_accelerators, resolve_device
from dure.launch.worker.fork_safety import reason_not_to_fork
from dure.spec import RunSpec
from dure.strategies.contract.abilities import faults_of_model, faults_of_optimizer
from dure.strategies.contract.precision import fault_of_precision
from dure.strategies.table import STRATEGIES, load_strategy
from dure.tracking.tracker import check_packages
from dure.training.fault_injection import read_faults
from dure.training.session.task_products import refuse_lazy
from dure.training.task.given_task import given_task, task_class
from dure.training.task.options import build_task
from dure.training.task.task import Task


def check_before_start(spec: RunSpec, launched: Launched | None = None) -> None:
    """Refuse a start that is certain to fail.

    Raises:
        SpecInvalid: Settings are invalid, or the strategy does not support the model.
        EnvironmentLacks: A requested device is not available, or the strategy of a package cannot be imported.
    """
    check_packages(spec.trackers)
    if spec.strategy not in STRATEGIES.own:
        load_strategy(spec.strategy)
    num_here = spec.nproc if launched is None else min(spec.num_devices, launched.rank.local_world_size)
    device = resolve_device(spec.device)
    check_devices(device, num_here, shared=spec.share_devices, is_launched=launched is not None)
    _check_backend(spec, device)
    if fault := fault_of_precision(spec.precision, device):
        raise SpecInvalid([fault])
    if spec.compile and not can_compile(device):
        raise SpecInvalid([f"torch.compile generates no code for {device} devices: leave --compile out"])
    if spec.numa_binding is not None and not device_kind(device).has_address:
        raise SpecInvalid([f"numa_binding is for devices with a place of their own, not for {device}: leave it out"])
    if spec.faults is not None:
        read_faults(spec.faults, count_processes(spec), on_several_hosts=spec.num_nodes > 1)
    if spec.start == "inline" and count_processes(spec) > 1:
        raise SpecInvalid(
            [f"start is inline but {spec.strategy} on {spec.num_devices} needs processes: use fork or spawn"]
        )
    _check_that_task_arrives(spec)
    if STRATEGIES[spec.strategy].checks_model:
        from dure.torchcompat.optimizers import kept_global_hooks

        with kept_global_hooks():  # ranks that are forked from here register their own hooks
            # on a host with devices, whichever this run uses: a later run of this process may use it
            _check_model(
                spec, may_fork=count_all_accelerators() > 0 and launched is None and reason_not_to_fork() is None
            )


def _check_backend(spec: RunSpec, kind: str) -> None:
    """Refuse a backend that cannot carry what the ranks exchange."""
    info = STRATEGIES[spec.strategy]
    if takes_devices_only(spec.backend) and info.extra_processes:
        raise SpecInvalid(
            [f"backend is {spec.backend}, which moves no CPU tensors, but servers are CPU processes: leave it out"]
        )
    if fault := fault_of_backend(spec.backend, kind):
        raise SpecInvalid([fault])
    if info.one_process or spec.num_devices == 1 or info.extra_processes or info.exchanges_on_host:
        return
    name = backend_name(spec.backend, kind, is_one_host=False, sends_from_devices=not spec.share_devices)
    if reaches(name, kind) and is_available(name):
        return
    if not reaches(name, kind):
        raise SpecInvalid(
            [
                f"the ranks of {spec.strategy} exchange {kind} tensors, which {name} does not move: give every rank a "
                f"device of its own ({backend_cure(kind)}), or use --device cpu, or a strategy of one process"
            ]
        )
    raise EnvironmentLacks(
        f"this torch is built without {name}, over which {kind} devices exchange tensors: install one that has it, or "
        "use --backend gloo or --device cpu"
    )


def _check_that_task_arrives(spec: RunSpec) -> None:
    """Refuse ranks that would have to build the task again, if the passed one cannot be built again."""
    given = given_task()
    if given is None or not given.is_only_here:
        return
    if spec.start == "spawn":
        raise SpecInvalid(
            [
                f"start is spawn, which makes the task again in each rank, but {given.why}: use --start fork, or leave "
                "it out"
            ]
        )
    if spec.num_nodes > 1:
        raise SpecInvalid(
            [
                f"nnodes is {spec.nnodes}, and other hosts make the task again from the run's record, but {given.why}: "
                "put into the class's file, as an option, what makes it so"
            ]
        )


def _check_model(spec: RunSpec, *, may_fork: bool) -> None:
    """Let the strategy check the model before any process starts; each rank checks its own again.

    Args:
        spec: Settings.
        may_fork: Whether to check in a forked process, because this one may be forked into ranks that use devices.

    Raises:
        SpecInvalid: The strategy does not support the model; the message lists all reasons.
        TaskInvalid: No strategy supports the model.
    """
    given = given_task()
    if given is not None and given.task is not None and given.is_only_here:
        return  # building a model here might change the object that is trained
    task = build_task(task_class(spec.task), spec.task_options)
    faults = found_in_fork(lambda: _faults_of_task(spec, task)) if may_fork else _faults_of_task(spec, task)
    if faults:
        raise SpecInvalid([f"strategy is {spec.strategy}: {fault}" for fault in faults])


def _faults_of_task(spec: RunSpec, task: Task) -> list[str]:
    try:
        with torch.device("meta"):
            model = task.build_model()
    except Exception:
        return []  # it reads values (pretrained weights); every worker checks its own model
    refuse_lazy(model, f"{type(task).__name__}.build_model")
    strategy = load_strategy(spec.strategy)
    faults = faults_of_model(strategy, model, spec)
    try:
        optimizer = task.build_optimizer(model)
    except Exception:
        optimizer = None  # as above
    if isinstance(optimizer, torch.optim.Optimizer):
        faults += faults_of_optimizer(strategy, optimizer)
    return faults
