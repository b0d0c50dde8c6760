"""Diagnosis of a run's speed from its records: what it waits for, and what would make it faster."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dure.doctor.setup import Setup, last_setup
from dure.doctor.step_times import MOST_MISSING, StepTimes, step_times
from dure.errors import RunInvalid
from dure.records.events import CheckpointSaved, Evaluated, Event, SlowThreads
from dure.records.finding import Finding
from dure.records.run_dir import RunDir
from dure.records.step_record import PARTS
from dure.spec import RunSpec
from dure.units import format_bytes, format_seconds

_FEWEST_STEPS = 20
_LEAST_SECONDS = 1.0
"""Shorter runs are not judged: they are trials, and most of their time is their start."""
_MOST_DATA = 0.1
_MOST_COMMUNICATION = 0.25
_MOST_LATENESS = 0.1
_MOST_EVALUATION = 0.3
_MOST_STALLS = 0.1
"""Fractions of the time up to which waiting for data, communication, a late rank, evaluation and checkpoints are usual.
"""
_MOST_FACTOR = 1000
_MOST_WORKERS = 64
_GRAVE = 0.3
"""Expected gain from which a finding is a warning."""
_NUM_BLOCKS = 20
_LABELS = {
    "data": "waiting for its data",
    "forward_backward": "forward and backward",
    "optimizer": "the optimiser's step",
    "other": "what is done between the measured parts",
}
_CAUSES = {
    "data": ("its loader is slower than the others'", "look at its disk and its processor, or raise --num-workers"),
    "forward_backward": (
        "its device or its processor cores are slower, or shared with something else, or its samples are larger",
        "look at what else runs there, and at the sizes of its samples",
    ),
    "optimizer": ("its device or its processor cores are slower, or shared", "look at what else runs there"),
    "other": ("the task does something there on this rank alone, such as writing files", "do it less often"),
}


@dataclass(frozen=True, kw_only=True)
class _Speed:
    """Times of a run, as far as its records have them."""

    setup: Setup
    times: StepTimes
    evaluation_seconds: float
    num_evaluations: int
    stall_seconds: float
    """Seconds for which training stood still for checkpoints."""
    checkpoint_bytes: Sequence[int | None]
    """Size of each checkpoint; None if unknown."""
    slow_threads: Sequence[SlowThreads]
    step_seconds: float
    """Seconds of all steps of the attempt."""

    @property
    def total_seconds(self) -> float:
        """Seconds of steps, evaluations and stalls for checkpoints."""
        return self.step_seconds + self.evaluation_seconds + self.stall_seconds

    @property
    def step_fraction(self) -> float:
        """Fraction of the time that steps take."""
        return self.step_seconds / self.total_seconds

    @property
    def wall(self) -> float:
        """Mean seconds of a step."""
        return float(self.times.wall.mean())

    def mean(self, part: str) -> np.ndarray:
        """Return the mean seconds of a part of a step on each rank, `(R,)`."""
        means: np.ndarray = self.times.seconds[part].mean(axis=1)
        return means


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
    times = step_times(run, setup.world_size, setup.first_step)
    speed = _speed_of_script(setup, times) if setup.is_script else _speed_of_task(setup, times, since)
    if times.steps.size < _FEWEST_STEPS or not _LEAST_SECONDS <= speed.total_seconds < math.inf:
        return []
    too_small = [*_too_small(speed)]
    # too small a step also explains why communication takes so much of it
    looks = (_straggler, _data, _cores, _evaluation, _checkpoints, *(() if too_small else (_communication,)))
    slow = [*too_small, *_gaps(times), *(finding for look in looks for finding in look(speed))]
    return sorted(slow, key=lambda finding: -(finding.gain_fraction or 0.0))


def slowest_of(path: Path) -> str | None:
    """Return what costs a run the most time, in one sentence; None if nothing is known to."""
    try:
        run = RunDir.open(path, or_script=True)
        with run.understood():
            found = slow_findings(run, None if run.is_script else run.read_spec(), [*run.events()])
    except (RunInvalid, OSError):
        return None  # the run has ended well, and `dure doctor` says what is wrong with its records
    return next((finding.what for finding in found if finding.gain_fraction), None)


def _speed_of_task(setup: Setup, times: StepTimes, events: Sequence[Event]) -> _Speed:
    # a damaged record may have impossible times
    evaluations = [event.seconds for event in events if isinstance(event, Evaluated) and 0 <= event.seconds < math.inf]
    checkpoints = [
        event for event in events if isinstance(event, CheckpointSaved) and 0 <= event.stall_seconds < math.inf
    ]
    return _Speed(
        setup=setup,
        times=times,
        evaluation_seconds=sum(evaluations),
        num_evaluations=len(evaluations),
        stall_seconds=sum(event.stall_seconds for event in checkpoints),
        checkpoint_bytes=[event.num_bytes for event in checkpoints],
        slow_threads=[event for event in events if isinstance(event, SlowThreads) and 1 < event.slowdown < math.inf],
        # events are those of all steps
        step_seconds=float(times.wall.sum()) / times.recorded_fraction if times.recorded_fraction else 0.0,
    )


def _speed_of_script(setup: Setup, times: StepTimes) -> _Speed:
    return _Speed(
        setup=setup,
        times=times,
        evaluation_seconds=float(times.measured["evaluation"].max(initial=0.0)),
        num_evaluations=times.num_measured["evaluation"],
        stall_seconds=float(times.measured["saving"].max(initial=0.0)),
        checkpoint_bytes=[None] * times.num_measured["saving"],
        slow_threads=(),
        step_seconds=float(times.wall.sum()) / times.recorded_fraction if times.recorded_fraction else 0.0,
    )


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


def _finding(
    speed: _Speed, name: str, gain: float, what: str, evidence: Sequence[str], cause: str, remedy: str
) -> Finding:
    return Finding(
        id=name,
        severity="warning" if gain >= _GRAVE else "note",
        what=what,
        evidence=tuple(evidence),
        files=tuple(f"rank{rank}.jsonl" for rank in speed.times.ranks[:8]),
        cause=cause,
        remedy=remedy,
        gain_fraction=round(gain, 3),
    )


def _data(speed: _Speed) -> Iterator[Finding]:
    """Yield a finding if steps wait for their samples, on one rank at least."""
    waits = speed.times.seconds["data"]
    # ranks in step all wait for the one whose data comes last
    wait, wall = float(waits.max(axis=0).mean() if speed.times.are_in_step else waits.mean(axis=1).max()), speed.wall
    if wait / wall <= _MOST_DATA:
        return
    setup, samples, workers = speed.setup, speed.setup.samples_per_rank or 1.0, speed.setup.num_workers
    # a loader in the rank itself works only while the rank waits
    rate = samples / (wait if workers == 0 else wall) / max(workers, 1)
    wanted = samples / max(wall - wait, wall / _MOST_FACTOR)
    num_workers = min(math.ceil(round(wanted / rate, 3)), _MOST_WORKERS)
    cores, flag = setup.cores, "num_workers" if setup.is_script else "--num-workers"
    remedy = f"DataLoader(num_workers={num_workers})" if setup.is_script else f"{flag} {num_workers}"
    if (
        cores is not None and num_workers * min(setup.nproc, setup.world_size) > cores
    ):  # the cores are those of one host
        remedy = (
            f"make a sample cheaper (decode and resize once, beforehand), then raise {flag}: as it is, that "
            f"takes {num_workers} loader process{'es' * (num_workers > 1)} per rank, and the host has {cores} cores"
        )
    unit = "samples" if setup.samples_per_rank else "batches"
    of_loader = f"one loader process brings {rate:,.0f} {unit}/s" if workers else f"it brings {rate:,.0f} {unit}/s"
    yield _finding(
        speed,
        "waits_for_data",
        min(wait / wall, 1.0) * speed.step_fraction,
        f"steps wait for data for {wait / wall:.0%} of their time",
        [
            f"{_ms(wait)} of the {_ms(wall)} of a step",
            f"{of_loader}; without waiting, each rank would use {wanted:,.0f}",
        ],
        f"{workers} loader process{'es' * (workers > 1)} per rank: too few for what a sample takes"
        if workers
        else "each rank loads its samples itself, between two steps",
        remedy,
    )


def _communication(speed: _Speed) -> Iterator[Finding]:
    """Yield a finding if communication takes long even on the rank that comes last, which waits for no other."""
    if len(speed.times.ranks) == 1 or speed.times.missing:  # the rank that came last may be missing
        return
    exposed, wall = float(speed.times.seconds["sync"].min(axis=0).mean()), speed.wall
    if exposed / wall <= _MOST_COMMUNICATION:
        return
    num_bytes = float(speed.times.sent_bytes.mean())
    yield _finding(
        speed,
        "communication_bound",
        exposed / wall / 2 * speed.step_fraction,  # twice the samples per step, or half the bytes, halve it
        f"communication that no computation hides takes {exposed / wall:.0%} of the time",
        [
            f"{_ms(exposed)} of the {_ms(wall)} of a step, on the rank that comes last",
            f"each rank sends {format_bytes(num_bytes)} per step, {format_bytes(num_bytes / exposed)}/s",
        ],
        f"a step computes little for what it sends through {speed.setup.transport or 'the network'}",
        "a larger batch, accumulation under no_sync(), or a gradient hook that compresses (bf16, PowerSGD)"
        if speed.setup.is_script
        else "a larger --global-batch-size, or a strategy or an option that sends less: see `dure strategies`",
    )


def _straggler(speed: _Speed) -> Iterator[Finding]:
    """Yield a finding if the others wait for one rank in most steps of the later half."""
    times = speed.times
    if len(times.ranks) == 1 or times.missing:  # it may be a missing one for which the others wait
        return
    blocks = np.array_split(np.arange(times.steps.size), min(_NUM_BLOCKS, times.steps.size))
    busy = np.stack([times.busy[:, block].mean(axis=1) for block in blocks])
    wall = np.array([times.wall[block].mean() for block in blocks])
    late = len(blocks) // 2
    slowest = int(busy[late:].mean(axis=0).argmax())
    others = np.delete(busy, slowest, axis=1)
    lateness = (busy[:, slowest] - others.max(axis=1)) / wall
    if np.median(lateness[late:]) <= _MOST_LATENESS:
        return
    # its lateness begins where most of the later blocks are late: a few of them may be as fast as the others
    is_late = lateness - np.median(lateness[late:]) / 2
    first = int(is_late[::-1].cumsum()[::-1][: late + 1].argmax())
    if first < len(blocks) / 10:  # the start of a run is uneven
        first = 0
    steps = np.concatenate(blocks[first:])
    excess = {
        part: float(
            times.seconds[part][slowest, steps].mean() - np.delete(times.seconds[part], slowest, 0)[:, steps].mean()
        )
        for part in (*PARTS, "other")
        if part != "sync"
    }
    part = max(excess, key=lambda name: excess[name])
    rank = times.ranks[slowest]
    own, most = (
        float(times.busy[slowest, steps].mean()),
        float(np.delete(times.busy, slowest, 0)[:, steps].mean(axis=1).max()),
    )
    step_seconds = float(times.wall[steps].mean())
    cause, remedy = _CAUSES[part]
    since = f", since step {times.steps[blocks[first][0]]}" if first else ""
    do_wait = float(np.delete(times.seconds["sync"], slowest, 0)[:, steps].mean(axis=1).min()) > (own - most) / 2
    what = f"the other ranks wait for rank {rank}, {_ms(own - most)} in each step"
    if not do_wait:
        what = f"rank {rank} is behind the others, by {_ms(own - most)} more in each step"
    yield _finding(
        speed,
        "straggler",
        (own - most) / step_seconds * speed.step_fraction * len(steps) / times.steps.size,
        f"{what}{since}",
        [
            f"rank {rank} is busy for {_ms(own)} of a step's {_ms(step_seconds)}, the others for {_ms(most)} at most",
            f"{_ms(excess[part])} of the difference is {_LABELS[part]}",
        ],
        cause,
        f"on rank {rank}: {remedy}",
    )


def _too_small(speed: _Speed) -> Iterator[Finding]:
    """Yield a finding if one device that did the work of all ranks, one after another, would be as fast."""
    times, num_ranks = speed.times, len(speed.times.ranks)
    if num_ranks == 1 or num_ranks != speed.setup.num_devices:
        return
    compute, data = float(speed.mean("forward_backward").sum()), float(speed.mean("data").sum())
    rest = float((speed.mean("optimizer") + speed.mean("other")).max())
    alone, wall = compute + data + rest, speed.wall
    is_idle = float(speed.mean("forward_backward").min()) == 0.0  # a rank that only serves the others
    if is_idle or alone > wall:
        return
    yield _finding(
        speed,
        "too_small_to_distribute",
        (1 - alone / wall) * speed.step_fraction,
        f"one device would be as fast as {num_ranks}: {_ms(alone)} for a step that takes {_ms(wall)} now",
        [
            f"forward and backward of the {num_ranks} shares, one after another: {_ms(compute)}",
            f"loading, the optimiser's step and the rest: {_ms(data + rest)}",
            f"waiting for each other and for the network: {_ms(float(times.seconds['sync'].mean()))} of each step",
        ],
        "a step computes too little for what the ranks spend on each other",
        f"{'--nnodes 1 ' if speed.setup.num_nodes > 1 else ''}--nproc 1; or a larger "
        + ("batch, if the model" if speed.setup.is_script else "--global-batch-size, if the task")
        + " learns as well with it",
    )


def _cores(speed: _Speed) -> Iterator[Finding]:
    """Yield a finding if more threads compute on a host than it has cores: because of other work, or too many ranks."""
    nproc, cores, threads = speed.setup.nproc, speed.setup.cores, speed.setup.threads
    computing = float(speed.mean("forward_backward").max()) / speed.wall * speed.step_fraction
    if speed.slow_threads:
        slow = speed.slow_threads[-1]
        yield _finding(
            speed,
            "cpu_oversubscribed",
            computing * (1 - 1 / slow.slowdown),
            f"the {slow.threads} threads of a rank wait for cores that other work uses",
            [f"at the start small operations took {slow.slowdown:,.0f} times as long as with one thread"],
            "an operation waits for the last of its threads, and one without a core comes late",
            "--threads 1, or end the other work",
        )
    elif speed.setup.device == "cpu" and cores and nproc > cores:
        yield _finding(
            speed,
            "cpu_oversubscribed",
            0.0,  # they compute as much in turns as side by side
            f"{nproc} ranks share {cores} cores, and so take turns",
            [f"{nproc} ranks on a host with {cores} cores"],
            "there are more ranks than cores",
            f"--nproc {cores}, or hosts with more cores",
        )
    elif speed.setup.device == "cpu" and cores and threads and nproc > 1 and nproc * threads > cores:
        fewer = max(cores // nproc, 1)
        yield _finding(
            speed,
            "cpu_oversubscribed",
            computing / 2,  # between none, if others wait anyway, and far more: see the benchmark of slow threads
            f"{nproc} ranks of {threads} threads each compete for {cores} cores",
            [f"{nproc} x {threads} threads on a host with {cores} cores"],
            "an operation waits for the last of its threads, and one without a core comes late",
            f"--threads {fewer}, or torch.set_num_threads({fewer}) in the script",
        )


def _evaluation(speed: _Speed) -> Iterator[Finding]:
    seconds, num = speed.evaluation_seconds, speed.num_evaluations
    fraction = seconds / speed.total_seconds
    if fraction <= _MOST_EVALUATION or num < 2:
        return
    # seldom enough to take a tenth of the rest
    rest = speed.step_seconds + speed.stall_seconds
    factor = max(2, math.ceil(min(10 * seconds / rest, _MOST_FACTOR)))
    yield _finding(
        speed,
        "evaluation_dominates",
        fraction * (1 - 1 / min(factor, num)),  # one is left: that at the end
        f"evaluation takes {fraction:.0%} of the time",
        [
            f"{num} evaluations of {format_seconds(seconds / num)} each, {format_seconds(seconds)} in all",
            f"{format_seconds(speed.step_seconds)} of training",
        ],
        "it is done often, or over many samples, for so little training",
        f"evaluate {factor} times less often, or on fewer samples"
        if speed.setup.spec is None
        else f"--eval-every-epochs {speed.setup.spec.eval_every_epochs * factor:.2g}, or fewer samples in eval_data",
    )


def _checkpoints(speed: _Speed) -> Iterator[Finding]:
    seconds, num = speed.stall_seconds, len(speed.checkpoint_bytes)
    fraction = seconds / speed.total_seconds
    if fraction <= _MOST_STALLS or num < 2:
        return
    sizes = [size for size in speed.checkpoint_bytes if size is not None]
    of_size = f" of {format_bytes(sum(sizes) / len(sizes))}" if sizes else ""
    cause, remedy = "training waits until they are written", "save less often, or on a faster disk"
    if speed.setup.spec is not None:
        settings = speed.setup.spec.checkpoint
        remedy = "a faster disk for --runs-dir, or longer epochs"
        if settings.background:
            cause = "they follow each other too closely"
        if not settings.background:
            remedy = "--checkpoint.background true: they are then written while training goes on"
        elif settings.every_samples is not None or settings.every_minutes is not None:
            remedy = "a longer interval (--checkpoint.every-samples, --checkpoint.every-minutes)"
    yield _finding(
        speed,
        "checkpoint_stalls",
        fraction / 2,
        f"training stands still for checkpoints for {fraction:.0%} of the time",
        [f"{num} checkpoints{of_size}, each for {format_seconds(seconds / num)}"],
        cause,
        remedy,
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
