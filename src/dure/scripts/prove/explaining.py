"""Causes of the difference of one step: what the ranks' gradients, weights, rates and samples say about it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dure.scripts.prove.certificate import Cause
from dure.scripts.prove.differences import PROPORTIONAL, Difference, common_factor, largest_between, rates_differ
from dure.scripts.prove.recording import Recording, Step

_MOST_BUFFER_DIFFERENCE = 1e-6
"""Relative difference of buffers that counts as rounding; they are often float32 in any precision."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Step of all ranks, compared with each other and with one process."""

    number: int
    ranks: Sequence[Recording]
    steps: Sequence[Step]
    """The step of each rank."""
    alone: Step | None
    """The step of one process; None if there is none to compare with."""
    tolerance: float
    """Relative difference between ranks that is rounding."""
    tolerance_of_one: float
    """Relative difference from one process that is rounding."""
    has_other_start: bool
    """True if the weights of the ranks differ at the first call of a model."""
    between: Difference
    """Gradients between ranks."""
    apart: Difference
    """Weights between ranks."""
    gradients: Difference
    weights: Difference
    buffers: Difference

    @property
    def sizes(self) -> list[int]:
        """Samples of each rank since the last step."""
        return [
            sum(fetch.size for fetch in recording.fetches if fetch.step == self.number and fetch.is_trained)
            for recording in self.ranks
        ]

    @property
    def loss_line(self) -> str:
        """Place of the last backward before the step."""
        first = self.steps[0]
        return first.loss_lines[-1] if first.loss_lines else first.line

    @property
    def optimizer_line(self) -> str:
        """Place where the optimiser was made."""
        lines, number = self.ranks[0].optimizer_lines, self.steps[0].optimizer
        return lines[number] if number < len(lines) else ""


def cause_of(found: Compared) -> Cause | None:
    """Return the cause of a step's difference; None if it is rounding."""
    first, alone, tolerance = found.steps[0], found.alone, found.tolerance
    if found.has_other_start and found.number == 0 and found.apart.value > tolerance:
        return of_other_start(found.ranks, found.optimizer_line)
    if found.between.value > tolerance:
        return _of_clips(found) or _of_other_epochs(found) or _not_averaged(found)
    if (missing := _taking_part_on_some(found.steps)) is not None:
        return _of_missing(found, missing)
    if rank := next((rank for rank, step in enumerate(found.steps) if rates_differ(first.rates, step.rates)), 0):
        return Cause(
            id="rates_part",
            what=f"the learning rate is {_few(first.rates)} on rank 0 and {_few(found.steps[rank].rates)} on "
            f"rank {rank}",
            cure="let all ranks step the schedule alike, by what all have: average a loss over the ranks before "
            "ReduceLROnPlateau gets it",
            line=first.line,
            step=found.number + 1,
        )
    if found.apart.value > tolerance:
        return _parted(found)
    if alone is None:
        return None
    if rates_differ(first.rates, alone.rates):
        return _of_rates(found, alone)
    if found.gradients.value > found.tolerance_of_one or set(first.gradients) != set(alone.gradients):
        return _other_gradients(found, alone)
    if found.weights.value > found.tolerance_of_one:
        return Cause(
            id="other_update",
            what=f"equal gradients change {found.weights.name} otherwise on {len(found.steps)} ranks than on one (by "
            f"{found.weights.value:.2g} of its size)",
            cure="look for settings of the optimiser that follow from the number of ranks",
            line=first.line,
            step=found.number + 1,
        )
    if found.buffers.value > max(found.tolerance_of_one, _MOST_BUFFER_DIFFERENCE):
        return _of_buffers(found)
    return None


def of_other_start(ranks: Sequence[Recording], line: str, *, without: Mapping[str, Tensor] | None = None) -> Cause:
    """Return the cause if ranks begin with different weights."""
    started = _different_starts(ranks, without or {})
    return Cause(
        id="other_weights_at_the_start",
        what=f"the ranks begin with different weights ({started.name.partition('.')[2]} differs by "
        f"{started.value:.2g} of its size)",
        cure="wrap the model in DistributedDataParallel, which sends the weights of rank 0, or seed all ranks "
        "alike before it is built",
        line=line,
        step=1,
    )


