"""Comparison of the observed ranks with one process, and the causes of a difference."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dure.scripts.prove.certificate import DIFFERS, EQUAL, UNPROVEN, Cause, Certificate, ComparedStep
from dure.scripts.prove.recording import Recording, Step
from dure.scripts.prove.samples import causes_in_samples, notes_on_samples

TOLERANCES = {"float64": 1e-9, "float32": 2e-4, "half": 5e-2}
"""Relative differences of gradients and weights that are rounding. Sums of float32 in another order differ by some
1e-6 of the largest summand; an optimiser that divides by the gradient's size makes of it what is seen in the first
steps of Adam, up to 1e-4."""
_PARTLY_FLOAT32 = 1e-6
"""Relative difference up to which float64 gradients count as computed in float32 in between."""
_PROPORTIONAL = 1e-3
"""Relative difference up to which a gradient counts as a multiple of another."""


def judge(certificate: Certificate, ranks: Sequence[Recording], one: Recording | None) -> Certificate:
    """Complete a certificate by what the ranks and one process have recorded.

    Args:
        certificate: Certificate without steps and causes.
        ranks: Recordings of all ranks.
        one: Recording of one process that was given the ranks' samples; None if there is none.
    """
    certificate.tolerance = TOLERANCES[certificate.precision]
    if _has_halves(ranks):
        certificate.tolerance = TOLERANCES["half"]
        certificate.notes.append(
            f"the weights are in half precision, so differences up to {certificate.tolerance:.0%} count as rounding: "
            "smaller faults are not seen"
        )
    certificate.num_followed_steps = min(recording.num_steps for recording in ranks)
    certificate.notes += notes_on_samples(ranks)
    judgement, of_samples = _Judgement(certificate, ranks, one), [*causes_in_samples(ranks)]
    causes = [*judgement.causes()]
    if causes and judgement.is_small(_PARTLY_FLOAT32):
        certificate.tolerance = 10 * _PARTLY_FLOAT32
        certificate.notes.append("some of it is computed in float32 whatever the precision, so the tolerance is larger")
        judgement = _Judgement(certificate, ranks, one)
        causes = [*judgement.causes()]
    causes = of_samples + causes
    certificate.steps = judgement.compared
    certificate.causes = causes
    if causes:
        certificate.verdict = DIFFERS
    elif one is None or not judgement.compared:
        certificate.verdict = UNPROVEN
    else:
        certificate.verdict = EQUAL
    return certificate


@dataclass(frozen=True)
class _Difference:
    """Largest relative difference among tensors of the same names."""

    value: float
    name: str


class _Judgement:
    def __init__(self, certificate: Certificate, ranks: Sequence[Recording], one: Recording | None) -> None:
        self._tolerance = certificate.tolerance
        self._ranks, self._one = ranks, one
        self.compared: list[ComparedStep] = []

    def causes(self) -> Iterator[Cause]:
        """Yield the first difference with its cause."""
        started = _largest_between([recording.initial for recording in self._ranks])
        has_other_start = started.value > self._tolerance
        num_steps = [len(recording.steps) for recording in self._ranks]
        found: Cause | None = None
        if len(set(num_steps)) > 1:
            found = Cause(
                id="other_numbers_of_steps",
                what=f"the ranks take {', '.join(map(str, num_steps))} steps",
                cure="give all ranks as many batches: drop_last=True, or DistributedSampler, which fills up",
                line=self._ranks[0].steps[0].line if self._ranks[0].steps else "",
            )
        for number in range(min(num_steps)):
            steps = [recording.steps[number] for recording in self._ranks]
            alone = self._one.steps[number] if self._one is not None and number < len(self._one.steps) else None
            cause = self._of_step(number, steps, alone, has_other_start=has_other_start)
            if cause is not None and found is None:
                found = cause
            if found is not None:
                break
        if found is None and self._one is not None and len(self._one.steps) < min(num_steps):
            found = Cause(
                id="fewer_steps_on_one_rank",
                what=f"one process takes {len(self._one.steps)} steps where the ranks take {min(num_steps)}",
                cure="let the number of steps follow from the samples, not from the number of ranks",
            )
        if found is None and has_other_start and not self.compared:
            found = self._other_start(started)
        if found is None:
            found = self._parted_later()
        if found is not None:
            yield found

    def is_small(self, limit: float) -> bool:
        """Return whether gradients differ by more than the tolerance, and by less than a limit."""
        found = [max(step.gradients, step.gradients_between_ranks) for step in self.compared]
        return bool(found) and self._tolerance < max(found) < limit

    def _other_start(self, started: _Difference) -> Cause:
        return Cause(
            id="other_weights_at_the_start",
            what=f"the ranks begin with different weights ({started.name.partition('.')[2]} differs by "
            f"{started.value:.2g} of its size)",
            cure="wrap the model in DistributedDataParallel, which sends the weights of rank 0, or seed all ranks "
            "alike before it is built",
            line=self._optimizer_line(0),
            step=1,
        )

    def _of_step(
        self, number: int, steps: Sequence[Step], alone: Step | None, *, has_other_start: bool
    ) -> Cause | None:
        between = _largest_between([step.gradients for step in steps])
        apart = _largest_between([step.weights for step in steps])
        losses = [step.losses[-1] for step in steps if step.losses]
        mean = sum(losses) / len(losses) if len(losses) == len(steps) else None
        gradients = _largest([(steps[0].gradients, alone.gradients)]) if alone else _Difference(0.0, "")
        moved = {name: each for name, each in steps[0].weights.items() if self._has_size(steps[0], name)}
        weights = _largest([(moved, alone.weights)]) if alone else _Difference(0.0, "")
        buffers = _largest([(steps[0].buffers, alone.buffers)]) if alone else _Difference(0.0, "")
        sizes = [self._sizes(recording, number) for recording in self._ranks]
        self.compared.append(
            ComparedStep(
                step=number + 1,
                optimizer=steps[0].optimizer,
                num_samples=sum(sizes) if all(sizes) else None,
                gradients_between_ranks=between.value,
                gradients=gradients.value,
                weights=weights.value,
                buffers=buffers.value,
                loss=mean,
                loss_of_one=alone.losses[-1] if alone and alone.losses else None,
                rates=steps[0].rates,
                rates_of_one=alone.rates if alone else [],
            )
        )
        tolerance = self._tolerance
        if has_other_start and number == 0 and apart.value > tolerance:
            return self._other_start(_largest_between([recording.initial for recording in self._ranks]))
        if between.value > tolerance:
            return self._not_averaged(number, steps, between)
        missing = [name for name in steps[0].gradients if any(name not in step.gradients for step in steps)]
        if missing:
            return self._not_averaged(number, steps, _Difference(1.0, missing[0]))
        if apart.value > tolerance:
            return self._parted(number, steps, apart)
        if alone is None:
            return None
        if _rates_differ(steps[0].rates, alone.rates):
            return Cause(
                id="scaled_learning_rate",
                what=f"the learning rate is {_few(steps[0].rates)} on the ranks and {_few(alone.rates)} on one",
                cure="if a factor or a schedule follows the number of ranks on purpose, this is a reason and no "
                "fault; else leave it out (Accelerate's scheduler takes a step for each rank)",
                line=self._optimizer_line(steps[0].optimizer),
                step=number + 1,
            )
        if gradients.value > tolerance or set(steps[0].gradients) != set(alone.gradients):
            return self._other_gradients(number, steps, alone, gradients, sizes)
        if weights.value > tolerance:
            return Cause(
                id="other_update",
                what=f"equal gradients change {weights.name} otherwise on {len(steps)} ranks than on one (by "
                f"{weights.value:.2g} of its size)",
                cure="look for settings of the optimiser that follow from the number of ranks",
                line=steps[0].line,
                step=number + 1,
            )
        if buffers.value > max(tolerance, 1e-6):
            return self._of_norms(number, buffers.name)
        return None

    def _has_size(self, step: Step, name: str) -> bool:
        """Return whether a weight's gradient is more than rounding, which Adam divides by its own size."""
        if self._tolerance == TOLERANCES["float64"] or name not in step.gradients:
            return True
        largest = max(float(gradient.double().norm()) for gradient in step.gradients.values())
        return float(step.gradients[name].double().norm()) > 1e-5 * largest

    def _optimizer_line(self, number: int) -> str:
        lines = self._ranks[0].optimizer_lines
        return lines[number] if number < len(lines) else ""

    def _sizes(self, recording: Recording, number: int) -> int:
        return sum(fetch.size for fetch in recording.fetches if fetch.step == number and fetch.is_trained)

    def _not_averaged(self, number: int, steps: Sequence[Step], between: _Difference) -> Cause:
        for rank, step in enumerate(steps[1:], start=1):
            factor = (
                _common_factor(step.gradients, steps[0].gradients)
                if set(step.gradients) == set(steps[0].gradients)
                else None
            )
            if factor is not None:
                return Cause(
                    id="gradients_scaled_by_rank",
                    what=f"the gradients of rank {rank} are {factor:.4g} times those of rank 0 before the step",
                    cure="clip and scale gradients alike on all ranks, after they have been averaged",
                    line=steps[0].line,
                    step=number + 1,
                )
        names = [
            name
            for name in steps[0].gradients
            if _largest_between([{name: step.gradients[name]} for step in steps if name in step.gradients]).value
            > self._tolerance
            or any(name not in step.gradients for step in steps)
        ]
        is_all = len(names) == len(steps[0].gradients)
        norms = ", ".join(
            f"{float(step.gradients[between.name].norm()):.4g} on rank {rank}"
            for rank, step in enumerate(steps[:2])
            if between.name in step.gradients
        )
        whose = "no gradient was" if is_all else f"the gradient of {_named(names)} was not"
        return Cause(
            id="gradients_not_averaged",
            what=f"{whose} averaged over the ranks before the step ({between.name} has a norm of {norms})",
            cure="call the model through DistributedDataParallel, not through .module, and leave no_sync only for "
            "backwards before the last"
            if self._is_wrapped()
            else "wrap the model in DistributedDataParallel, or average every gradient with all_reduce before the step",
            line=steps[0].loss_lines[-1] if steps[0].loss_lines else steps[0].line,
            step=number + 1,
        )

    def _is_wrapped(self) -> bool:
        return any("DataParallel" in name for name in self._ranks[0].wrappers)

    def _parted(self, number: int, steps: Sequence[Step], apart: _Difference) -> Cause:
        return Cause(
            id="weights_part",
            what=f"the weights of the ranks differ after the step ({apart.name} by {apart.value:.2g} of its size), "
            "although their gradients do not",
            cure="let all ranks begin with the weights of rank 0 and step alike",
            line=steps[0].line,
            step=number + 1,
        )

    def _parted_later(self) -> Cause | None:
        """Return a cause if rates or weights of the ranks part in a step that is followed, but not compared."""
        first, line = self._ranks[0], self._ranks[0].steps[-1].line if self._ranks[0].steps else ""
        for rank, other in enumerate(self._ranks[1:], start=1):
            for number, (rates, others) in enumerate(zip(first.rates, other.rates, strict=False), start=1):
                if _rates_differ(rates, others):
                    return Cause(
                        id="rates_part",
                        what=f"the learning rate is {_few(rates)} on rank 0 and {_few(others)} on rank {rank}",
                        cure="let all ranks step the schedule alike, by what all have: average a loss over the ranks "
                        "before ReduceLROnPlateau gets it",
                        line=line,
                        step=number,
                    )
                one, two = first.weight_sums[number - 1], other.weight_sums[number - 1]
                if not math.isclose(one, two, rel_tol=100 * self._tolerance, abs_tol=100 * self._tolerance):
                    return Cause(
                        id="weights_part",
                        what=f"the weights of rank 0 and rank {rank} differ after the step (their sums are {one:.8g} "
                        f"and {two:.8g})",
                        cure="look for code that changes weights or takes steps on some ranks only",
                        line=line,
                        step=number,
                    )
        return None

    def _of_norms(self, number: int, name: str) -> Cause:
        norms = self._ranks[0].norms
        module = name.rpartition(".")[0]
        if module in norms:
            return Cause(
                id="batchnorm_statistics",
                what=f"{module} normalises by the samples of one rank, not by those of all",
                cure="convert the model with torch.nn.SyncBatchNorm.convert_sync_batchnorm before it is wrapped",
                step=number + 1,
            )
        return Cause(
            id="other_buffers",
            what=f"the buffer {name} has other values on several ranks than on one",
            cure="compute it from what all ranks have, or accept that it is of one rank's samples",
            step=number + 1,
        )

    def _other_gradients(
        self, number: int, steps: Sequence[Step], alone: Step, gradients: _Difference, sizes: Sequence[int]
    ) -> Cause:
        line = steps[0].loss_lines[-1] if steps[0].loss_lines else steps[0].line
        count, here = len(steps), number + 1
        only = sorted(set(steps[0].gradients) ^ set(alone.gradients))
        if only:
            where = "several ranks" if only[0] in steps[0].gradients else "one rank"
            return Cause(
                id="other_parameters",
                what=f"{_named(only)} has a gradient on {where} only",
                cure="let the same parameters take part, whatever the number of ranks",
                line=line,
                step=here,
            )
        ratio = _common_factor(steps[0].gradients, alone.gradients)
        if ratio is not None and not math.isclose(ratio, 1.0, rel_tol=_PROPORTIONAL):
            if math.isclose(ratio, count, rel_tol=1e-2):
                what, cure = "the gradients are summed over the ranks, not averaged", "divide by the number of ranks"
            elif math.isclose(ratio, 1 / count, rel_tol=1e-2):
                what = f"the gradients are divided by the number of ranks twice ({ratio:.4g} of those of one process)"
                cure = "leave one division out: DistributedDataParallel averages already"
            else:
                what = f"the gradients are {ratio:.4g} times those of one process"
                cure = "divide the loss by what all ranks have together, such as all accumulated samples"
            return Cause(id="gradients_scaled", what=f"{what}", cure=cure, line=line, step=here)
        norms = self._ranks[0].norms
        if norms:
            return Cause(
                id="batchnorm_statistics",
                what=f"{norms[0]} normalises by the samples of one rank, not by those of all: "
                f"{gradients.name} has another gradient (by {gradients.value:.2g} of its size)",
                cure="convert the model with torch.nn.SyncBatchNorm.convert_sync_batchnorm before it is wrapped",
                line=line,
                step=here,
            )
        if len(set(sizes)) > 1:
            return Cause(
                id="mean_of_means",
                what=f"ranks with {', '.join(map(str, sizes))} samples have the same weight in the step, so a sample's "
                "weight depends on its rank",
                cure="multiply each rank's loss by its samples and the number of ranks, and divide by all samples",
                line=line,
                step=here,
            )
        if any(recording.has_drawn for recording in self._ranks):
            return Cause(
                id="other_draws",
                what="random numbers are drawn between the batch and the loss, other ones on each rank",
                cure="this is a reason and no fault, but what else differs is not seen behind it: leave the draws out, "
                "or draw them from the samples' numbers, and prove again",
                line=line,
                step=here,
                is_fault=False,
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


def _has_halves(ranks: Sequence[Recording]) -> bool:
    """Return whether weights are in half precision."""
    first = ranks[0].steps[:1]
    return any(weight.dtype in (torch.float16, torch.bfloat16) for step in first for weight in step.weights.values())


def _largest_between(of_ranks: Sequence[Mapping[str, Tensor]]) -> _Difference:
    """Return the largest difference of any rank from the first."""
    return _largest([(of_ranks[0], other) for other in of_ranks[1:]]) if of_ranks else _Difference(0.0, "")


def _largest(pairs: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]) -> _Difference:
    largest = _Difference(0.0, "")
    for one, other in pairs:
        scale = max((float(t.double().abs().max()) for t in one.values() if t.numel()), default=1.0) or 1.0
        for name, tensor in one.items():
            if name in other:
                value = _relative(tensor, other[name], 1e-3 * scale)
                if value > largest.value:
                    largest = _Difference(value, name)
    return largest


