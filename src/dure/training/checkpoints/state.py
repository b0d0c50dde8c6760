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

    A plain tensor is whole and the same on every rank; rank 0 writes it. A `Piece`, or a `DTensor`, is written by the
    rank that has it. Ranks other than 0 may leave out what is whole.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    """The model's own `state_dict()`: its own names, no `module.`."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """The answer of `optimizer_to_names`."""
    extra: Any = None
    """Plain values of any nesting: gradient scaler, the best so far, sums of an open epoch."""
    is_spread: bool = False
    """Whether ranks other than 0 have tensors, or state, that rank 0 has not (a pipeline's stages)."""
    steady: frozenset[str] = frozenset()
    """Of the model's names those whose tensors, like the optimiser's, change in the optimiser's step only. Empty: there
    is no telling, and the optimiser's may change as well."""
    finite: frozenset[str] = frozenset()
    """Names of the model's parameters that were finite when it was built: they are written as long as they are."""
    per_rank: Mapping[str, Tensor] = field(default_factory=dict)
    """What belongs to this rank alone: the states of its random generators."""
