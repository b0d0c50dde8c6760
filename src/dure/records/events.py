"""Events of a run: a class for each, the table of their names, and conversion to and from lines of `events.jsonl`."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AliasChoices, Field, TypeAdapter

from dure.checked import Count, Flag, Number, Rank, Step, Text, Time, checked
from dure.documents import DocumentInvalid
from dure.records.step_record import Metric

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a run. Fields that default to None are omitted from the line while they are None."""

    time: Time = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """Event of a newer dure, or a damaged one, kept unchanged."""

    name: str
    fields: Mapping[str, Any]
    fault: str | None = None
    """Reason why it cannot be read; None if no event of this name is known."""


# --- of the run as a whole


@dataclass(frozen=True, kw_only=True)
class Attempt(Event):
    """Start or resume of a run by a command."""

    pid: Count | None = None
    host: Text | None = None


@dataclass(frozen=True, kw_only=True)
class Training(Event):
    """Start of training, in every attempt and after every restart."""

    world_size: Count
    num_devices: Count
    device: Text
    """Type of the devices."""
    transport: Text = ""
    """Description of the transport between ranks."""
    cores: Count | None = None
    """Processor cores that the first rank's host lets its processes use; None in older records."""
    epoch_samples: Annotated[Count, Field(gt=0)]
    total_samples: Count
    """Samples at which training ends."""
    samples_seen: Count
    step: Count
    is_restart: Flag = False
    """True if the ranks were restarted; False for a new attempt."""
    not_preserved: tuple[Text, ...] = ()
    """Properties of the one-device run that the strategy, as used here, does not preserve."""


@dataclass(frozen=True, kw_only=True)
class ScriptTraining(Event):
    """Completion of the first step of a script whose steps are recorded, in every round."""

    world_size: Count
    num_nodes: Count
    nproc: Count
    """Ranks of the first rank's node."""
    device: Text
    """Type of the device on which the loss is computed."""
    backend: Text = ""
    """Backends of the group of all ranks; empty without one."""
    cores: Count | None = None
    """Processor cores that the first rank's host lets its processes use."""
    threads: Count
    """Threads that torch computes with on a rank."""
    batch_size: Count
    """Samples of a step on the first rank; 0 if they come from no `DataLoader`."""
    num_workers: Count
    """Loader processes of a rank."""


@dataclass(frozen=True, kw_only=True)
class Completed(Event):
    """End of training at the intended position."""

    samples_seen: Count


@dataclass(frozen=True, kw_only=True)
class Interrupted(Event):
    """End of training by a signal: recorded by the ranks with its number, and by their supervisor with a message."""

    signal: Count | None = None
    message: Text | None = None


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """End of training by a failure."""

    message: Text


@dataclass(frozen=True, kw_only=True)
class Evaluation(Event):
    """Evaluation of a checkpoint after training, by `dure eval`."""

    run: Text
    status: Text
    which: Text
    """Requested checkpoint: `best` or `last`."""
    checkpoint: Text
    changed: tuple[Text, ...]
    """Parts of code and data that have changed since it was saved."""
    strategy: Text
    world_size: Count
    num_devices: Count
    steps: Count
    samples: Count
    epochs: Number
    final_loss: Number | None
    metrics: dict[Text, Metric]
    best: dict[Text, Any] | None
    wall_seconds: Number
    samples_per_second: Number


