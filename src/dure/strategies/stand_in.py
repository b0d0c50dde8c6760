"""What stands in for the model when the task's loss calls it: notes the call, or answers it in another way."""

from collections.abc import Callable
from typing import Any

from torch import nn

from dure.errors import TaskInvalid


class StandIn(nn.Module):
    """Looks like the model to a task; a call is answered by a function."""

    def __init__(self, model: nn.Module, answer: Callable[..., Any]) -> None:
        """Stand in for a model.

        Args:
            model: Its parameters, its mode and everything else that the task may ask for are shown.
            answer: Gets a call's arguments and returns the model's output.
        """
        super().__init__()
        self.model = model
        self.training = model.training
        self._answer = answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Let the function answer."""
        return self._answer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Answer everything but a call from the model itself."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def __getitem__(self, key: Any) -> Any:
        """Answer from the model, if it is one that has items."""
        return self.model[key]  # type: ignore[index]

    def __iter__(self) -> Any:
        """Answer from the model, if it is one that has items."""
        return iter(self.model)  # type: ignore[call-overload]


class _Called(BaseException):
    """Ends the task's loss where it calls the model; nothing that a task catches."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = args, kwargs


def call_of(
    loss: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which a task's loss calls the model on a batch; nothing after the call is done.

    Raises:
        TaskInvalid: It does not call the model.
    """

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)

    try:
        loss(StandIn(model, stop), batch)
    except _Called as called:
        return called.call
    raise TaskInvalid(
        f"the task's loss computed {type(model).__name__} without calling it: a model that is cut into sections is run "
        "by one call of the model itself; call model(...), or use ddp or fsdp"
    )
