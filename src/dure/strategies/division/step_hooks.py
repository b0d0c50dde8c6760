"""Hooks that a task registers on its optimiser's step, such as an average of the weights, if ranks step parts.

A hook may read anything: the parameters of a model that it holds, the optimiser's groups, its state. If every rank has
all parameters between two steps, hooks run around the step of all ranks and see the same as in one process. If ranks
have parts of the parameters only, hooks are refused.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.optim import Optimizer

from dure.errors import TaskInvalid
from dure.torchcompat.optimizers import is_step_replaced, share_step_hooks, step_hooks

_LISTS = ("params", "param_names")
"""Keys of a group for which the optimiser of all ranks has entries of trainable parameters only."""

Hook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]


def fault_of_hooks(optimizer: Optimizer) -> str | None:
    """Return the reason why hooks on an optimiser's step cannot run if every rank has a part; None without hooks."""
    hooks = step_hooks(optimizer)
    if not hooks:
        return fault_of_replaced_step(optimizer)
    names = ", ".join(dict.fromkeys(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks))
    return (
        f"the optimiser {type(optimizer).__name__} has a hook on its step ({names}), and on each rank the hook would "
        "see that rank's part of the parameters: clip with --clip-norm, set learning rates in build_schedule, or use "
        "--strategy ddp or zero1"
    )


def fault_of_replaced_step(optimizer: Optimizer) -> str | None:
    """Return the reason why an optimiser with a replaced step cannot step a part, or None if its step is its class's.

    The replacement may read everything, as a hook may. Nothing separates its work before and after the step from the
    step itself.
    """
    if not is_step_replaced(optimizer):
        return None
    return (
        f"the step of the optimiser {type(optimizer).__name__} was replaced by another function, which on each rank "
        "would see the step of that rank's part of the parameters: register a hook (register_step_post_hook) and use "
        "zero1, or use --strategy ddp"
    )


def refuse_later_hooks(optimizer: Optimizer) -> None:
    """Refuse hooks that a task registers after its optimiser was found to have none."""

    def refuse(hook: Hook) -> NoReturn:
        raise TaskInvalid(
            f"a hook ({getattr(hook, '__qualname__', type(hook).__name__)}) was registered on the optimiser's step, "
            "and on each rank it would see that rank's part of the parameters: use --strategy ddp or zero1"
        )

    optimizer.register_step_pre_hook = refuse  # type: ignore[method-assign]
    optimizer.register_step_post_hook = refuse  # type: ignore[method-assign]


def run_around_all(optimizer: Optimizer, part: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Run the hooks of this rank's part of an optimiser before and after the step of all ranks.

    The hooks get `part`, the task's own object, with the groups of all parameters. Hooks that are registered or removed
    later, on either optimiser, are respected.

    Args:
        optimizer: Optimiser of all parameters; in its step each rank steps its part, and the results are combined.
        part: Optimiser called by that step.
        groups: Groups of `part`, as the task has made them.
    """
    whole = _WholeView(optimizer, part, groups)
    share_step_hooks(optimizer, part, lambda own, parts: _HooksOfBoth(own, parts, whole))


class _WholeView:
    """View of the part, while hooks run, as the whole optimiser."""

    def __init__(self, optimizer: Optimizer, part: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
        self._optimizer, self._part = optimizer, part
        self._lists = [{key: group[key] for key in _LISTS if key in group} for group in groups]

    def call(self, hook: Hook, given: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a hook with the part instead of the optimiser that steps."""
        with self._shown():
            answer = hook(self._part, (self._part, *args[1:]), kwargs)
        if isinstance(answer, tuple) and len(answer) == 2:  # other arguments for the step
            changed, options = answer
            return (given, *changed[1:]), options
        return answer

    @contextmanager
    def _shown(self) -> Iterator[None]:
        part, groups = self._part, self._optimizer.param_groups
        of_part = part.param_groups, part.state
        stepped = [{key: group[key] for key in _LISTS if key in group} for group in groups]
        _take(groups, self._lists)
        part.param_groups, part.state = groups, _DividedState()  # type: ignore[assignment]
        try:
            yield
        finally:
            _take(groups, stepped)
            part.param_groups, part.state = of_part


def _take(groups: list[dict[str, Any]], lists: Sequence[Mapping[str, Any]]) -> None:
    for group, theirs in zip(groups, lists, strict=True):
        for key in _LISTS:
            group.pop(key, None)
        group.update(theirs)


class _HooksOfBoth(OrderedDict[int, Hook]):
    """Hooks registered on an optimiser, and those on its part, which remain there."""

    def __init__(self, own: Mapping[int, Hook], parts: Mapping[int, Hook], whole: _WholeView) -> None:
        super().__init__(own)
        self._parts, self._whole = parts, whole

    def values(self) -> Any:
        """Return the hooks of both, each to be called with the part as the whole."""
        hooks = [*self._parts.values(), *super().values()]
        return OrderedDict(enumerate(map(self._shown, hooks))).values()

    def _shown(self, hook: Hook) -> Hook:
        return lambda optimizer, args, kwargs: self._whole.call(hook, optimizer, args, kwargs)


class _DividedState:
    """Placeholder for the state of an optimiser of which each rank has a part."""

    def _refuse(self, *args: object) -> NoReturn:
        raise TaskInvalid(
            "a hook on the optimiser's step uses the optimiser's state, of which every rank has a part only: use "
            "--strategy ddp"
        )

    __getitem__ = __iter__ = __len__ = __contains__ = __getattr__ = __setitem__ = __bool__ = _refuse
