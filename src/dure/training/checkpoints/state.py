"""State of a checkpoint in memory: position, model, optimiser, and this rank's own state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Position of a checkpoint in the run, determined by its samples; step and epoch follow from them."""

    samples_seen: int
    """Samples used by all ranks since the start of the run."""
    step: int
    """Completed optimiser steps."""
    epoch: int
    """Epoch of the next sample, from 0; equal to the number of completed epochs."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State of a run at a position.

    A plain tensor is whole and equal on every rank; rank 0 writes it. A `TensorShard` or a `DTensor` is written by the
    rank that has it. Ranks other than 0 may omit whole tensors.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    """Model's `state_dict()` with its own names, without a `module.` prefix."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Optimiser's state as returned by `optimizer_to_names`."""
    extra: Any = None
    """Plain values of any nesting: gradient scaler, best evaluation, sums of an unfinished epoch."""
    is_spread: bool = False
    """True if ranks other than 0 have tensors or state that rank 0 lacks (a pipeline's stages)."""
    steady: frozenset[str] = frozenset()
    """Names of the model's tensors that change only in the optimiser's step; the optimiser's own tensors then do so
    too. If empty, nothing is known, not even of the optimiser's tensors."""
    finite: frozenset[str] = frozenset()
    """Names of the model's parameters that were finite when it was built; saving requires that they still are."""
    per_rank: Mapping[str, Tensor] = field(default_factory=dict)
    """State of this rank alone: its random generators."""
