"""Traits of a task's loss that decide whether dividing a batch changes the result."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """Observations made by calling the loss on a few samples before training. JSON values only."""

    reason_unknown: str | None = None
    """Reason why nothing was observed; None if something was."""
    unknown_phase: str | None = None
    """Reason why nothing was observed with a state that the schedule sets later; None if something was."""
    phases: tuple[int, ...] = ()
    """Numbers of samples seen at which the schedule sets states in which the loss behaves in other ways."""
    has_failed: bool = False
    """True if that reason is that the loss failed at once."""
    needs_optimizer: bool = False
    """True if it failed until the task had built an optimiser."""
    draws: bool = False
    """True if it draws random numbers, dropout included."""
    collate_draws: bool = False
    """True if `collate` does."""
    data_changes: bool = False
    """True if samples that were read twice differed."""
    not_additive: str | None = None
    """Figures that show that the loss is not a mean, or a sum with its count, over samples; None if it is."""
    learned_buffers: tuple[str, ...] = ()
    """Buffers that forward changes by what is in the samples, BatchNorm's left out."""
    counted_buffers: tuple[str, ...] = ()
    """Buffers that forward changes by every call alike."""
    changed_parameters: tuple[str, ...] = ()
    """Parameters that the loss writes to."""
    rebound_parameters: tuple[str, ...] = ()
    """Parameters among `changed_parameters` that it gives other memory (`p.data = ...`)."""
    writes_in_evaluation: tuple[str, ...] = ()
    """Parameters that the loss or the metrics write to in an evaluation."""
    is_evaluable: bool = False
    """True if loss and metrics take training samples in an evaluation, too."""
    learned_writes: tuple[str, ...] = ()
    """Parameters among `changed_parameters` whose new values depend on what is in the samples."""
    repeated_writes: tuple[str, ...] = ()
    """Parameters among `changed_parameters` that every further call changes again."""
    learned_state: tuple[str, ...] = ()
    """Plain state of the task, the model or the optimiser that the loss changes by what is in the samples."""
    counted_state: tuple[str, ...] = ()
    """Plain state that every call changes alike."""
    copied_state: tuple[str, ...] = ()
    """Plain state of the training data that the loss changes, of which each loader process has a copy."""
    forward_state: tuple[str, ...] = ()
    """Plain state outside the model that its forward, or a hook on its modules, changes."""
    fed_state: tuple[str, ...] = ()
    """Tensors that the task keeps from one call of the loss to a later one, which hands them to the model."""
    left_state: tuple[str, ...] = ()
    """Plain state that the calls changed and that could not be put back."""
    outer_state: tuple[str, ...] = ()
    """Files and environment variables that the loss writes, and cached functions whose values depend on the samples of
    the first call: no checkpoint has them."""
    hooked_parameters: tuple[str, ...] = ()
    """Parameters, and modules, with hooks that see gradients."""
    hooked_by_loss: tuple[str, ...] = ()
    """Parameters and modules among these on which the loss itself registers such hooks."""
    fails_alone: str | None = None
    """The exception that the loss raises for one sample, where it takes more; None if it takes one."""
    nonlinear_gradients: bool = False
    """True if gradients do not scale with the loss: a hook on the output, or a backward of its own, clips or rounds."""
    sets_gradients: bool = False
    """True if parameters have gradients when the loss returns: by a backward pass of its own, say."""
    module_state: tuple[str, ...] = ()
    """Plain state of the model's modules that the loss changes outside of the model's own calls."""
    uses_gradients: bool = False
    """True if it is another loss where parameters have gradients already, as from earlier parts of a batch, or if it
    changes these."""
    differs_by_rank: str | None = None
    """Figures that show that the loss of the same samples is another one on another rank; None if it is not."""
    differs_by_world: str | None = None
    """Figures that show that the loss, or the optimiser, is another one where the process is alone; None if not."""
    reduced_in_step: str | None = None
    """Name of a reduction over ranks that the optimiser's step, or a hook on it, called itself; None if none did."""
    collective: str | None = None
    """Name of a collective operation of torch.distributed that the loss or the metrics call; None if none was seen."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "LossTraits":
        """Return the traits that `dataclasses.asdict` gave, after their way through JSON."""
        found: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in values.items()}
        return cls(**found)

    def joined(self, others: "LossTraits", when: str) -> "LossTraits":
        """Return these traits together with those that the loss has in another state of the task.

        Args:
            others: Traits in that state.
            when: Description of that state, for what is said about it.
        """
        if others.reason_unknown is not None:
            others = replace(others, reason_unknown=None, unknown_phase=f"{others.reason_unknown} ({when})")
        if others.not_additive is not None:
            others = replace(others, not_additive=f"{others.not_additive} ({when})")
        found: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            own, other = getattr(self, name), getattr(others, name)
            found[name] = tuple(dict.fromkeys((*own, *other))) if isinstance(own, tuple) else own or other
        for learned, counted in (("learned_buffers", "counted_buffers"), ("learned_state", "counted_state")):
            found[counted] = tuple(name for name in found[counted] if name not in found[learned])
        # these describe the loss as it was first called
        return replace(self, **{name: value for name, value in found.items() if name not in _OF_FIRST_CALL})


_OF_FIRST_CALL = ("reason_unknown", "has_failed", "needs_optimizer", "is_evaluable")

NOTHING_SEEN = LossTraits()
