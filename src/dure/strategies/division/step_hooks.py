"""Hooks that a task registers on its optimiser's step, such as an average of the weights, where ranks step parts.

A hook may look at anything: the parameters of a model that it holds, the optimiser's groups, its state. Where every
rank has all parameters between two steps, hooks run around the step of all ranks and see what they would see in one
process. Where ranks have parts of the parameters only, they are refused.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.optim import Optimizer

from dure import torchcompat
from dure.errors import TaskInvalid

_LISTS = ("params", "param_names")
"""Keys of a group of which the optimiser of all ranks has the trainable parameters' only."""

Hook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]


def fault_of_hooks(optimizer: Optimizer) -> str | None:
    """Return why hooks on the step of an optimiser cannot run where every rank has a part, or None without hooks."""
    hooks = torchcompat.step_hooks(optimizer)
    if not hooks:
        return fault_of_replaced_step(optimizer)
    names = ", ".join(dict.fromkeys(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks))
    return (
        f"the optimiser {type(optimizer).__name__} has a hook on its step ({names}), and on each rank the hook would "
        "see that rank's part of the parameters: clip with --clip-norm, set learning rates in build_schedule, or use "
        "--strategy ddp or zero1"
    )


def fault_of_replaced_step(optimizer: Optimizer) -> str | None:
    """Return why an optimiser whose step was replaced cannot step a part, or None if its step is that of its class.

    What has replaced it may look at everything, as a hook may, but nothing tells the work before and after the step
    from the step itself.
    """
    if not torchcompat.is_step_replaced(optimizer):
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
    """Let the hooks of this rank's part of an optimiser run before and after the step of all ranks.

    They are given `part`, the task's own object, with the groups of all parameters. Hooks that are registered or
    removed later, on either optimiser, count too.

    Args:
        optimizer: Of all parameters; its step lets each rank step its part and brings the results together.
        part: Called by that step.
        groups: Of `part`, as the task has made them.
    """
    whole = _WholeView(optimizer, part, groups)
    torchcompat.share_step_hooks(optimizer, part, lambda own, parts: _HooksOfBoth(own, parts, whole))


class _WholeView:
    """The part, while hooks run, as if it were the whole optimiser."""

    def __init__(self, optimizer: Optimizer, part: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
        self._optimizer, self._part = optimizer, part
        self._lists = [{key: group[key] for key in _LISTS if key in group} for group in groups]

    def call(self, hook: Hook, given: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a hook with the part in the place of the optimiser that steps."""
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
    """The hooks registered on an optimiser, and those on its part, which stay where they are."""

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
