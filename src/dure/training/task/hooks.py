"""Check of a task's class: required methods, their parameters, and misnamed methods."""

import difflib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dure.errors import TaskInvalid
from dure.training.task.task import Task

HOOKS = tuple(name for name, value in vars(Task).items() if inspect.isfunction(value) and not name.startswith("_"))
"""Methods that dure calls."""

_LIKENESS = 0.86
"""Similarity from which a name counts as a misspelling: `metric` has 0.92, `train_data_path` 0.80."""

_FOREIGN_HOOKS = {
    "eval_data": (
        *("val_data", "valid_data", "validation_data", "evaluation_data", "eval_dataset", "val_dataset", "eval_set"),
        *("valid_dataset", "validation_dataset", "val_set", "valid_set", "validation_set", "test_data", "test_dataset"),
        *("val_dataloader", "test_dataloader", "eval_dataloader", "get_eval_dataset", "get_eval_dataloader"),
    ),
    "train_data": (
        *("training_data", "train_dataset", "training_dataset", "train_set", "training_set", "train_dataloader"),
        *("get_train_dataset", "get_train_dataloader"),
    ),
    "build_model": ("configure_model", "make_model", "create_model", "get_model", "model_init"),
    "build_optimizer": (
        *("configure_optimizers", "configure_optimizer", "create_optimizer", "make_optimizer", "get_optimizer"),
        "create_optimizer_and_scheduler",
    ),
    "build_schedule": (
        *("build_scheduler", "build_lr_scheduler", "create_scheduler", "make_scheduler", "get_scheduler"),
        *("configure_scheduler", "lr_scheduler", "lr_lambda", "learning_rate_schedule"),
    ),
    "loss": ("training_step", "train_step", "compute_loss", "training_loss"),
    "metrics": (
        *("validation_step", "val_step", "test_step", "eval_step", "evaluation_step", "compute_metrics"),
        *("evaluate", "validate", "evaluate_batch", "calculate_metrics", "get_metrics", "eval_metrics", "val_metrics"),
    ),
    "collate": ("collate_fn", "collate_batch", "data_collator"),
    "prepare_data": ("prepare", "prepare_dataset", "download_data"),
    "describe": ("model_summary",),
    "defaults": ("default", "default_settings", "settings"),
}
"""Names of the same methods in Lightning, Keras, Hugging Face's Trainer and hand-written loops."""

_NEVER_CALLED = frozenset(
    (
        *("on_fit_start", "on_fit_end", "on_train_start", "on_train_begin", "on_train_end", "on_epoch_start"),
        *("on_epoch_begin", "on_epoch_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start"),
        *("on_train_batch_end", "on_step_begin", "on_step_end", "on_validation_start", "on_validation_end"),
        *("on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start"),
        *("on_validation_batch_end", "on_test_epoch_end", "on_before_backward", "on_after_backward"),
        *("on_before_optimizer_step", "on_before_zero_grad", "on_save_checkpoint", "on_load_checkpoint", "on_evaluate"),
        *("training_epoch_end", "validation_epoch_end", "test_epoch_end", "training_step_end", "optimizer_step"),
        *("optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping", "configure_callbacks"),
        *("backward_step",),
    )
)
"""Hooks of other frameworks that have no counterpart."""

_METHODS = (types.FunctionType, types.MethodType, staticmethod, classmethod, property, functools.cached_property)

_MEANT = {name: hook for hook, names in _FOREIGN_HOOKS.items() for name in names}


def check_task_class(cls: type[Task]) -> None:
    """Refuse a class that lacks a required method, or has one that dure cannot or would never call.

    Raises:
        TaskInvalid: There are such methods; the message names each with its signature.
    """
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise TaskInvalid(f"{cls.__name__} lacks {_listed(missing)}: {_cure_for_missing(cls, missing)}")
    wrong = [name for name in HOOKS if not _takes_what_is_given(cls, name)]
    if wrong:
        seen = ", ".join(f"{name}{_shown(cls, name)}" for name in wrong)
        raise TaskInvalid(f"{cls.__name__} has {seen}, but dure calls {_listed(wrong)}: give it these parameters")
    if not isinstance(cls.defaults, Mapping):
        raise TaskInvalid(
            f"{cls.__name__}.defaults is {cls.defaults!r:.60}: make it a dict of settings, such as {{'epochs': 10}}"
        )
    check_names(cls, _own_names(cls))


