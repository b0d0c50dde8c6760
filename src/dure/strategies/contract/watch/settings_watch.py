"""Watch over the settings of an optimiser's groups, which the task's loss must not change for a part of a batch."""

import operator
from typing import Any

from torch.optim import Optimizer

from dure.strategies.state.optimizer import has_plain_settings, settings_of

_params = operator.itemgetter("params")


class SettingsWatch:
    """Settings of an optimiser's groups before a call and after it, such as learning rates.

    Groups of plain values are compared as dictionaries, which takes a third of the time of `settings_of` or less: the
    comparison is made twice a step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[dict[str, Any]] = []
        """Copies of the groups; their values are the same objects."""
        self._sizes: list[int] = []
        self._settings: list[list[Any]] | None = None
        """Settings of groups with values that can change in place; None if there are none."""

    def note(self) -> None:
        """Record the settings before a call."""
        if self._groups and self._settings is None and self._are_equal():
            return
        groups = self._optimizer.param_groups
        self._groups = [dict(group) for group in groups]
        self._sizes = [len(group["params"]) for group in groups]
        self._settings = None if has_plain_settings(self._optimizer) else settings_of(self._optimizer)

    def have_changed(self) -> bool:
        """Return whether the settings, or the number of parameters of a group, differ from those recorded."""
        if self._settings is None:
            return not self._are_equal()
        return settings_of(self._optimizer) != self._settings

    def _are_equal(self) -> bool:
        groups = self._optimizer.param_groups
        try:
            is_equal = groups == self._groups
        except (RuntimeError, ValueError):  # other tensors or arrays than before are compared element by element
            return False
        return is_equal and list(map(len, map(_params, groups))) == self._sizes
