"""Findings on what ranks wait for: their data, each other, the network."""

import math
from collections.abc import Iterator

import numpy as np

from dure.doctor.speed import Speed, as_ms, finding_of
from dure.records.finding import Finding
from dure.records.step_record import PARTS
from dure.units import format_bytes

_MOST_DATA = 0.1
_MOST_COMMUNICATION = 0.25
_MOST_LATENESS = 0.1
"""Fractions of the time up to which waiting for data, communication and a late rank are usual."""
_MOST_CHANGING = 0.15
"""The same, for a rank that is another one in each step: that is also what other work on a machine looks like."""
_MOST_BUCKETS = 0.1
_MANY_BUCKETS = 8
_SMALL_BUCKET_BYTES = 2**20
_USUAL_BUCKET_BYTES = 25 * 2**20
_MOST_FACTOR = 1000
_MOST_WORKERS = 64
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


def waits_for_data(speed: Speed) -> Iterator[Finding]:
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
    yield finding_of(
        speed,
        "waits_for_data",
        min(wait / wall, 1.0) * speed.step_fraction,
        f"steps wait for data for {wait / wall:.0%} of their time",
        [
            f"{as_ms(wait)} of the {as_ms(wall)} of a step",
            f"{of_loader}; without waiting, each rank would use {wanted:,.0f}",
        ],
        f"{workers} loader process{'es' * (workers > 1)} per rank: too few for what a sample takes"
        if workers
        else "each rank loads its samples itself, between two steps",
        remedy,
    )


def communication_bound(speed: Speed) -> Iterator[Finding]:
    """Yield a finding if communication takes long even on the rank that comes last, which waits for no other."""
    if len(speed.times.ranks) == 1 or speed.times.missing:  # the rank that came last may be missing
        return
    exposed, wall = speed.exposed_seconds, speed.wall
    if exposed / wall <= _MOST_COMMUNICATION:
        return
    num_bytes = float(speed.times.sent_bytes.mean())
    yield finding_of(
        speed,
        "communication_bound",
        exposed / wall / 2 * speed.step_fraction,  # twice the samples per step, or half the bytes, halve it
        f"communication that no computation hides takes {exposed / wall:.0%} of the time",
        [
            f"{as_ms(exposed)} of the {as_ms(wall)} of a step, on the rank that comes last",
            f"each rank sends {format_bytes(num_bytes)} per step, {format_bytes(num_bytes / exposed)}/s",
        ],
        f"a step computes little for what it sends through {speed.setup.transport or 'the network'}",
        "a larger batch, accumulation under no_sync(), or a gradient hook that compresses (bf16, PowerSGD)"
        if speed.setup.is_script
        else "a larger --global-batch-size, or a strategy or an option that sends less: see `dure strategies`",
    )


def straggler(speed: Speed) -> Iterator[Finding]:
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
    what = f"the other ranks wait for rank {rank}, {as_ms(own - most)} in each step"
    if not do_wait:
        what = f"rank {rank} is behind the others, by {as_ms(own - most)} more in each step"
    yield finding_of(
        speed,
        "straggler" if do_wait else "ranks_drift_apart",
        (own - most) / step_seconds * speed.step_fraction * len(steps) / times.steps.size,
        f"{what}{since}",
        [
            f"rank {rank} is busy for {as_ms(own)} of a step's {as_ms(step_seconds)}, "
            f"the others for {as_ms(most)} at most",
            f"{as_ms(excess[part])} of the difference is {_LABELS[part]}",
        ],
        cause,
        f"on rank {rank}: {remedy}",
    )


