"""Watch over an optimiser's attributes between its steps, where only others than itself change them."""

from collections import deque
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from dure.strategies.state.objects.namespaces import ATOMS
from dure.strategies.state.objects.object_state import plain_attributes
from dure.strategies.state.tensor_shard import version_of

_DEFAULTS = "defaults"
_MOST_ITEMS = 100
"""Maximum number of items of a container or an array that are compared one by one."""


class OptimizerWatch:
    """Attributes of an optimiser that change between two of its steps, as when the loss tells it its value.

    Numbers are compared, and of tensors their versions, which takes no memory. Most optimisers have no attributes of
    their own: only their keys and `defaults` are compared, with as few calls as can be, since between two steps each
    takes microseconds.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Start without anything to compare with."""
        self._optimizer = optimizer
        self._left_out = frozenset(vars(optimizer).keys() - plain_attributes(optimizer).keys()) | {_DEFAULTS}
        self._defaults: dict[str, Any] | None = None
        """Copy of `defaults` as recorded; its values are the same objects. None before the first record."""
        self._own: dict[str, Any] = {}
        """Attributes of its own as recorded."""
        self.changed: dict[str, None] = {}
        """Names of the attributes that have changed."""

    def note(self) -> None:
        """Record the attributes after a step and all that follows it."""
        if self._own or not self._is_plain_and_as_recorded():
            self._defaults = dict(self._optimizer.defaults)
            self._own = self._own_now()

    def compare(self) -> None:
        """Compare the attributes with those recorded; called before the next step."""
        if self._defaults is None or (not self._own and self._is_plain_and_as_recorded()):
            return
        if not self._has_same_defaults():
            self.changed[_DEFAULTS] = None
        before, now = self._own, self._own_now()
        self.changed |= {name: None for name in {**before, **now} if before.get(name) != now.get(name)}

    def _is_plain_and_as_recorded(self) -> bool:
        optimizer = self._optimizer
        try:  # not by the method below: this is one call less, twice in each step
            return vars(optimizer).keys() <= self._left_out and optimizer.defaults == self._defaults
        except (RuntimeError, ValueError):  # other tensors or arrays than before are compared element by element
            return False

    def _has_same_defaults(self) -> bool:
        try:
            return self._optimizer.defaults == self._defaults
        except (RuntimeError, ValueError):
            return False

    def _own_now(self) -> dict[str, Any]:
        own = plain_attributes(self._optimizer)
        return {name: _shown(value) for name, value in own.items() if name not in self._left_out}


def _shown(value: Any, levels: int = 2) -> Any:
    """Return what tells a value from one that was changed."""
    if isinstance(value, ATOMS):
        return repr(value)  # NaN equals itself
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, np.ndarray) and value.size <= _MOST_ITEMS:
        return value.tobytes()
    if levels and isinstance(value, dict | list | tuple | deque) and len(value) <= _MOST_ITEMS:
        return [_shown(each, levels - 1) for each in (value.items() if isinstance(value, dict) else value)]
    return id(value)
