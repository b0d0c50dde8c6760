"""Hooks of modules and optimisers, of which a change during the run is seen."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from dure.strategies.state.namespaces import is_users
from dure.strategies.state.object_state import HOOKS


class HookWatch:
    """The hooks that objects had when this was made."""

    def __init__(self, owners: Mapping[str, object]) -> None:
        """Look at hooks.

        Args:
            owners: Modules and optimisers by their paths.
        """
        self._registers: dict[str, Any] = {
            f"{path}.{name}": vars(owner)[name]
            for path, owner in owners.items()
            for name in HOOKS
            if name in vars(owner)
        }
        self._ids = self._now()
        self._users = {path: _users(hooks) for path, hooks in self._registers.items()}

    def changed(self) -> list[str]:
        """Return the registers in which the user's own hooks are no longer as they were."""
        ids = self._now()
        if ids == self._ids:
            return []
        self._ids = ids
        return [path for path, hooks in self._registers.items() if _users(hooks) != self._users[path]]

    def _now(self) -> list[int]:
        return [*chain.from_iterable(self._registers.values())]


def _users(hooks: Mapping[int, Any]) -> list[int]:
    # torch and strategies have hooks of their own
    return [number for number, hook in hooks.items() if is_users(hook)]
