"""Traits of a task's loss that decide whether dividing a batch changes the result."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """Findings from calls of the loss on a few samples before training. JSON values only."""

    reason_unknown: str | None = None
    """Reason why nothing was observed; None if something was."""
    unknown_phase: str | None = None
    """Reason why nothing was observed in a state that the schedule sets later; None if something was."""
    phases: tuple[int, ...] = ()
    """Positions, in samples, at which the schedule sets states in which the loss behaves differently."""
    regrouped: str | None = None
    """Change that the schedule makes to the parameters of the optimiser's groups; None if it makes none."""
    unfrozen_later: tuple[str, ...] = ()
    """Parameters that the schedule unfreezes during the run."""
    has_failed: bool = False
    """True if `reason_unknown` is that the loss failed at once."""
    needs_optimizer: bool = False
    """True if it failed until the task had built an optimiser."""
    draws: bool = False
    """True if the loss draws random numbers, dropout included."""
    model_draws: bool = False
    """True if the model draws random numbers in its own calls, dropout included."""
    has_dropout: bool = True
    """True unless every dropout layer of the model is in evaluation mode while it is trained."""
    autocasts: bool = False
    """True if loss or model compute in lower precision than their own (autocast)."""
    loss_rounding: float = 0.0
    """Relative rounding of the loss if its dtype is less precise than the model's numbers; 0 if it is not."""
    collate_draws: bool = False
    """True if `collate` draws random numbers."""
    collate_state: tuple[str, ...] = ()
    """Plain state that `collate` changes depending on the samples, and on which later batches depend."""
    collate_count: tuple[str, ...] = ()
    """Plain state that every call of `collate` changes in the same way, and on which later batches depend."""
    collate_tables: tuple[str, ...] = ()
    """Plain state that `collate` changes and on which no later batch depends, such as masks by the size of a batch."""
    left_by_collate: tuple[str, ...] = ()
    """Iterators that reads before training have moved, if `collate` keeps state."""
    collates_in_loaders: bool = False
    """True if loader processes call `collate`, each with a copy of its state."""
    data_changes: bool = False
    """True if samples differed when they were read twice."""
    not_additive: str | None = None
    """Figures that show that the loss is neither a mean over samples, nor a sum with its count; None if it is."""
    model_not_additive: bool = False
    """True if, in addition, the model's outputs for a sample depend on the other samples."""
    learned_buffers: tuple[str, ...] = ()
    """Buffers, except those of BatchNorm, that forward changes depending on the samples."""
    learns_statistics: bool = True
    """True unless every BatchNorm stayed as it was in all calls, because it is frozen or not used."""
    counted_buffers: tuple[str, ...] = ()
    """Buffers that forward changes in the same way at every call."""
    model_buffers: tuple[str, ...] = ()
    """Buffers that the model changes in its own calls."""
    changed_parameters: tuple[str, ...] = ()
    """Parameters that the loss writes to."""
    rebound_parameters: tuple[str, ...] = ()
    """Parameters among `changed_parameters` to which it assigns other memory (`p.data = ...`)."""
    writes_in_evaluation: tuple[str, ...] = ()
    """Parameters that the loss or the metrics write to in an evaluation."""
    is_evaluable: bool = False
    """True if loss and metrics also accept training samples in an evaluation."""
    learned_writes: tuple[str, ...] = ()
    """Parameters among `changed_parameters` whose new values depend on the samples."""
    repeated_writes: tuple[str, ...] = ()
    """Parameters among `changed_parameters` that every further call changes again."""
    learned_state: tuple[str, ...] = ()
    """Plain state of the task, the model or the optimiser that the loss changes depending on the samples."""
    counted_state: tuple[str, ...] = ()
    """Plain state that every call changes in the same way."""
    cached_state: tuple[str, ...] = ()
    """Plain state among `counted_state` that only the first call changes, and that changes neither loss nor gradients:
    masks and tables that forward makes when it first needs them.
    """
    copied_state: tuple[str, ...] = ()
    """Plain state of the training data that the loss changes; each loader process has a copy of it."""
    forward_state: tuple[str, ...] = ()
    """Plain state outside the model that is changed by its forward or by a hook on its modules."""
    fed_state: tuple[str, ...] = ()
    """Tensors that the task keeps from one call of the loss and passes to the model in a later one."""
    varying_modules: tuple[str, ...] = ()
    """Modules of the model that some calls of the loss use more often than others, by chance or depending on data."""
    stepped_state: tuple[str, ...] = ()
    """State that the loss changes and that the optimiser holds, so that its step may use it."""
    left_state: tuple[str, ...] = ()
    """Plain state that the calls changed and that could not be put back."""
    outer_state: tuple[str, ...] = ()
    """Files and environment variables that the loss writes, and cached functions whose values depend on the samples of
    the first call. They are in no checkpoint.
    """
    hooked_parameters: tuple[str, ...] = ()
    """Parameters and modules with hooks that receive gradients."""
    hooked_by_loss: tuple[str, ...] = ()
    """Parameters and modules among `hooked_parameters` on which the loss itself registers the hooks."""
    fails_alone: str | None = None
    """Exception that the loss raises for one sample although it accepts more, or its value that is not finite; None if
    it accepts one.
    """
    model_fails_alone: bool = False
    """True if the model itself raises that exception."""
    sparse_gradients: tuple[str, ...] = ()
    """Parameters that get sparse gradients."""
    dense_gradients: tuple[str, ...] = ()
    """Parameters of layers with `sparse=True` that get dense gradients nevertheless, from other uses of them."""
    nonlinear_gradients: bool = False
    """True if gradients do not scale with the loss: a hook on the output or a custom backward clips or rounds them."""
    sets_gradients: bool = False
    """True if parameters have gradients when the loss returns, for example from a backward pass of its own."""
    module_state: tuple[str, ...] = ()
    """Plain state of the model's modules that the loss changes outside the model's own calls."""
    uses_gradients: bool = False
    """True if the loss changes existing gradients, such as those of earlier parts of a batch, or has another value if
    there are any.
    """
    differs_by_rank: str | None = None
    """Figures that show that the loss of the same samples differs between ranks; None if it does not."""
    differs_by_world: str | None = None
    """Figures that show that the loss, or the optimiser, differs if the process is alone; None if not."""
    reduced_in_step: str | None = None
    """Name of a reduction over ranks called by the optimiser's step or a hook on it; None if there was none."""
    collective: str | None = None
    """Name of a torch.distributed collective that the loss or the metrics call; None if none was seen."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "LossTraits":
        """Return the traits from the result of `dataclasses.asdict`, after a JSON round trip."""
        found: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in values.items()}
        return cls(**found)

    def joined(self, others: "LossTraits", when: str) -> "LossTraits":
        """Return these traits merged with those of the loss in another state of the task.

        Args:
            others: Traits in that state.
            when: Description of that state, for messages.
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
        changing = {name for each in (self, others) for name in each.counted_state if name not in each.cached_state}
        found["cached_state"] = tuple(
            name for name in found["cached_state"] if name in found["counted_state"] and name not in changing
        )
        # these describe the loss as it was first called
        return replace(self, **{name: value for name, value in found.items() if name not in _OF_FIRST_CALL})

    @property
    def supposed_buffers(self) -> tuple[str, ...]:
        """Buffers among `counted_buffers` for which other samples might show a difference, without counters of calls of
        BatchNorm.
        """
        return tuple(name for name in self.counted_buffers if not name.endswith("num_batches_tracked"))

    def learning(self, paths: Collection[str]) -> "LossTraits":
        """Return these traits with buffers and state learned from samples that seemed to be counted, or constant.

        Args:
            paths: Names among `counted_buffers`, and paths of state.
        """
        buffers = [name for name in self.counted_buffers if name in paths]
        state = [path for path in paths if path not in buffers]
        return replace(
            self,
            learned_buffers=tuple(dict.fromkeys((*self.learned_buffers, *buffers))),
            counted_buffers=tuple(name for name in self.counted_buffers if name not in buffers),
            learned_state=tuple(dict.fromkeys((*self.learned_state, *state))),
            counted_state=tuple(path for path in self.counted_state if path not in state),
        )


_OF_FIRST_CALL = ("reason_unknown", "has_failed", "needs_optimizer", "is_evaluable")

NOTHING_SEEN = LossTraits()
