"""Proxy of the model for the task's loss: like the model in every respect, except that a function handles its call."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dure.errors import TaskInvalid, message_of
from dure.torchcompat.modes import is_transforming

Answer = Callable[..., Any]

_NOT_IN_GRAPH = ("appears to not have been used in the graph", "does not require grad and does not have a grad_fn")
"""Texts by which autograd says that nothing leads from an output to an input."""


class _StandIn:
    """Mixin before the model's own class; instances share the model's `__dict__` with all attributes."""

    __slots__ = ()
    _answer: Answer
    _state: Callable[..., Any] | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the model's own class, where code asks for one more of it (a slice of `nn.Sequential`)."""
        return cls.__bases__[1](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's result.

        Raises:
            TaskInvalid: The call is made within a transform of `torch.func`, whose tensors no other rank has.
        """
        if is_transforming():
            raise TaskInvalid(
                f"the task calls {type(self).__name__} within torch.func (vmap, grad, jacrev ...), which cannot go "
                "through a model that is cut into sections: use ddp or fsdp"
            )
        return self._answer(*args, **kwargs)

    def __deepcopy__(self, *_: Any) -> Any:
        """Refuse to be copied: this rank has only a part of the model.

        Raises:
            TaskInvalid: Always.
        """
        raise TaskInvalid(
            f"the task copies {type(self).__name__} (copy.deepcopy, pickle), of which each rank has a section alone: "
            "make the copy in build_model, or use ddp or fsdp"
        )

    __copy__ = __reduce_ex__ = __deepcopy__

    @property
    def forward(self) -> Answer:
        """The function, with the signature of the model's own `forward`."""
        # a property has precedence over an instance's attribute of this name
        own: Any = super()
        return functools.wraps(self.__dict__.get("forward") or own.forward)(self._answer)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state provided by the strategy, or the model's."""
        if self._state is not None:
            return self._state(*args, **kwargs)
        own: Any = super()
        return own.state_dict(*args, **kwargs)


def stand_in(model: nn.Module, answer: Answer, state: Callable[..., Any] | None = None) -> Any:
    """Return a proxy of a model: of its class, with its attributes, parameters and methods.

    Args:
        model: Model that shares its attributes with the proxy.
        answer: Function from a call's arguments to the model's output.
        state: Replaces `state_dict`; None keeps the model's.
    """
    own_class: Any = type(model)
    proxy = object.__new__(_class_for(own_class))
    object.__setattr__(proxy, "__dict__", model.__dict__)
    object.__setattr__(proxy, "_answer", answer)
    object.__setattr__(proxy, "_state", state)
    return proxy


@functools.cache
def _class_for(cls: Any) -> Any:
    return type(cls.__name__, (_StandIn, cls), {"__slots__": ("_answer", "_state"), "__module__": cls.__module__})


class _Called(BaseException):
    """End of the task's loss at its call of the model; no task catches it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = args, kwargs


def call_of(
    loss: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which a task's loss calls the model on a batch; the loss ends at that call.

    Raises:
        TaskInvalid: It does not call the model.
    """

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)

    try:
        loss(stand_in(model, stop), batch)
    except _Called as called:
        return called.call
    raise TaskInvalid(not_called(model))


def not_called(model: nn.Module) -> str:
    """Return the message about a loss that does not call the model."""
    return (
        f"the task's loss computed {type(model).__name__} without calling it: a model that is cut into sections is run "
        "by one call of the model itself; call model(...), or use ddp or fsdp"
    )


def called_again(model: nn.Module) -> str:
    """Return the message about a loss that calls the model twice."""
    return (
        f"the task's loss calls {type(model).__name__} more than once: a pipeline runs it once for each microbatch; "
        "call it once, or use ddp or fsdp"
    )


@contextmanager
def derivatives_refused(model: nn.Module) -> Iterator[None]:
    """Enter the context of a loss that has the model's output alone, to which autograd has no path from its inputs.

    Raises:
        TaskInvalid: The loss asks for derivatives that are not there.
    """
    try:
        yield
    except RuntimeError as error:
        message = message_of(error)
        if not any(text in message for text in _NOT_IN_GRAPH):
            raise
        raise TaskInvalid(
            f"the task's loss failed ({message.splitlines()[0]:.200}): it has the output of {type(model).__name__} "
            "alone, without derivatives through it, as a gradient penalty needs them, for other ranks have sections of "
            "it; if it needs none, `--strategy single` shows the failing line; else use ddp or fsdp"
        ) from error
