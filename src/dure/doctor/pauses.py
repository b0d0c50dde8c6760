"""Findings on what interrupts training: evaluations, and checkpoints that are saved."""

import math
from collections.abc import Iterator

import numpy as np

from dure.doctor.speed import Speed, finding_of
from dure.records.finding import Finding
from dure.units import format_bytes, format_seconds

_MOST_EVALUATION = 0.3
_MOST_STALLS = 0.1
"""Fractions of the time up to which evaluation and checkpoints are usual."""
_MOST_ALONE = 0.1
_MOST_OF_OTHERS = 0.1
_MOST_FACTOR = 1000


def evaluation_on_one_rank(speed: Speed) -> Iterator[Finding]:
    """Yield a finding if one rank evaluates while the others wait for it."""
    seconds = speed.times.sums("evaluation_seconds")
    if len(seconds) < 2 or speed.times.missing:
        return
    most = int(seconds.argmax())
    others = float(np.delete(seconds, most).max())
    fraction = float(seconds[most]) / max(speed.step_seconds, float(seconds[most]))
    if others > _MOST_OF_OTHERS * seconds[most] or fraction <= _MOST_ALONE:
        return
    rank, num = speed.times.ranks[most], len(seconds)
    yield finding_of(
        speed,
        "evaluation_on_one_rank",
        fraction * (1 - 1 / num),
        f"rank {rank} evaluates alone for {fraction:.0%} of the time, and the others wait",
        [f"{format_seconds(float(seconds[most]))} on rank {rank}, {format_seconds(others)} on the others"],
        "the evaluation data are not divided",
        f"give each rank 1/{num} of the evaluation data, and add up sums and counts over the ranks",
    )


def evaluation_dominates(speed: Speed) -> Iterator[Finding]:
    """Yield a finding if evaluations take long."""
    seconds, num = speed.evaluation_seconds, speed.num_evaluations
    fraction = seconds / speed.total_seconds
    if fraction <= _MOST_EVALUATION or num < 2:
        return
    # seldom enough to take a tenth of the rest
    rest = speed.step_seconds + speed.stall_seconds
    factor = max(2, math.ceil(min(10 * seconds / rest, _MOST_FACTOR)))
    yield finding_of(
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


def checkpoint_stalls(speed: Speed) -> Iterator[Finding]:
    """Yield a finding if training often stands still for checkpoints."""
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
    yield finding_of(
        speed,
        "checkpoint_stalls",
        fraction / 2,
        f"training stands still for checkpoints for {fraction:.0%} of the time",
        [f"{num} checkpoints{of_size}, each for {format_seconds(seconds / num)}"],
        cause,
        remedy,
    )