# --- of training


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """Evaluation during training."""

    step: Count
    samples_seen: Count
    epochs: Number
    train_loss: Number | None
    """Mean training loss since the previous evaluation."""
    metrics: dict[Text, Metric]
    is_best: Flag
    best_metric: Text
    seconds: Number
    seconds_since_last: Number
    """Seconds since the previous evaluation, including this one."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """Save of a checkpoint."""

    path: Text
    samples_seen: Count
    step: Count
    num_bytes: Count
    stall_seconds: Annotated[Number, Field(validation_alias=AliasChoices("stall_seconds", "seconds"))]
    """Seconds for which training waited. The first version of dure called this field `seconds`."""
    write_seconds: Number = 0.0
    beside_bytes: Count = 0
    """Bytes that were copied while training continued."""
    is_best: Flag = False


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """Load of a checkpoint, from which training continues."""

    checkpoint: Text
    samples_seen: Count
    step: Count


@dataclass(frozen=True, kw_only=True)
class Repeated(Event):
    """Samples that a restart uses again."""

    samples: Count
    samples_seen: Count


@dataclass(frozen=True, kw_only=True)
class StepSkipped(Event):
    """Step that was skipped because its loss was not finite."""

    step: Count
    message: Text
    culprits: tuple[dict[Text, Any], ...] = ()
    """Ranks whose loss was not finite, each with the samples of its share."""


@dataclass(frozen=True, kw_only=True)
class LossNotFinite(Event):
    """Loss that was not finite and ended the run."""

    message: Text
    culprits: tuple[dict[Text, Any], ...] = ()
    """Ranks whose loss was not finite, each with the samples of its share."""


@dataclass(frozen=True, kw_only=True)
class NotPreserved(Event):
    """Differences from the one-device run that were found during training."""

    texts: tuple[Text, ...]


@dataclass(frozen=True, kw_only=True)
class FactorsUsed(Event):
    """Factors on the learning rates that the task's schedule gave in some steps of an attempt."""

    total_samples: Count
    """Samples at which the run was to end."""
    factors: tuple[tuple[Count, float], ...]
    """Samples seen before a step, and its factor."""


