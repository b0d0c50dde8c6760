"""Diagnosis of a run's speed from its records: what it waits for, and what would make it faster."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dure.doctor import computing, devices, pauses, waits
from dure.doctor.setup import Setup, last_setup
from dure.doctor.speed import Speed
from dure.doctor.step_times import MOST_MISSING, StepTimes, step_times
from dure.errors import RunInvalid
from dure.records.events import CheckpointSaved, Evaluated, Event, MemoryUsed, OperationsCounted, SlowThreads
from dure.records.finding import Finding
from dure.records.run_dir import RunDir
from dure.records.usage import UsageRecord, read_usage
from dure.spec import RunSpec

_FEWEST_STEPS = 20
_LEAST_SECONDS = 1.0
"""Shorter runs are not judged: they are trials, and most of their time is their start."""

E = TypeVar("E", bound=Event)

Look = Callable[[Speed], Iterator[Finding]]
_LOOKS: Sequence[Sequence[Look]] = (
    (computing.small_operations, computing.small_samples_per_step),
    (waits.uneven_shares, waits.straggler, waits.changing_lateness),
    (pauses.evaluation_on_one_rank, pauses.evaluation_dominates),
    (waits.waits_for_data,),
    (waits.needless_unused_parameter_search,),
    (computing.cpu_oversubscribed,),
    (computing.low_precision_unused,),
    (pauses.checkpoint_stalls,),
    (devices.throttled, devices.device_idle),
)
"""Looks at a run's speed: what the first of a row finds explains what the others would."""
_AT_COMMUNICATION: Sequence[Look] = (waits.bucket_size, computing.too_small_to_distribute, waits.communication_bound)


def slow_findings(run: RunDir, spec: RunSpec | None, events: Sequence[Event]) -> list[Finding]:
    """Return what makes the last attempt of a run slow, the largest expected gain first.

    Args:
        run: The run.
        spec: Its settings; None for a script's.
        events: Its events.
    """
    found = last_setup(spec, events)
    if found is None:
        return []
    setup, since = found
    with_measured = spec is None or bool(spec.options.get("find_unused_parameters"))
    times = step_times(run, setup.world_size, setup.first_step, with_measured=with_measured)
    speed = _speed_of_script(setup, times, since) if setup.is_script else _speed_of_task(setup, times, since)
    if times.steps.size < _FEWEST_STEPS or not _LEAST_SECONDS <= speed.total_seconds < math.inf:
        return []
    speed = replace(speed, usage=_usage_of(run, since))
    slow = _first(_AT_COMMUNICATION, speed)
    # too small a step also explains why its operations are small
    is_too_small = any(finding.id == "too_small_to_distribute" for finding in slow)
    slow += [finding for looks in _LOOKS[is_too_small:] for finding in _first(looks, speed)]
    return sorted([*_gaps(times), *slow], key=lambda finding: -(finding.gain_fraction or 0.0))


def _usage_of(run: RunDir, since: Sequence[Event]) -> dict[int, list[UsageRecord]]:
    """Return the use of the machine by each rank since the first of some events."""
    begin = since[0].time if since else 0.0
    return {rank: [*read_usage(run, rank, begin)] for rank in run.recorded_ranks()}


def _first(looks: Sequence[Look], speed: Speed) -> list[Finding]:
    """Return the findings of the first look that has any."""
    return next((found for look in looks if (found := [*look(speed)])), [])


def slowest_of(path: Path) -> str | None:
    """Return what costs a run the most time, in one sentence; None if nothing is known to."""
    try:
        run = RunDir.open(path, or_script=True)
        with run.understood():
            found = slow_findings(run, None if run.is_script else run.read_spec(), [*run.events()])
    except (RunInvalid, OSError):
        return None  # the run has ended well, and `dure doctor` says what is wrong with its records
    return next((finding.what for finding in found if finding.gain_fraction), None)


def _speed_of_task(setup: Setup, times: StepTimes, events: Sequence[Event]) -> Speed:
    # a damaged record may have impossible times
    evaluations = [event.seconds for event in events if isinstance(event, Evaluated) and 0 <= event.seconds < math.inf]
    checkpoints = [
        event for event in events if isinstance(event, CheckpointSaved) and 0 <= event.stall_seconds < math.inf
    ]
    assert setup.spec is not None
    memory = _last(events, MemoryUsed)
    gradient_bytes = max((rank.gradients for rank in memory.ranks), default=None) if memory is not None else None
    bucket_bytes = setup.spec.options.get("bucket_bytes")
    return Speed(
        setup=setup,
        times=times,
        evaluation_seconds=sum(evaluations),
        num_evaluations=len(evaluations),
        stall_seconds=sum(event.stall_seconds for event in checkpoints),
        checkpoint_bytes=[event.num_bytes for event in checkpoints],
        slow_threads=[event for event in events if isinstance(event, SlowThreads) and 1 < event.slowdown < math.inf],
        operations=_last(events, OperationsCounted),
        gradient_bytes=gradient_bytes,
        num_buckets=None if gradient_bytes is None or not bucket_bytes else math.ceil(gradient_bytes / bucket_bytes),
        largest_bucket_bytes=bucket_bytes,
        # events are those of all steps
        step_seconds=float(times.wall.sum()) / times.recorded_fraction if times.recorded_fraction else 0.0,
    )


def _speed_of_script(setup: Setup, times: StepTimes, events: Sequence[Event]) -> Speed:
    evaluation, saving = times.sums("evaluation_seconds"), times.sums("saving_seconds")
    return Speed(
        setup=setup,
        times=times,
        evaluation_seconds=float(evaluation.max(initial=0.0)),
        num_evaluations=times.most("evaluation_seconds"),
        stall_seconds=float(saving.max(initial=0.0)),
        checkpoint_bytes=[None] * times.most("saving_seconds"),
        slow_threads=(),
        operations=_last(events, OperationsCounted),
        gradient_bytes=times.mean_of("gradient_bytes"),
        num_buckets=times.mean_of("buckets"),
        largest_bucket_bytes=times.mean_of("bucket_cap_bytes"),
        step_seconds=float(times.wall.sum()) / times.recorded_fraction if times.recorded_fraction else 0.0,
    )


def _last(events: Sequence[Event], kind: type[E]) -> E | None:
    """Return the last event of a kind."""
    return next((event for event in reversed(events) if isinstance(event, kind)), None)


def _gaps(times: StepTimes) -> Iterator[Finding]:
    """Yield the records that could not be read, on which the other findings are therefore not based."""
    if times.missing:
        named = ", ".join(map(str, times.missing[: MOST_MISSING - 1])) + (
            ", …" if len(times.missing) == MOST_MISSING else ""
        )
        yield Finding(
            id="missing_records",
            severity="note",
            what=f"step records of rank{'s' * (len(times.missing) > 1)} {named} are missing: the others are judged",
        )
    if times.num_left_out > len(times.ranks):  # a crash tears one line of each
        yield Finding(
            id="damaged_records",
            severity="note",
            what=f"{times.num_left_out:,} lines of the step records are damaged, and were left out",
            files=tuple(f"rank{rank}.jsonl" for rank in times.ranks[:8]),
        )
