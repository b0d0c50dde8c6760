"""Watch over the parameters of an optimiser's groups, which a strategy may have divided."""

import operator
import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

ADDED = "a parameter group was added to the optimiser during the run"
_CHANGED = "the parameters of a group of the optimiser changed during the run"


class GroupWatch:
    """Parameters of each group of some optimisers at the start of the run."""

    def __init__(self, *optimizers: Optimizer, parameters: Iterable[Tensor] = ()) -> None:
        """Record the groups.

        Args:
            optimizers: Optimisers, of which some may be the same.
            parameters: Parameters that the model began with, besides those of the groups.
        """
        self._optimizers = tuple({id(each): each for each in optimizers}.values())
        self._first = [list(parameters) for parameters in self._now()]
        # weak references: a strategy may have replaced the parameters, whose memory is then free
        known = (*parameters, *(parameter for group in self._first for parameter in group))
        self._known = {id(parameter): weakref.ref(parameter) for parameter in known}

    def _now(self) -> list[list[Tensor]]:
        return [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]

    def change(self) -> str | None:
        """Return the change since the start, or None; the order of the parameters in a group does not matter."""
        groups = self._now()
        if len(groups) != len(self._first):
            return ADDED
        for first, now in zip(self._first, groups, strict=True):
            if len(now) != len(first):
                return _CHANGED
            # sets take longer, and are needed only by an optimiser that sorts its groups
            if not all(map(operator.is_, first, now)) and {*map(id, first)} != {*map(id, now)}:
                return _CHANGED
        return None

    def has_new_parameters(self) -> bool:
        """Return whether a group has parameters that the model did not begin with."""
        return any(not self._is_known(parameter) for group in self._now() for parameter in group)

    def _is_known(self, parameter: Tensor) -> bool:
        known = self._known.get(id(parameter))
        return known is not None and known() is parameter
