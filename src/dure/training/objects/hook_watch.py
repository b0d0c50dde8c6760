"""Detection of changed hooks of modules, optimisers and parameters, and of replaced module functions."""

from collections.abc import Mapping
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from dure.strategies.state.objects.namespaces import is_users
from dure.strategies.state.objects.object_state import HOOKS
from dure.torchcompat.gradients import gradient_hooks_of


class HookWatch:
    """Hooks, functions and classes of modules at the time of construction, for later comparison."""

    def __init__(self, owners: Mapping[str, object], parameters: Mapping[str, Tensor]) -> None:
        """Record the present hooks.

        Args:
            owners: Modules and optimisers by their paths.
            parameters: Parameters by their paths.
        """
        self._owners = owners
        self._definitions = self._definitions_now()
        self._parameters = parameters
        self._of_parameters = self._of_gradients()
        self._registers: dict[str, Any] = {
            f"{path}.{name}": vars(owner)[name]
            for path, owner in owners.items()
            for name in HOOKS
            if name in vars(owner)
        }
        self._ids = self._now()
        self._users = {path: _users(hooks) for path, hooks in self._registers.items()}

    def changed(self, *, is_thorough: bool = False) -> list[str]:
        """Return the registers in which the user's own hooks have changed.

        Args:
            is_thorough: Whether to check hooks on the gradients of parameters, which are many, and functions that are
                attributes as well.
        """
        found = []
        if is_thorough:
            found += _differing(self._definitions, self._definitions_now())
            found += _differing(self._of_parameters, self._of_gradients())
        ids = self._now()
        if ids != self._ids:
            self._ids = ids
            found += [path for path, hooks in self._registers.items() if _users(hooks) != self._users[path]]
        return found

    def _definitions_now(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for path, owner in self._owners.items():
            if isinstance(owner, nn.Module):
                found[f"{path}.__class__"] = type(owner)
                functions = {
                    n: v for n, v in vars(owner).items() if isinstance(v, _FUNCTIONS) and not n.startswith("_")
                }
                found |= {f"{path}.{name}": value for name, value in functions.items()}
        return found

    def _of_gradients(self) -> dict[str, list[int]]:
        hooks = ((path, gradient_hooks_of(parameter)) for path, parameter in self._parameters.items())
        return {
            f"{path} (its gradient)": ids for path, own in hooks if own and (ids := [*map(id, filter(is_users, own))])
        }

    def _now(self) -> list[int]:
        return [*chain.from_iterable(self._registers.values())]


_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


def _differing(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    # equal methods may be two objects
    return [path for path in {**one, **other} if one.get(path) != other.get(path)]


def _users(hooks: Mapping[int, Any]) -> list[int]:
    # torch and strategies register hooks of their own
    return [number for number, hook in hooks.items() if is_users(hook)]
