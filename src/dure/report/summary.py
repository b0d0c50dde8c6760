"""Summary of a run from its records: a function of files, so that it can be recreated for any run."""

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from dure.records.events import (
    Attempt,
    CheckpointSaved,
    Evaluated,
    Event,
    MicrobatchHalved,
    NotPreserved,
    RankLost,
    Restarted,
    Resumed,
    Training,
    UnusedShare,
)
from dure.records.run_dir import RunDir
from dure.records.step_record import PARTS, EpochRow, RunSummary, split_parts
from dure.spec import RunSpec


def summarise(run: RunDir, spec: RunSpec, status: str, message: str | None = None) -> RunSummary:
    """Summarise a run's step records and events.

    Raises:
        RunInvalid: Its records are not what dure writes.
    """
    with run.understood():
        return _summarise(run, spec, status, message)


def _summarise(run: RunDir, spec: RunSpec, status: str, message: str | None) -> RunSummary:
    seconds = dict.fromkeys((*PARTS, "evaluation", "checkpoint", "other"), 0.0)
    step_seconds, last = 0.0, None
    backward: float | None = 0.0
    for record in run.records(_reporting_rank(run)):
        step_seconds += record.wall_seconds
        for span in PARTS:
            seconds[span] += getattr(record, f"{span}_seconds")
        in_backward = record.backward_seconds
        backward = None if backward is None or in_backward is None else backward + in_backward
        last = record
    seconds["other"] = max(0.0, step_seconds - sum(seconds[span] for span in PARTS))
    if last is not None and backward is not None:
        seconds = split_parts(seconds, backward)
    samples = 0 if last is None else last.samples_seen
    events = effective_events(run.events(), samples)
    start = next((event for event in reversed(events) if isinstance(event, Training)), None)
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    rows = [_row(event) for event in evaluations]
    seconds["evaluation"] = sum(event.seconds for event in evaluations)
    seconds["checkpoint"] = sum(event.stall_seconds for event in events if isinstance(event, CheckpointSaved))
    return RunSummary(
        run=str(run.path),
        status=status,
        strategy=spec.strategy,
        world_size=1 if start is None else start.world_size,
        num_devices=spec.num_devices if start is None else start.num_devices,
        device=spec.device if start is None else start.device,
        precision=spec.precision,
        steps=0 if last is None else last.step,
        samples=samples,
        epochs=0.0 if start is None else round(samples / start.epoch_samples, 4),
        final_loss=last.loss_sum / last.loss_count if last is not None and last.loss_count else None,
        metrics=rows[-1].metrics if rows else {},
        best=_best(events),
        wall_seconds=step_seconds + seconds["evaluation"] + seconds["checkpoint"],
        samples_per_second=samples / step_seconds if step_seconds else 0.0,
        seconds=seconds,
        rows=rows,
        not_preserved=[*declared_differences(events), *_lost(run.events())],
        message=message,
        restarts=sum(isinstance(event, Restarted) for event in run.events()),
        microbatch_size=_halved_to(run.events()),
    )


def declared_differences(events: Sequence[Event]) -> list[str]:
    """Return the differences declared by the attempts whose steps are still part of the run."""
    found: dict[str, None] = {}
    attempts = [event for event in events if isinstance(event, Training)]
    for attempt, following in zip_longest(attempts, attempts[1:]):
        if following is None or following.samples_seen > attempt.samples_seen:
            found |= dict.fromkeys(attempt.not_preserved)
    for event in events:
        if isinstance(event, NotPreserved):
            found |= dict.fromkeys(event.texts)
    return list(found)


def _reporting_rank(run: RunDir) -> int:
    """Return the rank whose records represent the run: the first, unless it was lost and another got further."""
    lost = {event.rank for event in run.events() if isinstance(event, RankLost)}
    if 0 not in lost:
        return 0
    steps = {rank: max((record.step for record in run.records(rank)), default=0) for rank in range(max(lost) + 2)}
    return max(steps, key=lambda rank: (steps[rank], -rank))


def _lost(events: Iterable[Event]) -> list[str]:
    """Return sentences on samples unused because their rank died; a resumed run uses those after its checkpoint."""
    shares: list[UnusedShare] = []
    for event in events:
        if isinstance(event, Training):
            shares = [share for share in shares if share.samples_seen <= event.samples_seen]
        elif isinstance(event, RankLost):
            shares += event.shares
    counts = {share.rank: 0 for share in shares}
    for share in shares:
        counts[share.rank] += len(share.samples)
    return [f"rank {rank} was lost: {n} samples of its shares were not used" for rank, n in counts.items() if n]


def _halved_to(events: Iterable[Event]) -> int | None:
    """Return the last microbatch size of the last attempt; each attempt starts with the requested one."""
    size = None
    for event in events:
        if isinstance(event, Attempt | MicrobatchHalved):
            size = event.after if isinstance(event, MicrobatchHalved) else None
    return size


def effective_events(events: Iterable[Event], samples: float = math.inf) -> list[Event]:
    """Drop evaluations that a resumed run undid: the last one at each position counts, and none at later ones.

    Args:
        events: Events of the run.
        samples: Samples of the run so far.
    """
    found: list[Event | None] = []
    places: dict[int, int] = {}  # of the evaluation at each position, because there may be thousands
    for event in events:
        if isinstance(event, Resumed):
            for seen in [seen for seen in places if seen > event.samples_seen]:
                found[places.pop(seen)] = None
        if isinstance(event, Evaluated):
            if event.samples_seen > samples:
                continue
            if event.samples_seen in places:
                found[places[event.samples_seen]] = None
            places[event.samples_seen] = len(found)
        found.append(event)
    return [event for event in found if event is not None]


def _row(event: Evaluated) -> EpochRow:
    return EpochRow(
        epoch=event.epochs,
        samples_seen=event.samples_seen,
        train_loss=event.train_loss,
        metrics=event.metrics,
        seconds=event.seconds_since_last,
    )


def _best(events: list[Event]) -> dict[str, Any] | None:
    evaluated = next((e for e in reversed(events) if isinstance(e, Evaluated) and e.is_best), None)
    if evaluated is None:
        return None
    seen = evaluated.samples_seen
    names = [event.path for event in events if isinstance(event, CheckpointSaved) and event.samples_seen == seen]
    name = evaluated.best_metric
    return {
        "metric": name,
        "value": evaluated.metrics[name].value,
        "samples_seen": seen,
        "checkpoint": names[-1] if names else None,
    }