def of_metrics(ranks: Sequence[Recording]) -> Cause | None:
    """Return the cause if ranks decide on the learning rate by other metrics, though the rates have not parted yet."""
    for metrics in zip(*(recording.metrics for recording in ranks), strict=False):
        first = metrics[0]
        for rank, metric in enumerate(metrics):
            is_same = math.isclose(metric.value, first.value, rel_tol=_MOST_BUFFER_DIFFERENCE)
            if not is_same and not (math.isnan(metric.value) and math.isnan(first.value)):
                return Cause(
                    id="rates_part",
                    what=f"ReduceLROnPlateau gets {first.value:.6g} on rank 0 and {metric.value:.6g} on rank {rank}, "
                    "so the learning rates part once one of them is no longer better",
                    cure="average the metric over the ranks (all_reduce) before ReduceLROnPlateau gets it",
                    line=first.line,
                    step=first.step,
                )
    return None


def _different_starts(ranks: Sequence[Recording], without: Mapping[str, Tensor]) -> Difference:
    """Return the largest difference of first weights and buffers that are not among some names of a step."""
    return largest_between(
        [
            {name: each for name, each in recording.initial.items() if name.removeprefix("0.") not in without}
            for recording in ranks
        ]
    )


def _of_clips(found: Compared) -> Cause | None:
    """Return a cause if ranks have clipped gradients that had another norm on each."""
    clips = [[clip for clip in recording.clips if clip.step == found.number] for recording in found.ranks]
    for of_ranks in zip(*clips, strict=False):
        norms = [clip.norm for clip in of_ranks]
        if any(not math.isclose(norm, norms[0], rel_tol=max(found.tolerance, 1e-6)) for norm in norms):
            return Cause(
                id="clipped_before_average",
                what="each rank clips its own gradients, before they are averaged (their norm is "
                f"{norms[0]:.4g} on rank 0 and {norms[1]:.4g} on rank 1)",
                cure="clip after the gradients have been averaged: all ranks have the same norm then",
                line=of_ranks[0].line,
                step=found.number + 1,
            )
    return None


def _of_other_epochs(found: Compared) -> Cause | None:
    """Return a cause if a rank has come to the end of its data before others, as it may under `Join`."""
    epochs = [
        {(fetch.loader, fetch.epoch) for fetch in recording.fetches if fetch.step == found.number and fetch.is_trained}
        for recording in found.ranks
    ]
    other = next((rank for rank, each in enumerate(epochs) if each and epochs[0] and not each & epochs[0]), None)
    if other is None:
        return None
    later, earlier = sorted((0, other), key=lambda rank: -max(epoch for _, epoch in epochs[rank]))
    return Cause(
        id="other_numbers_of_steps",
        what=f"rank {later} has come to the end of its batches after {found.number} steps, and rank {earlier} has not",
        cure="give all ranks as many batches (drop_last=True, or DistributedSampler, which fills up): under Join, a "
        "rank without a batch takes no part in the mean",
        line=found.loss_line,
        step=found.number + 1,
    )


