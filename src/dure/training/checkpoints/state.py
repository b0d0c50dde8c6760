"""State of a checkpoint in memory: position, model, optimiser, and the rank's own state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Position of a checkpoint in the run. Samples decide; step and epoch follow from them."""

    samples_seen: int
    """Samples used by all ranks since the start of the run."""
    step: int
    """Optimiser steps done."""
    epoch: int
    """Epoch of the next sample, from 0: as many as are completed."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a run at a position.

    A plain tensor is whole and the same on every rank; rank 0 writes it. A `TensorShard`, or a `DTensor`, is written by
    the rank that has it. Ranks other than 0 may leave out what is whole.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    """Model's own `state_dict()`: its own names, no `module.`."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Optimiser's state as `optimizer_to_names` returns it."""
    extra: Any = None
    """Plain values of any nesting: gradient scaler, the best so far, sums of an open epoch."""
    is_spread: bool = False
    """True if ranks other than 0 have tensors, or state, that rank 0 lacks (a pipeline's stages)."""
    steady: frozenset[str] = frozenset()
    """Names of the model's tensors that change only in the optimiser's step, as the optimiser's own tensors do. Empty
    if nothing is known: the optimiser's tensors may change outside of it too."""
    finite: frozenset[str] = frozenset()
    """Names of the model's parameters that were finite when it was built: they are written as long as they are."""
    per_rank: Mapping[str, Tensor] = field(default_factory=dict)
    """State of this rank alone: its random generators."""