def _relative(one: Tensor, other: Tensor, least: float) -> float:
    """Return the norm of a difference relative to the larger tensor's, or to a small part of the largest of all."""
    if one.shape != other.shape:
        return math.inf
    if not one.numel():
        return 0.0
    one, other = one.double(), other.double()
    are_nan = one.isnan() & other.isnan()
    difference = float(torch.where(are_nan, 0.0, one - other).norm())
    size = max(float(one.norm()), float(other.norm()), least * math.sqrt(one.numel()), 1e-300)
    return difference / size if math.isfinite(difference) else math.inf


def _common_factor(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float | None:
    """Return the number by which all gradients of one are those of the other; None if there is none."""
    flat = torch.cat([one[name].double().flatten() for name in one])
    others = torch.cat([other[name].double().flatten() for name in one])
    square = float(others @ others)
    if not square:
        return None
    factor = float(flat @ others) / square
    rest = float((flat - factor * others).norm())
    return factor if rest <= _PROPORTIONAL * float(flat.norm()) else None


def _rates_differ(rates: Sequence[float], others: Sequence[float]) -> bool:
    return len(rates) != len(others) or any(
        not math.isclose(rate, other, rel_tol=1e-6) for rate, other in zip(rates, others, strict=False)
    )


def _few(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.6g}" for number in numbers[:3]) + (", …" if len(numbers) > 3 else "")


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"
