"""Rules of a strategy for parameters and optimiser: permitted changes by the task, and the times of changes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRules:
    """Rules for parameters and optimiser. The defaults are those of a strategy that promises nothing."""

    changes_in_step_only: bool = False
    """True if, of the three methods, only `optimizer_step` changes trained parameters and the optimiser's state, so
    that they may be read until it begins.
    """
    follows_groups: bool = True
    """True if the optimiser's groups, and their parameters, may change during the run."""
    freezing: Literal["followed", "not undone", "refused"] = "not undone"
    """Treatment of parameters that the loss freezes or unfreezes during the run: trained as they then are, refused if
    they are unfrozen, or always refused. A frozen parameter simply gets no gradient.
    """
    undoes_writes: bool = False
    """True if values that the loss writes to parameters would be lost on some or all ranks."""
    orders_parameters: bool = False
    """True if ranks divide the optimiser's parameters in the order of its groups."""
    holds_memory: bool = False
    """True if it keeps the memory of the parameters that it was given, so that other memory assigned to them would be
    lost.
    """
    divides_model: bool = False
    """True if a rank has only some of the parameters, and code of the task that reads others fails there."""
    divides_gradients: bool = False
    """True if a rank has only a part of the gradients, or none, when the optimiser steps."""
    steps_elsewhere: bool = False
    """True if ranks step parameters that do not compute the loss, or not all of it."""
    divides_state: bool = False
    """True if a rank has only a part of the optimiser's state."""
    divides_groups: bool = False
    """True if the parameters in the optimiser's groups are not those that the loss uses: parts, or those of a rank."""
    sparse_gradients: Literal["any", "of layers", "none"] = "any"
    """Sparse gradients that it can add up: any, all of the layers with `sparse=True` and no others, or none."""