def check_names(cls: type[Task], names: Mapping[str, Any]) -> None:
    """Refuse methods that nothing calls, and that were probably meant to be one that dure calls.

    Names with a leading underscore, options, and names that the task's own methods use are not checked.

    Args:
        cls: Task's class.
        names: Names to check, with their values: those of the class, or those of an object of it.

    Raises:
        TaskInvalid: There are such methods; the message names each, and the method that was meant.
    """
    suspects = {name: meant for name, value in names.items() if (meant := _meant_by(cls, name, value)) is not None}
    suspects = {name: meant for name, meant in suspects.items() if not _is_used(cls, name)} if suspects else {}
    if not suspects:
        return
    faults = [
        f"{name}, which dure never uses: " + (f"it uses {_call(meant)}" if meant else "it has no such hook")
        for name, meant in suspects.items()
    ]
    first = next(iter(suspects))
    raise TaskInvalid(
        f"{cls.__name__} has {'; '.join(faults)}; rename it, or, if it is a helper of your own, begin its name with an "
        f"underscore: _{first}"
    )


def _listed(methods: list[str]) -> str:
    return ", ".join(map(_call, methods))


def _call(hook: str) -> str:
    """Return a hook with its parameters, as the user should write it."""
    if hook not in HOOKS:
        return hook
    return f"{hook}({', '.join(inspect.signature(getattr(Task, hook)).parameters)})"


def _cure_for_missing(cls: type[Task], missing: list[str]) -> str:
    found = {name: _nearest(name) for name in _own_names(cls) if name not in HOOKS}
    renamed = [f"{name} to {hook}" for name, hook in found.items() if hook in missing]
    if renamed:
        return f"rename {' and '.join(renamed)}"
    module = sys.modules.get(cls.__module__)
    outside = [hook for hook in missing if isinstance(getattr(module, hook, None), types.FunctionType)]
    if outside:
        return f"its file has {' and '.join(outside)} outside the class: move it into the class, by its indentation"
    return "add what is missing to the class"


def _takes_what_is_given(cls: type[Task], method: str) -> bool:
    given = len(inspect.signature(getattr(Task, method)).parameters)
    own = inspect.getattr_static(cls, method)
    if isinstance(own, staticmethod):
        given -= 1
    if not callable(getattr(cls, method)):
        return False
    try:
        inspect.signature(getattr(cls, method)).bind(*range(given - isinstance(own, classmethod)))
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _shown(cls: type[Task], method: str) -> str:
    value = getattr(cls, method)
    if isinstance(value, property):
        return " as a property"
    return str(inspect.signature(value)) if callable(value) else f" = {value!r:.60}"


# --- names similar to a hook's


def _own_names(cls: type[Task]) -> dict[str, Any]:
    """Return the names that the task's classes define, without options and private names."""
    fields = getattr(cls, "__dataclass_fields__", {})
    names: dict[str, Any] = {}
    for base in cls.__mro__:
        if issubclass(base, Task) and base is not Task:
            names = {**vars(base), **names}
    return {name: value for name, value in names.items() if name not in fields and not name.startswith("_")}


def _meant_by(cls: type[Task], name: str, value: object) -> str | None:
    """Return the hook that a name stands for; "" for a foreign one without counterpart, None for an unrelated name."""
    if name in HOOKS or name == "defaults" or name.startswith("_"):
        return None
    hook = _nearest(name)
    if hook == "defaults":
        return hook if isinstance(value, Mapping) and not cls.defaults else None
    if not isinstance(value, _METHODS):
        return None
    if hook is None:
        return "" if name in _NEVER_CALLED else None
    is_overridden = getattr(cls, hook) is not getattr(Task, hook)
    return None if is_overridden else hook


def _nearest(name: str) -> str | None:
    if name in _MEANT:
        return _MEANT[name]
    near = difflib.get_close_matches(name.lower(), [*HOOKS, "defaults"], n=1, cutoff=_LIKENESS)
    return near[0] if near else None


def _is_used(cls: type[Task], name: str) -> bool:
    """Return whether the task's code, or a function of its module, uses the name outside the method itself."""
    bases = [base for base in cls.__mro__ if base not in (Task, object)]
    own = [function for base in bases for function in _functions(vars(base)) if function.__name__ != name]
    modules = {base.__module__ for base in bases if issubclass(base, Task)} & {*sys.modules}
    around = [function for module in modules for function in _functions(vars(sys.modules[module]))]
    return any(name in _names_and_strings_in(function.__code__) for function in own) or any(
        name in _names_in(function.__code__) for function in around
    )


def _functions(names: Mapping[str, Any]) -> Iterator[types.FunctionType]:
    for value in list(names.values()):
        parts: tuple[Callable[..., Any] | None, ...] = (getattr(value, "__func__", value),)
        if isinstance(value, property):
            parts = value.fget, value.fset
        elif isinstance(value, functools.cached_property):
            parts = (value.func,)
        yield from (part for part in parts if isinstance(part, types.FunctionType))


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names used in code and in the functions inside it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {*code.co_names}.union(*map(_names_in, inner))


def _names_and_strings_in(code: types.CodeType) -> set[str]:
    """Return the names used in code, and its strings: `getattr(self, "metric")`."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    strings = {constant for constant in code.co_consts if isinstance(constant, str)}
    return strings.union(code.co_names, *map(_names_and_strings_in, inner))