def uneven_shares(speed: Speed) -> Iterator[Finding]:
    """Yield a finding if some ranks have more samples in a step than others, which wait for them."""
    times = speed.times
    shares = times.means("samples")  # recorded of scripts only: dure divides a batch itself
    if len(shares) < 2 or times.missing:
        return
    mean, most = float(shares.mean()), float(shares.max())
    lost = (1 - mean / most) * speed.computing if most else 0.0
    if lost <= _MOST_LATENESS:
        return
    yield finding_of(
        speed,
        "uneven_shares",
        lost * speed.step_fraction,
        f"ranks have shares of different sizes, and wait for the largest for {lost:.0%} of a step",
        [f"the largest share has {most:.3g} samples, the mean {mean:.3g}"],
        "a step takes as long as the rank with the most samples",
        "give all ranks the same number of samples (DistributedSampler)",
    )


def changing_lateness(speed: Speed) -> Iterator[Finding]:
    """Yield a finding if each step waits for one rank, now for this one and now for that."""
    times = speed.times
    if len(times.ranks) == 1 or times.missing or not times.are_in_step:
        return
    busy = times.busy
    lost = float((busy.max(axis=0) - busy.mean(axis=0)).mean())
    changing = lost - float(busy.mean(axis=1).max() - busy.mean())
    if changing / speed.wall <= _MOST_CHANGING:
        return
    yield finding_of(
        speed,
        "uneven_shares",
        changing / speed.wall * speed.step_fraction,
        f"each step waits for one rank, now for this one and now for that, for {as_ms(changing)}",
        [f"the last rank of a step is busy for {as_ms(float(busy.max(axis=0).mean()))}, the mean rank for "
         f"{as_ms(float(busy.mean()))}"],
        "samples take unequal time (texts or images of different sizes), and chance gives one rank the long ones",
        "make samples of a batch alike (sort or group them by length), or cut them to the same size",
    )  # fmt: skip


def bucket_size(speed: Speed) -> Iterator[Finding]:
    """Yield a finding if gradients are reduced in too many small buckets, or all in one."""
    num, num_bytes, largest = speed.num_buckets, speed.gradient_bytes, speed.largest_bucket_bytes
    if len(speed.times.ranks) == 1 or speed.times.missing or not num or not num_bytes or not largest:
        return
    exposed, wall = speed.exposed_seconds, speed.wall
    is_small = num >= _MANY_BUCKETS and num_bytes / num < _SMALL_BUCKET_BYTES
    is_whole = largest > _USUAL_BUCKET_BYTES and largest >= num_bytes > _USUAL_BUCKET_BYTES
    if exposed / wall <= _MOST_BUCKETS or not (is_small or is_whole):
        return
    option = "bucket_cap_mb=25 (its default)"
    if speed.setup.spec is not None:
        option = f"--{speed.setup.spec.strategy.replace('_', '-')}.bucket-bytes {_USUAL_BUCKET_BYTES} (its default)"
    cause = "each bucket is a message of its own, whose start takes longer than its bytes"
    if not is_small:
        cause = "it is complete only at the end of the backward, so nothing is sent during it"
    yield finding_of(
        speed,
        "bucket_size",
        exposed / wall / 2 * speed.step_fraction,
        f"gradients of {format_bytes(num_bytes)} are reduced in {num:,.0f} buckets"
        if is_small
        else f"gradients of {format_bytes(num_bytes)} are reduced in one bucket",
        [f"{as_ms(exposed)} of the {as_ms(wall)} of a step are communication that nothing hides"],
        cause,
        option,
    )


def needless_unused_parameter_search(speed: Speed) -> Iterator[Finding]:
    """Yield a finding if every step looks for parameters without a gradient, and there are none on any rank."""
    if len(speed.times.ranks) == 1 or speed.times.missing or speed.times.largest("unused_bytes") != 0.0:
        return
    option = "find_unused_parameters=False"
    if speed.setup.spec is not None:
        option = f"leave --{speed.setup.spec.strategy.replace('_', '-')}.find-unused-parameters out"
    yield finding_of(
        speed,
        "needless_unused_parameter_search",
        0.0,  # depends on the size of the graph, and is not measured
        "every step looks for parameters that got no gradient, and there are none",
        [f"no rank had any in {speed.times.steps.size:,} steps"],
        "find_unused_parameters walks through the graph after each forward, and delays communication",
        option,
    )
