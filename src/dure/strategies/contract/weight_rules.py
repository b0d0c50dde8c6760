"""Rules of a strategy for parameters and optimiser: what the task may do to them, and when they change."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRules:
    """Rules for parameters and optimiser. The defaults are those of a strategy that promises nothing."""

    changes_in_step_only: bool = False
    """True if `optimizer_step` is the only one of the three verbs that changes trained parameters and the optimiser's
    state, so that they may be read until it begins."""
    follows_groups: bool = True
    """True if groups of parameters may be added to the optimiser during the run."""
    freezing: Literal["followed", "not undone", "refused"] = "not undone"
    """Parameters that the loss freezes or unfreezes during the run: trained as they then are, refused where they are
    unfrozen, or refused at all. What is frozen simply gets no gradient."""
    undoes_writes: bool = False
    """True if parameters that the loss writes to would lose what it wrote, on some or all ranks."""
    orders_parameters: bool = False
    """True if ranks divide the optimiser's parameters in the order that its groups have."""
    holds_memory: bool = False
    """True if it keeps the memory of the parameters that it was given, so that other memory assigned to them would be
    lost."""
    divides_gradients: bool = False
    """True if a rank has only a part of the gradients, or none, when the optimiser steps."""
    divides_state: bool = False
    """True if a rank has only a part of the optimiser's state."""