def _not_averaged(found: Compared) -> Cause:
    steps = found.steps
    for rank, step in enumerate(steps[1:], start=1):
        is_same = set(step.gradients) == set(steps[0].gradients)
        factor = common_factor(step.gradients, steps[0].gradients) if is_same else None
        if factor is not None:
            return Cause(
                id="gradients_scaled_by_rank",
                what=f"the gradients of rank {rank} are {factor:.4g} times those of rank 0 before the step",
                cure="clip and scale gradients alike on all ranks, after they have been averaged",
                line=steps[0].line,
                step=found.number + 1,
            )
    names = [
        name
        for name in steps[0].gradients
        if largest_between([{name: step.gradients[name]} for step in steps if name in step.gradients]).value
        > found.tolerance
    ]
    is_all = len(names) == len(steps[0].gradients)
    norms = ", ".join(
        f"{float(step.gradients[found.between.name].norm()):.4g} on rank {rank}"
        for rank, step in enumerate(steps[:2])
        if found.between.name in step.gradients
    )
    has_norm = "" if steps[0].is_sketch else f" ({found.between.name} has a norm of {norms})"
    whose = "no gradient was" if is_all else f"the gradient of {_named(names)} was not"
    return Cause(
        id="gradients_not_averaged",
        what=f"{whose} averaged over the ranks before the step{has_norm}",
        cure="call the model through DistributedDataParallel, not through .module, and leave no_sync only for "
        "backwards before the last"
        if any("DataParallel" in name for name in found.ranks[0].wrappers)
        else "wrap the model in DistributedDataParallel, or average every gradient with all_reduce before the step",
        line=found.loss_line,
        step=found.number + 1,
    )


def _taking_part_on_some(steps: Sequence[Step]) -> str | None:
    """Return the name of a parameter that has a gradient on some ranks only."""
    names = dict.fromkeys(name for step in steps for name in step.gradients)
    return next((name for name in names if any(name not in step.gradients for step in steps)), None)


def _of_missing(found: Compared, name: str) -> Cause:
    having = [rank for rank, step in enumerate(found.steps) if name in step.gradients]
    lacking = [rank for rank in range(len(found.steps)) if rank not in having]
    return Cause(
        id="other_parameters",
        what=f"{name} has a gradient on rank {having[0]}, and none on rank {lacking[0]}",
        cure="freeze and unfreeze parameters at the same step on all ranks, and let the same ones take part in the "
        "loss",
        line=found.loss_line,
        step=found.number + 1,
    )


def _parted(found: Compared) -> Cause:
    return Cause(
        id="weights_part",
        what=f"the weights of the ranks differ after the step ({found.apart.name} by {found.apart.value:.2g} of its "
        "size), although their gradients do not",
        cure="let all ranks begin with the weights of rank 0 and step alike, and look for code that changes weights on "
        "some ranks only",
        line=found.steps[0].line,
        step=found.number + 1,
    )


def _of_rates(found: Compared, alone: Step) -> Cause:
    what = f"the learning rate is {_few(found.steps[0].rates)} on the ranks and {_few(alone.rates)} on one"
    return Cause(
        id="scaled_learning_rate",
        what=what,
        cure="if a factor or a schedule follows the number of ranks on purpose, this is a reason and no fault; else "
        "leave it out (Accelerate's scheduler takes a step for each rank); if it follows from the batch of a rank, "
        "name the script's argument for that with --batch-size-argument",
        line=found.optimizer_line,
        step=found.number + 1,
    )


def _of_buffers(found: Compared) -> Cause:
    name, norms = found.buffers.name, found.ranks[0].norms
    module = name.rpartition(".")[0]
    if module in norms:
        return Cause(
            id="batchnorm_statistics",
            what=f"BatchNorm {module} normalises by the samples of one rank, not by those of all",
            cure="convert the model with torch.nn.SyncBatchNorm.convert_sync_batchnorm before it is wrapped",
            step=found.number + 1,
        )
    return Cause(
        id="other_buffers",
        what=f"the buffer {name} has other values on several ranks than on one",
        cure="compute it from what all ranks have, or accept that it is of one rank's samples",
        step=found.number + 1,
    )


