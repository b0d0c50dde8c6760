"""Watch over an optimiser's attributes between its steps, where only others than itself change them."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dure.strategies.state.objects.namespaces import ATOMS
from dure.strategies.state.objects.object_state import plain_attributes
from dure.strategies.state.tensor_shard import version_of

_DEFAULTS = "defaults"
_MOST_ITEMS = 100
"""Maximum number of items of a container that are compared one by one."""


class OptimizerWatch:
    """Attributes of an optimiser that change between two of its steps, as when the loss tells it its value.

    Numbers are compared, and of tensors their versions, which takes no memory; most optimisers have neither, and are
    compared in two microseconds.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Start without anything to compare with."""
        self._optimizer = optimizer
        self._left_out = (vars(optimizer).keys() - plain_attributes(optimizer).keys()) | {_DEFAULTS}
        self._before: dict[str, Any] | None = None
        self.changed: dict[str, None] = {}
        """Names of the attributes that have changed."""

    def note(self) -> None:
        """Record the attributes after a step and all that follows it."""
        self._before = self._now()

    def compare(self) -> None:
        """Compare the attributes with those recorded; called before the next step."""
        if self._before is None:
            return
        before, now = self._before, self._now()
        self.changed |= {name: None for name in {**before, **now} if before.get(name) != now.get(name)}

    def _now(self) -> dict[str, Any]:
        shown: dict[str, Any] = {_DEFAULTS: [*map(id, self._optimizer.defaults.values())]}
        if vars(self._optimizer).keys() <= self._left_out:
            return shown
        own = plain_attributes(self._optimizer)
        return shown | {name: _shown(value) for name, value in own.items() if name not in self._left_out}


def _shown(value: Any, levels: int = 2) -> Any:
    """Return what tells a value from one that was changed."""
    if isinstance(value, ATOMS):
        return repr(value)  # NaN equals itself
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if levels and isinstance(value, dict | list | tuple) and len(value) <= _MOST_ITEMS:
        return [_shown(each, levels - 1) for each in (value.items() if isinstance(value, dict) else value)]
    return id(value)
