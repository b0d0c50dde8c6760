"""Comparison of the observed ranks with one process, and the causes of a difference."""

from collections.abc import Sequence

import torch

from dure.scripts.prove.certificate import DIFFERS, EQUAL, UNPROVEN, Cause, Certificate, ComparedStep
from dure.scripts.prove.differences import Difference, largest, largest_between
from dure.scripts.prove.explaining import Compared, cause_of, of_metrics, of_other_start
from dure.scripts.prove.recording import Recording, Step
from dure.scripts.prove.samples import causes_in_samples, notes_on_samples

TOLERANCES = {"float64": 1e-9, "float32": 2e-4, "half": 5e-2}
"""Relative differences of gradients and weights that are rounding. Sums of float32 in another order differ by some
1e-6 of the largest summand; an optimiser that divides by the gradient's size makes of it what is seen in the first
steps of Adam, up to 1e-4."""
_PARTLY_FLOAT32 = 1e-6
"""Relative difference up to which float64 gradients count as computed in float32 in between."""
_LATER_TOLERANCE = 1e-5
"""Relative difference that is rounding in later steps, where that of many steps has grown."""
_MOST_GROWTH = 1e6
"""Factor by which rounding may grow in a later step; LBFGS, which stops its search by it, lets it grow by 1e5."""
_MOST_GROWN = 1e-3
"""Difference up to which rounding may have grown; later steps are not compared with one process then."""
_MET_AGAIN = ("gradients_not_averaged", "gradients_scaled_by_rank", "weights_part")
"""Causes that are none if the weights are averaged after the step."""


def judge(
    certificate: Certificate, ranks: Sequence[Recording], one: Recording | None, *, has_samples: bool = True
) -> Certificate:
    """Complete a certificate by what the ranks and one process have recorded.

    Args:
        certificate: Certificate without steps and causes.
        ranks: Recordings of all ranks.
        one: Recording of one process that was given the ranks' samples; None if there is none.
        has_samples: True if it is looked which samples the ranks were given.
    """
    certificate.tolerance = TOLERANCES[certificate.precision]
    if _has_halves(ranks):
        certificate.tolerance = TOLERANCES["half"]
        certificate.notes.append(
            f"the weights are in half precision, so differences up to {certificate.tolerance:.0%} count as rounding: "
            "smaller faults are not seen"
        )
    certificate.num_followed_steps = min(recording.num_steps for recording in ranks)
    of_samples: list[Cause] = []
    if has_samples:
        certificate.notes += dict.fromkeys(notes_on_samples(ranks, one))
        for cause in causes_in_samples(ranks, one):
            if all((cause.id, cause.line) != (known.id, known.line) for known in of_samples):
                of_samples.append(cause)  # and not again for each loader that is made there
    idle = [rank for rank, recording in enumerate(ranks) if _leaves_steps_to_others(recording)]
    if idle and len(idle) < len(ranks):
        certificate.notes.append(
            f"rank {idle[0]} computes gradients and takes no step: whether it gets the weights of others is not seen"
        )
        ranks = [recording for recording in ranks if recording.steps]
        certificate.num_followed_steps = min(recording.num_steps for recording in ranks)
    judgement = _Judgement(certificate, ranks, one)
    causes = judgement.causes()
    if causes and judgement.is_small(_PARTLY_FLOAT32):
        certificate.tolerance = 10 * _PARTLY_FLOAT32
        certificate.notes.append("some of it is computed in float32 whatever the precision, so the tolerance is larger")
        judgement = _Judgement(certificate, ranks, one)
        causes = judgement.causes()
    causes = of_samples + causes
    certificate.steps, certificate.num_sketched_steps = judgement.compared, judgement.num_sketched
    if judgement.grown >= _MOST_GROWN:
        certificate.notes.append("rounding grows with each step of this script, so later steps could not be compared")
    if judgement.has_averaged_weights:
        certificate.notes.append(
            "gradients are not averaged, but weights are after each step; in the compared steps, the result is the same"
        )
    certificate.causes = causes
    if causes:
        certificate.verdict = DIFFERS
    elif one is None or idle or not judgement.compared:
        certificate.verdict = UNPROVEN
    else:
        certificate.verdict = EQUAL
    return certificate


