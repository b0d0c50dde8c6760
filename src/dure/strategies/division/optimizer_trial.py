"""Trials of optimisers: does one with a part of its parameters step each as it would with all of them?

Torch's own optimisers get one small trial. Others may behave differently from some size, step or number of parameters
on, and are tried further: for more steps, with all parameters, and with large ones. All trials are bounded by counts
and never by time, because all ranks must come to the same result.
"""

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from dure.data.randomness import kept_global_randomness
from dure.strategies.division import stand_ins
from dure.strategies.division.late_steps import STEPS_BEFORE, STEPS_EACH, landmarks_of
from dure.strategies.division.stand_ins import StandIn
from dure.strategies.division.step_hooks import fault_of_hooks
from dure.strategies.division.step_trial import NEEDS_CLOSURE, STEPS_PER_FACTOR, StepTrial, TriedOptimizer
from dure.torchcompat.optimizers import is_of_torch

_NUM_STEPS = 12
"""Steps of a small trial: some optimisers react to all parameters together only after a few steps."""
_NUM_LONG_STEPS = 128
_NUM_WIDE_STEPS = 4
_NUM_LARGE_STEPS = 3
_ODD_FACTORS = (1e6, 0.0)
"""Factors on the second half of a gradient: some optimisers leave out a tensor whose gradient is zero, or has an
element above a bound.
"""


def reason_not_to_divide(optimizer: Optimizer) -> str | None:
    """Return the reason why an optimiser needs all parameters together, or None if parts of it can step separately.

    Small stand-ins for a few parameters of each group are stepped together and in two parts, and the results must be
    bitwise equal. An optimiser that is not torch's own is also tried for more steps, and with all parameters. The
    optimiser is restored.

    Args:
        optimizer: Optimiser as the task built it; its parameters may be on the meta device.
    """
    return _try(optimizer, _reason_of_parts)


def faults_of_parts(optimizer: Optimizer, cannot: str) -> list[str]:
    """Return the reasons why ranks cannot step parts of a model separately, one sentence each.

    Args:
        optimizer: Optimiser as the task built it; its parameters may be on the meta device.
        cannot: Clause about an optimiser that needs all parameters together, such as `cannot step each section by
            itself`.
    """
    if fault := fault_of_hooks(optimizer):
        return [fault]
    reason = _reason_of_keys(optimizer) or reason_not_to_divide(optimizer)
    if reason is None:
        return []
    return [
        f"the optimiser {type(optimizer).__name__} {cannot}, because {reason}: use one that steps each parameter by "
        "itself, such as AdamW or SGD, or --strategy ddp"
    ]


def _reason_of_keys(optimizer: Optimizer) -> str | None:
    """Return the reason why an optimiser with state outside `state`, keyed by parameter, needs all of them, or None."""
    for name, value in vars(optimizer).items():
        if name != "state" and isinstance(value, Mapping) and any(isinstance(key, Tensor) for key in value):
            return f"it keeps values of all parameters in an attribute ({name}) and not in its state"
    return None


def reason_not_to_cut(optimizer: Optimizer) -> str | None:
    """Return the reason why an optimiser needs whole parameters, or None if parts of each can step separately.

    The stand-ins are stepped whole, and cut in two along a dimension, each half separately. An optimiser that is not
    torch's own is also tried with large ones, and its operations on parameters of the true shapes are compared with
    those on small ones.

    Args:
        optimizer: Optimiser as the task built it; its parameters may be on the meta device.
    """
    return _try(optimizer, _reason_of_halves)


def reason_of_classes(optimizer: Optimizer) -> str | None:
    """Return the reason why an optimiser needs the model's own parameter objects, or None if plain parameters suffice.

    Args:
        optimizer: Optimiser as the task built it; its parameters may be on the meta device.
    """
    return _try(optimizer, _reason_of_classes)


def _reason_of_parts(trials: "_Trials") -> str | None:
    reason = trials.small().reason()
    if reason is None and not is_of_torch(trials.subject.optimizer):
        for create in (trials.long, trials.wide, trials.odd, trials.gaps, trials.late):
            if (trial := create()) is not None and (reason := trial.reason_of_parts()) is not None:
                return reason
        few = trials.few()
        reason = few.reason_of_containers() or few.reason_of_settings()
    return reason


def _reason_of_halves(trials: "_Trials") -> str | None:
    small = trials.small()
    reason = small.reason() or small.reason_of_halves()
    if reason is None and any(each.is_floating_point() and each.dtype.itemsize < 4 for each in small.parameters):
        # in which a few roundings are as large as a step
        reason = trials.small_in_float32().reason_of_halves()
    if reason is not None or is_of_torch(trials.subject.optimizer):
        return reason
    long, wide, odd, late, gaps = trials.long(), trials.wide(), trials.odd(), trials.late(), trials.gaps()
    return (
        long.reason_of_parts()
        or wide.reason_of_parts()
        or wide.reason_of_classes()
        or wide.reason_of_attributes()
        or trials.few().reason_of_containers()
        or long.reason_of_halves()
        or wide.reason_of_halves()
        or odd.reason_of_parts()
        or odd.reason_of_halves()
        or (gaps.reason_of_parts() if gaps is not None else None)
        or trials.large().reason_of_halves()
        or _reason_of_shapes(trials)
        or (late.reason_of_parts() or late.reason_of_halves() if late is not None else None)
    )


