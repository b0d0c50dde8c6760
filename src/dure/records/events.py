"""Events of a run: one class for each, the table of their names, and how a line of `events.jsonl` is made and read."""

import time
from collections.abc import Mapping
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
    """One thing that happened to a run. Fields with a default of None are left out of the line where they are None."""

    time: Time = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """Event of a newer dure, or a damaged one: it is kept as it stands."""

    name: str
    fields: Mapping[str, Any]
    fault: str | None = None
    """Reason why it is not read, if an event of this name is known."""


# --- of the run as a whole


@dataclass(frozen=True, kw_only=True)
class Attempt(Event):
    """Begin of a run, or of going on with it."""

    pid: Count | None = None
    host: Text | None = None


@dataclass(frozen=True, kw_only=True)
class Training(Event):
    """Begin of training, of every attempt and after every restart."""

    world_size: Count
    num_devices: Count
    device: Text
    """Kind of device."""
    transport: Text = ""
    """Way in which ranks exchange what they compute, in words."""
    epoch_samples: Annotated[Count, Field(gt=0)]
    total_samples: Count
    """Samples at which training will be done."""
    samples_seen: Count
    step: Count
    is_restart: Flag = False
    """True if the ranks were started again, False for a new attempt."""
    not_preserved: tuple[Text, ...] = ()
    """Properties of the one-device run that the strategy, as used here, does not preserve."""


@dataclass(frozen=True, kw_only=True)
class Completed(Event):
    """End of training at the position at which it was to end."""

    samples_seen: Count


@dataclass(frozen=True, kw_only=True)
class Interrupted(Event):
    """End of training by a signal: said by the ranks with its number, and by their supervisor with a message."""

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
    """Checkpoint that was asked for: `best` or `last`."""
    checkpoint: Text
    changed: tuple[Text, ...]
    """Parts of code and data that are not what they were when it was saved."""
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
    """Mean training loss since the evaluation before."""
    metrics: dict[Text, Metric]
    is_best: Flag
    best_metric: Text
    seconds: Number
    seconds_since_last: Number
    """Seconds since the evaluation before, this one included."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """Checkpoint that was saved."""

    path: Text
    samples_seen: Count
    step: Count
    num_bytes: Count
    stall_seconds: Annotated[Number, Field(validation_alias=AliasChoices("stall_seconds", "seconds"))]
    """Seconds for which training waited. The first dure called them `seconds`."""
    write_seconds: Number = 0.0
    beside_bytes: Count = 0
    """Bytes that were copied while training went on."""
    is_best: Flag = False


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """Checkpoint that was taken up."""

    checkpoint: Text
    samples_seen: Count
    step: Count


@dataclass(frozen=True, kw_only=True)
class Repeated(Event):
    """Samples that a restart uses a second time."""

    samples: Count
    samples_seen: Count


@dataclass(frozen=True, kw_only=True)
class StepSkipped(Event):
    """Step that was left out because its loss was not finite."""

    step: Count
    message: Text
    culprits: tuple[dict[Text, Any], ...] = ()
    """Ranks whose loss it was, each with the samples of its share."""


@dataclass(frozen=True, kw_only=True)
class LossNotFinite(Event):
    """Loss that was not finite, and ended the run."""

    message: Text
    culprits: tuple[dict[Text, Any], ...] = ()
    """Ranks whose loss it was, each with the samples of its share."""


@dataclass(frozen=True, kw_only=True)
class NotPreserved(Event):
    """Differences from the one-device run that were found while training."""

    texts: tuple[Text, ...]


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Warning that did not end the run."""

    message: Text


@dataclass(frozen=True, kw_only=True)
class SlowThreads(Event):
    """Threads of a rank that wait for cores that other work uses."""

    threads: Count
    slowdown: Number


# --- of ranks and nodes


@dataclass(frozen=True, kw_only=True)
class Restarted(Event):
    """New start of all ranks after a failure."""

    number: Count
    """Number of this restart among those that count, from 1."""
    rank: Rank
    """Rank whose failure was the first cause."""
    step: Step
    message: Text


@dataclass(frozen=True, kw_only=True)
class MicrobatchHalved(Event):
    """New start of all ranks with smaller microbatches, after memory had run out."""

    before: Annotated[Count, Field(alias="from")]
    """Samples that a device computed at once before."""
    after: Annotated[Count, Field(alias="to")]
    rank: Rank
    step: Step
    message: Text


@dataclass(frozen=True, kw_only=True)
class UnusedShare:
    """Share of a lost rank in one step, not all of whose samples were used by other ranks."""

    rank: Rank
    step: Count
    epoch: Count
    samples_seen: Count
    samples: tuple[Count, ...]
    is_partly_used: Flag = False


@dataclass(frozen=True, kw_only=True)
class RankLost(Event):
    """Death of a rank without which the others go on."""

    rank: Rank
    samples_seen: Count
    shares: tuple[UnusedShare, ...]


@dataclass(frozen=True, kw_only=True)
class Hang(Event):
    """Ranks that hung."""

    message: Text
    file: Text
    """Name of the record of all that was found out, in the run folder."""


@dataclass(frozen=True, kw_only=True)
class NodesChanged(Event):
    """Change of the nodes that take part."""

    message: Text
    nodes: tuple[Rank, ...]
    world_size: Count
    leader: Rank


@dataclass(frozen=True, kw_only=True)
class ReplicasDiverged(Event):
    """Ranks that must hold the same, bit by bit, and do not."""

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
    """Return of all ranks to where they agreed last."""

    step: Count
    samples_seen: Count


@dataclass(frozen=True, kw_only=True)
class ReplicasCompared(Event):
    """Time that comparing replicas took, of a whole attempt."""

    count: Count
    every: Count
    seconds: Number
    fraction: Number


@dataclass(frozen=True, kw_only=True)
class FaultHappened(Event):
    """Failure on purpose."""

    rank: Rank
    step: Count
    kind: Text


EVENTS: Mapping[str, type[Event]] = MappingProxyType(
    {
        "attempt": Attempt,
        "training": Training,
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
        "warning": Warned,
        "slow_threads": SlowThreads,
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
    # made when needed: two dozen take a tenth of a second
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
    """Return an event from what `event_to_json` returned, in this version of dure, an older or a newer one.

    Raises:
        DocumentInvalid: It has no name or no time, and so is no event.
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