class _Judgement:
    def __init__(self, certificate: Certificate, ranks: Sequence[Recording], one: Recording | None) -> None:
        self._tolerance = certificate.tolerance
        self._later_tolerance = max(_LATER_TOLERANCE, 10 * self._tolerance)
        self._is_float64 = certificate.precision == "float64"
        self._ranks, self._one = ranks, one
        self.compared: list[ComparedStep] = []
        self.grown = 0.0
        """Largest difference from one process so far."""
        self.num_sketched = 0
        """Further steps that were compared by sketches."""
        self.has_averaged_weights = False
        """True if ranks part in a step, and have the weights of one process when the next begins."""

    def causes(self) -> list[Cause]:
        """Return the first difference with its cause, or nothing."""
        started = largest_between([recording.initial for recording in self._ranks])
        has_other_start = started.value > self._tolerance
        num_steps = [len(recording.steps) for recording in self._ranks]
        others = self._of_numbers_of_steps(num_steps)
        for number in range(min(num_steps)):
            cause = self._of_step(number, has_other_start=has_other_start)
            if cause is not None:
                return [cause]
        if others is not None:
            return [others]
        if (metrics := of_metrics(self._ranks)) is not None:
            return [metrics]
        one = self._one
        if one is not None and len(one.steps) < min(num_steps) and one.end == "script":
            return [
                Cause(
                    id="fewer_steps_on_one_rank",
                    what=f"one process takes {len(one.steps)} steps where the ranks take {min(num_steps)}",
                    cure="let the number of steps follow from the samples, not from the number of ranks",
                    line=one.steps[-1].line if one.steps else "",
                )
            ]
        if has_other_start and not self.compared:
            return [of_other_start(self._ranks, "")]
        return []

    def _of_numbers_of_steps(self, num_steps: Sequence[int]) -> Cause | None:
        """Return a cause if the script was over on a rank, and took more steps on another."""
        most = max(num_steps)
        over = [rank for rank, recording in enumerate(self._ranks) if recording.end == "script"]
        fewer = [rank for rank in over if num_steps[rank] < most]
        is_left_alone = bool(over) and any(recording.end == "failed" for recording in self._ranks)
        if not fewer and not is_left_alone:
            return None
        rank = (fewer or over)[0]
        recording = self._ranks[rank]
        what = f"the ranks take {', '.join(map(str, num_steps))} steps"
        if is_left_alone:
            what = (
                f"rank {rank} ends after {num_steps[rank]} steps, while another waits for it in a call that needs all"
            )
        return Cause(
            id="other_numbers_of_steps",
            what=what,
            cure="give all ranks as many batches (drop_last=True, or DistributedSampler, which fills up), and let all "
            "stop by what all know: all_reduce the metric, or broadcast the decision",
            line=recording.steps[-1].line if recording.steps else "",
            step=num_steps[rank] + 1,
        )

    def is_small(self, limit: float) -> bool:
        """Return whether gradients differ by more than the tolerance, and by less than a limit."""
        found = [max(step.gradients, step.gradients_between_ranks) for step in self.compared]
        return bool(found) and self._tolerance < max(found) < limit

    def _of_step(self, number: int, *, has_other_start: bool) -> Cause | None:
        steps = [recording.steps[number] for recording in self._ranks]
        one = self._one
        alone = one.steps[number] if one is not None and number < len(one.steps) else None
        is_sketch = steps[0].is_sketch
        gradients = weights = buffers = Difference()
        if alone is not None and (not is_sketch or (self._is_float64 and self.grown < _MOST_GROWN)):
            moved = {name: each for name, each in steps[0].weights.items() if self._has_size(steps[0], name)}
            gradients = largest([(steps[0].gradients, alone.gradients)])
            weights, buffers = largest([(moved, alone.weights)]), largest([(steps[0].buffers, alone.buffers)])
        found = Compared(
            number=number,
            ranks=self._ranks,
            steps=steps,
            alone=alone,
            tolerance=self._later_tolerance if is_sketch else self._tolerance,
            tolerance_of_one=max(self._later_tolerance, _MOST_GROWTH * self.grown) if is_sketch else self._tolerance,
            has_other_start=has_other_start,
            between=largest_between([step.gradients for step in steps]),
            apart=largest_between([step.weights for step in steps]),
            gradients=gradients,
            weights=weights,
            buffers=buffers,
        )
        cause = cause_of(found)
        if cause is not None and cause.id in _MET_AGAIN and self._meet_again(number):
            self.has_averaged_weights, cause = True, None
        elif cause is None:
            self.grown = max(self.grown, gradients.value, weights.value)
        if cause is not None or not is_sketch:
            self.compared.append(_described(found))
        elif alone is not None and self._is_float64 and self.grown < _MOST_GROWN:
            self.num_sketched += 1
        return cause

    def _meet_again(self, number: int) -> bool:
        """Return whether ranks that part in a step have the weights of one process when the next step begins."""
        one, following = self._one, number + 1
        if one is None:
            return False
        if any(following >= len(each.steps) for each in (*self._ranks, one)):
            return self.has_averaged_weights  # the last one
        starts, alone = [each.steps[following].starts for each in self._ranks], one.steps[following].starts
        if not alone or any(set(each) != set(alone) for each in starts):
            return False
        return largest([(alone, each) for each in starts]).value <= self._later_tolerance

    def _has_size(self, step: Step, name: str) -> bool:
        """Return whether a weight's gradient is more than rounding, which Adam divides by its own size."""
        if self._is_float64 or name not in step.gradients:
            return True
        greatest = max(float(gradient.double().norm()) for gradient in step.gradients.values())
        return float(step.gradients[name].double().norm()) > 1e-5 * greatest


def _leaves_steps_to_others(recording: Recording) -> bool:
    return not recording.steps and any(fetch.is_trained for fetch in recording.fetches)


def _described(found: Compared) -> ComparedStep:
    steps, alone, sizes = found.steps, found.alone, found.sizes
    losses = [step.losses[-1] for step in steps if step.losses]
    return ComparedStep(
        step=found.number + 1,
        optimizer=steps[0].optimizer,
        num_samples=sum(sizes) if all(sizes) else None,
        gradients_between_ranks=found.between.value,
        gradients=found.gradients.value,
        weights=found.weights.value,
        buffers=found.buffers.value,
        loss=sum(losses) / len(losses) if len(losses) == len(steps) else None,
        loss_of_one=alone.losses[-1] if alone and alone.losses else None,
        rates=steps[0].rates,
        rates_of_one=alone.rates if alone else [],
        is_sketch=steps[0].is_sketch,
    )


def _has_halves(ranks: Sequence[Recording]) -> bool:
    """Return whether weights are in half precision."""
    first = ranks[0].steps[:1]
    return any(weight.dtype in (torch.float16, torch.bfloat16) for step in first for weight in step.weights.values())