def _other_gradients(found: Compared, alone: Step) -> Cause:
    """Return why gradients that are equal on all ranks are not those of one process."""
    first, line, here = found.steps[0], found.loss_line, found.number + 1
    only = sorted(set(first.gradients) ^ set(alone.gradients))
    if only:
        where = "several ranks" if only[0] in first.gradients else "one rank"
        return Cause(
            id="other_parameters",
            what=f"{_named(only)} has a gradient on {where} only",
            cure="let the same parameters take part, whatever the number of ranks",
            line=line,
            step=here,
        )
    if (cause := _of_clips(found)) is not None:
        return cause
    ratio = common_factor(first.gradients, alone.gradients)
    if ratio is not None and not math.isclose(ratio, 1.0, rel_tol=PROPORTIONAL):
        return _scaled(found, ratio)
    frozen = _different_starts(
        found.ranks, {name: weight for step in found.steps for name, weight in step.weights.items()}
    )
    if found.has_other_start and frozen.value > found.tolerance:
        return of_other_start(found.ranks, found.loss_line, without=first.weights)
    gradients, norms = found.gradients, [name for recording in found.ranks for name in recording.norms]
    if norms:
        return Cause(
            id="batchnorm_statistics",
            what=f"BatchNorm {norms[0]} normalises by the samples of one rank, not by those of all: "
            f"{gradients.name} has another gradient (by {gradients.value:.2g} of its size)",
            cure="convert the model with torch.nn.SyncBatchNorm.convert_sync_batchnorm before it is wrapped",
            line=line,
            step=here,
        )
    sizes = found.sizes
    if len(set(sizes)) > 1:
        return Cause(
            id="mean_of_means",
            what=f"ranks with {', '.join(map(str, sizes))} samples have the same weight in the step, so a sample's "
            "weight depends on its rank",
            cure="multiply each rank's loss by its samples and the number of ranks, and divide by all samples",
            line=line,
            step=here,
        )
    if any(recording.has_drawn for recording in found.ranks):
        return Cause(
            id="other_draws",
            what="random numbers are drawn between the batch and the loss, other ones on each rank",
            cure="this is a reason and no fault, but what else differs is not seen behind it: leave the draws out, "
            "or draw them from the samples' numbers, and prove again",
            line=line,
            step=here,
            is_fault=False,
        )
    if (buffer := _changed_buffer(found)) is not None:
        return Cause(
            id="other_buffers",
            what=f"the buffer {buffer} follows from the samples of one rank, and the loss from the buffer: "
            f"{gradients.name} has another gradient (by {gradients.value:.2g} of its size)",
            cure="compute it from what all ranks have (all_reduce its sums and counts) before it is used",
            line=line,
            step=here,
        )
    return Cause(
        id="mean_of_means",
        what=f"the gradient of {gradients.name} differs by {gradients.value:.2g} of its size: the loss of all "
        "samples is not the mean of the ranks' losses (a mean over tokens, classes or pairs, or a loss between "
        "samples)",
        cure="sum the loss, and divide by the count of all ranks (all_reduce the count); gather what samples are "
        "compared with",
        line=line,
        step=here,
    )


def _scaled(found: Compared, ratio: float) -> Cause:
    count = len(found.steps)
    if math.isclose(ratio, count, rel_tol=1e-2):
        what, cure = "the gradients are summed over the ranks, not averaged", "divide by the number of ranks"
    elif math.isclose(ratio, 1 / count, rel_tol=1e-2):
        what = f"the gradients are divided by the number of ranks twice ({ratio:.4g} of those of one process)"
        cure = "leave one division out: DistributedDataParallel averages already"
    else:
        what = f"the gradients are {ratio:.4g} times those of one process"
        cure = "divide the loss by what all ranks have together, such as all accumulated samples"
    return Cause(id="gradients_scaled", what=what, cure=cure, line=found.loss_line, step=found.number + 1)


def _changed_buffer(found: Compared) -> str | None:
    """Return the name of a buffer of several numbers, as a codebook, that is not that of one process; else None."""
    buffers = found.steps[0].buffers
    is_large = found.buffers.value > max(found.tolerance, _MOST_BUFFER_DIFFERENCE)
    name = found.buffers.name
    return name if is_large and buffers[name].is_floating_point() and buffers[name].numel() > 1 else None


def _few(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.6g}" for number in numbers[:3]) + (", …" if len(numbers) > 3 else "")


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"