def _reason_of_shapes(trials: "_Trials") -> str | None:
    """Return the reason to assume that an optimiser treats large parameters differently, or None.

    Its operations on parameters without values, of the true shapes and of small ones, are compared. None also if it
    needs values, so that nothing can be concluded.
    """
    true, small = (trials.without_values(chosen).traced() for chosen in stand_ins.of_true_shapes(trials.trained))
    if true is None or small is None or true == small:
        return None
    return "it does something else to large parameters than to small ones"


def _reason_of_classes(trials: "_Trials") -> str | None:
    if is_of_torch(trials.subject.optimizer) or trials.small().reason() is not None:
        return None
    wide = trials.wide()
    return wide.reason_of_classes() or wide.reason_of_attributes()


def _try(optimizer: Optimizer, find_reason: "Callable[[_Trials], str | None]") -> str | None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return NEEDS_CLOSURE
    subject = TriedOptimizer(optimizer)
    try:
        with kept_global_randomness(*subject.devices), torch.enable_grad():
            return find_reason(_Trials(subject))
    finally:
        subject.put_back_attributes()


class _Trials:
    """Trials of one optimiser, each created when it is asked for."""

    def __init__(self, subject: TriedOptimizer) -> None:
        self.subject = subject
        self.trained = subject.trained

    @property
    def _share(self) -> float:
        """Fraction of the elements of usual trials: operations on sparse gradients take far longer."""
        return 1 / 64 if self.subject.is_sparse else 1.0

    def small(self) -> StepTrial:
        """Return a trial of the first parameters of each group, which is conclusive for an optimiser of torch's own."""
        return StepTrial(self.subject, stand_ins.small(self.trained), _NUM_STEPS, is_first=True)

    def small_in_float32(self) -> StepTrial:
        """Return a small trial whose stand-ins are parameters in float32."""
        return StepTrial(self.subject, stand_ins.small(self.trained), _NUM_STEPS, dtype=torch.float32)

    def few(self) -> StepTrial:
        """Return a trial of few steps of a few parameters."""
        return StepTrial(self.subject, stand_ins.few(self.trained), _NUM_WIDE_STEPS)

    def long(self) -> StepTrial:
        """Return a trial of more steps, for effects that begin after a warm-up."""
        return StepTrial(self.subject, stand_ins.few(self.trained), _NUM_LONG_STEPS)

    def late(self) -> StepTrial | None:
        """Return a trial of steps that come much later, or None if nothing points to any or they cannot be taken."""
        landmarks = landmarks_of(self.subject.optimizer, _NUM_LONG_STEPS)
        trial = StepTrial(
            self.subject, stand_ins.few(self.trained), STEPS_BEFORE + STEPS_EACH * len(landmarks), landmarks=landmarks
        )
        return trial if landmarks and trial.is_possible() else None

    def wide(self) -> StepTrial:
        """Return a trial of all parameters, for effects that depend on a parameter's position, size or content."""
        return StepTrial(self.subject, stand_ins.wide(self.trained, self._share), _NUM_WIDE_STEPS)

    def odd(self) -> StepTrial:
        """Return a trial of gradients of which a half is huge, or zero, for effects that such an element has."""
        is_half = any(parameter.dtype.itemsize < 4 for group in self.trained for parameter in group)
        num_steps = STEPS_PER_FACTOR * (1 + len(_ODD_FACTORS))
        dtype = torch.float32 if is_half else None
        return StepTrial(self.subject, stand_ins.few(self.trained), num_steps, dtype=dtype, factors=_ODD_FACTORS)

    def gaps(self) -> StepTrial | None:
        """Return a trial in which some parameters get no gradient in some steps, or None if that is not possible."""
        trial = StepTrial(self.subject, stand_ins.few(self.trained), 2 * STEPS_PER_FACTOR, factors=(None,))
        return trial if trial.is_possible() else None

    def large(self) -> StepTrial:
        """Return a trial of large parameters, for effects that begin at a size."""
        return StepTrial(self.subject, stand_ins.large(self.trained, self._share), _NUM_LARGE_STEPS)

    def without_values(self, chosen: list[StandIn]) -> StepTrial:
        """Return a trial on the meta device."""
        return StepTrial(self.subject, chosen, _NUM_LARGE_STEPS, has_values=False)