@dataclass(frozen=True, kw_only=True)
class FirstStepsCompared(Event):
    """First steps of the run that computed the same as one process."""

    steps: Count
    tensors: Count
    """Tensors of weights and optimiser state that were compared."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of a device in one process."""

    device: Text
    """Device as torch names it; `cpu` for the memory of the process itself."""
    peak: Count
    """Most bytes so far: on an accelerator those that torch has reserved, on the CPU those of the resident process."""
    total: Count
    """Bytes of the whole device, or of the host."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of a rank, in bytes; parameters, gradients, state and buffers are what it holds between two steps."""

    rank: Rank
    parameters: Count
    gradients: Count
    optimizer: Count
    buffers: Count
    devices: tuple[DeviceMemory, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryUsed(Event):
    """Memory of all ranks so far, recorded with the first and the last checkpoint of an attempt."""

    ranks: tuple[RankMemory, ...]


def memory_used(ranks: Sequence[Mapping[str, Any]]) -> MemoryUsed:
    """Return the event from the results of `dataclasses.asdict` for all ranks, after a JSON round trip."""
    return MemoryUsed(
        ranks=tuple(
            RankMemory(**{**rank, "devices": tuple(DeviceMemory(**device) for device in rank["devices"])})
            for rank in ranks
        )
    )


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Warning about a problem that did not end the run."""

    message: Text


@dataclass(frozen=True, kw_only=True)
class SlowThreads(Event):
    """Threads of a rank that wait for cores used by other work."""

    threads: Count
    slowdown: Number


@dataclass(frozen=True, kw_only=True)
class OperationsCounted(Event):
    """Count of the operations that a backward calls, and the time of the smallest."""

    operations: Count
    least_seconds: Number
    """Seconds of an operation on one number: what calling any takes at least."""


# --- of ranks and nodes


@dataclass(frozen=True, kw_only=True)
class Restarted(Event):
    """Restart of all ranks after a failure."""

    number: Count
    """Number of this restart among those that count towards the limit, from 1."""
    rank: Rank
    """Rank whose failure was the first cause."""
    step: Step
    message: Text


@dataclass(frozen=True, kw_only=True)
class MicrobatchHalved(Event):
    """Restart of all ranks with smaller microbatches, after memory was exhausted."""

    before: Annotated[Count, Field(alias="from")]
    """Samples that a device computed at once before."""
    after: Annotated[Count, Field(alias="to")]
    rank: Rank
    step: Step
    message: Text


@dataclass(frozen=True, kw_only=True)
class UnusedShare:
    """Share of a lost rank in one step that the other ranks did not use completely."""

    rank: Rank
    step: Count
    epoch: Count
    samples_seen: Count
    samples: tuple[Count, ...]
    is_partly_used: Flag = False


@dataclass(frozen=True, kw_only=True)
class RankLost(Event):
    """Death of a rank without which the others continue."""

    rank: Rank
    samples_seen: Count
    shares: tuple[UnusedShare, ...]


@dataclass(frozen=True, kw_only=True)
class Hang(Event):
    """Hang of ranks."""

    message: Text
    file: Text
    """Name of the full record in the run's folder."""


@dataclass(frozen=True, kw_only=True)
class NodesChanged(Event):
    """Change of the participating nodes."""

    message: Text
    nodes: tuple[Rank, ...]
    world_size: Count
    leader: Rank


@dataclass(frozen=True, kw_only=True)
class ReplicasDiverged(Event):
    """Difference between ranks that must hold bit-identical state."""

    step: Count
    samples_seen: Count
    agreed_step: Count
    agreed_samples: Count
    ranks: tuple[Rank, ...]
    """Ranks that differ from more than half of the holders."""
    holders: tuple[Rank, ...]
    tensors: tuple[Text, ...]
    element: Text
    values: dict[Text, Text]
    """Value of the element on each holder."""
    message: Text


@dataclass(frozen=True, kw_only=True)
class ReplicaHealed(Event):
    """Return of all ranks to the position where they last agreed."""

    step: Count
    samples_seen: Count


@dataclass(frozen=True, kw_only=True)
class ReplicasCompared(Event):
    """Time spent on comparing replicas in an attempt."""

    count: Count
    every: Count
    seconds: Number
    fraction: Number


@dataclass(frozen=True, kw_only=True)
class FaultHappened(Event):
    """Injected fault."""

    rank: Rank
    step: Count
    kind: Text


EVENTS: Mapping[str, type[Event]] = MappingProxyType(
    {
        "attempt": Attempt,
        "training": Training,
        "script_training": ScriptTraining,
        "completed": Completed,
        "interrupted": Interrupted,
        "failed": Failed,
        "evaluation": Evaluation,
        "evaluated": Evaluated,
        "checkpoint": CheckpointSaved,
        "resumed": Resumed,
        "repeated": Repeated,
        "step_skipped": StepSkipped,
        "loss_not_finite": LossNotFinite,
        "not_preserved": NotPreserved,
        "factors_used": FactorsUsed,
        "first_steps_compared": FirstStepsCompared,
        "memory": MemoryUsed,
        "warning": Warned,
        "slow_threads": SlowThreads,
        "operations": OperationsCounted,
        "restart": Restarted,
        "microbatch_halved": MicrobatchHalved,
        "rank_lost": RankLost,
        "hang": Hang,
        "nodes": NodesChanged,
        "replicas_diverged": ReplicasDiverged,
        "replica_healed": ReplicaHealed,
        "replicas_compared": ReplicasCompared,
        "fault": FaultHappened,
    }
)
"""Class of each event by its name in the file."""

_NAMES = {kind: name for name, kind in EVENTS.items()}
_TIME = TypeAdapter(Time)


@cache
def _adapter(name: str) -> TypeAdapter[Event]:
    # created on demand: creating two dozen takes a tenth of a second
    return TypeAdapter(EVENTS[name])


def event_to_json(event: Event) -> dict[str, Any]:
    """Return an event as plain JSON values."""
    if isinstance(event, UnknownEvent):
        return {**event.fields, "time": event.time, "event": event.name}
    name = _NAMES[type(event)]
    absent = {one.name for one in fields(event) if one.default is None and getattr(event, one.name) is None}
    values = _adapter(name).dump_python(event, by_alias=True, exclude=absent, warnings=False)
    return {"time": values.pop("time"), "event": name, "version": VERSION, **values}


def event_from_json(found: Mapping[str, Any]) -> Event:
    """Return an event from a result of `event_to_json` in this version of dure, an older or a newer one.

    Raises:
        DocumentInvalid: It has no name or no time, and so is not an event.
    """
    name, when = found.get("event"), checked(_TIME, found.get("time"), VERSION)
    if not isinstance(name, str):
        raise DocumentInvalid("has no name of an event")
    fault = None
    if name in EVENTS:
        try:
            return checked(_adapter(name), found, VERSION)
        except DocumentInvalid as error:
            fault = str(error)
    rest = {key: value for key, value in found.items() if key not in ("time", "event")}
    return UnknownEvent(time=when, name=name, fields=rest, fault=fault)
