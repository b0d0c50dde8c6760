"""Record of modules for their restoration: their attributes, registered members, and hooks on gradients."""

import operator
from collections.abc import Mapping
from typing import Any

from torch import nn

from dure.strategies.state.definitions import Definitions
from dure.torchcompat.gradients import keep_gradient_hooks


class KeptModules:
    """Current modules of a model, with the definitions that the model and the objects of a task use.

    Values of tensors are not recorded, nor those of plain state in lists and other containers.
    """

    def __init__(self, model: nn.Module, objects: Mapping[str, object]) -> None:
        """Record the modules.

        Args:
            model: Model whose modules are recorded.
            objects: Further objects by name, such as the task.
        """
        self._modules = [(module, dict(vars(module)), _registered(module)) for module in model.modules()]
        self._definitions = Definitions(model, objects)
        self._undo_hooks = [keep_gradient_hooks(parameter) for parameter in model.parameters()]

    def put_back(self) -> None:
        """Restore the modules, even if some were replaced, parametrised or pruned since."""
        for undo in self._undo_hooks:
            undo()
        self._definitions.put_back()
        for module, attributes, registered in self._modules:
            put_back_entries(vars(module), attributes)
            for kind, entries in registered.items():
                register = vars(module)[kind]
                if (register or entries) and not _has_same_entries(register, entries):
                    register.clear()
                    register.update(entries)


def has_same_entries(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return whether a dictionary has the same objects; at the speed of C, because hardly any has changed."""
    return now.keys() == before.keys() and all(map(operator.is_, map(now.__getitem__, before), before.values()))


def put_back_entries(now: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Restore the same objects in a dictionary, including attributes that hold functions, such as `forward`."""
    if has_same_entries(now, before):
        return
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        if name not in now or now[name] is not value:
            now[name] = value


def _has_same_entries(register: Any, entries: Any) -> bool:
    """Return whether a register has the same members in the same order."""
    if isinstance(register, set):
        return bool(register == entries)
    return [*register] == [*entries] and all(map(operator.is_, register.values(), entries.values()))


def _registered(module: nn.Module) -> dict[str, Any]:
    return {kind: entries.copy() for kind, entries in vars(module).items() if kind in _REGISTERS}


_REGISTERS = {
    *("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"),
    *(name for name in vars(nn.Module()) if name.endswith("_hooks")),
}
"""Dictionaries and sets in which a module registers its members, including hooks."""
