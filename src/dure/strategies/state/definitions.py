"""Definitions that code may replace: classes of modules, functions that are their attributes, methods of classes."""

import types
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from dure.strategies.state.objects.namespaces import Namespace

_OF_CLASSES = (types.FunctionType, staticmethod, classmethod, property)
_OF_MODULES = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


class Definitions:
    """Definitions of a model and of the objects of a task at one point in time."""

    def __init__(self, model: nn.Module, objects: Mapping[str, object]) -> None:
        """Record the definitions.

        Args:
            model: Model whose modules are recorded.
            objects: Further objects by name, such as the task.
        """
        self._modules = [(module, type(module), _functions(module)) for module in model.modules()]
        kinds = {type(each) for each in (*model.modules(), *objects.values()) if not isinstance(each, Namespace)}
        classes = dict.fromkeys(base for cls in kinds for base in cls.__mro__ if base is not object)
        self._classes = [(cls, dict(vars(cls))) for cls in classes]

    def put_back(self) -> None:
        """Restore what was replaced since."""
        for module, cls, functions in self._modules:
            if type(module) is not cls:  # parametrizations replace it too
                module.__class__ = cls
            attributes = vars(module)
            for name in _functions(module).keys() - functions.keys():
                del attributes[name]
            for name, function in functions.items():
                attributes[name] = function
        for cls, members in self._classes:
            _put_back_members(cls, members)


def _functions(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _OF_MODULES)}


def _put_back_members(cls: type, before: Mapping[str, Any]) -> None:
    """Restore the functions of a class; its variables are plain state, which is restored separately."""
    now = vars(cls)
    for name in [*before.keys(), *(now.keys() - before.keys())]:
        held, had = now.get(name), before.get(name)
        if held is not had and (isinstance(held, _OF_CLASSES) or isinstance(had, _OF_CLASSES)):
            with suppress(AttributeError, TypeError):  # a metaclass may refuse
                if name in before:
                    setattr(cls, name, had)
                else:
                    delattr(cls, name)
