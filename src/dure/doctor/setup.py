"""Setup of a run as far as its speed depends on it: of a task's run from its spec, of a script's from what was seen."""

from collections.abc import Sequence
from dataclasses import dataclass

from dure.records.events import Event, ScriptTraining, Training
from dure.spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Setup of the last attempt of a run."""

    spec: RunSpec | None
    """Settings of a task's run; None for a script, whose settings are its own."""
    world_size: int
    num_devices: int
    """Number of devices that compute."""
    nproc: int
    """Ranks of a node."""
    num_nodes: int
    device: str
    """Type of the devices."""
    transport: str
    """Description of the transport between ranks; empty if unknown."""
    cores: int | None
    """Processor cores of a host."""
    samples_per_rank: float
    """Samples of a step on a rank; 0 if unknown."""
    num_workers: int
    """Loader processes of a rank."""
    threads: int | None
    """Threads that a script computes with on a rank; None for a task, whose threads are measured."""
    first_step: int
    """Step at which the attempt began."""

    @property
    def is_script(self) -> bool:
        return self.spec is None


def setup_of_task(spec: RunSpec, training: Training) -> Setup:
    """Return the setup of a task's run."""
    # without ranks that only serve the others
    computing = max(min(training.world_size, training.num_devices), 1)
    return Setup(
        spec=spec,
        world_size=training.world_size,
        num_devices=training.num_devices,
        nproc=spec.nproc,
        num_nodes=spec.num_nodes,
        device=training.device,
        transport=training.transport,
        cores=training.cores,
        samples_per_rank=spec.global_batch_size / computing,
        num_workers=spec.num_workers,
        threads=None,
        first_step=training.step,
    )


def setup_of_script(training: ScriptTraining) -> Setup:
    """Return the setup of a script's run."""
    return Setup(
        spec=None,
        world_size=training.world_size,
        num_devices=training.world_size,
        nproc=training.nproc,
        num_nodes=training.num_nodes,
        device=training.device,
        transport=training.backend,
        cores=training.cores,
        samples_per_rank=training.batch_size,
        num_workers=training.num_workers,
        threads=training.threads,
        first_step=0,
    )


def last_setup(spec: RunSpec | None, events: Sequence[Event]) -> tuple[Setup, Sequence[Event]] | None:
    """Return the setup of the last attempt, and the events since it began training; None if it never did."""
    for number in reversed(range(len(events))):
        event = events[number]
        if spec is not None and isinstance(event, Training):
            return setup_of_task(spec, event), events[number:]
        if spec is None and isinstance(event, ScriptTraining):
            return setup_of_script(event), events[number:]
    return None
