"""Refusal of collectives in calls that one rank makes alone: the other ranks would not join them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from dure.torchcompat.collectives import replaced_collectives


class CollectiveCalled(BaseException):
    """Call of a collective by a task that runs on one rank only; a BaseException, so that no task catches it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@contextmanager
def no_collectives() -> Iterator[None]:
    """Refuse collectives inside the context, before they send anything.

    Raises:
        CollectiveCalled: A collective was called.
    """
    calls: list[CollectiveCalled] = []

    def refuse(name: str) -> NoReturn:
        calls.append(CollectiveCalled(name))
        raise calls[-1]

    def refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: refuse(name)

    try:
        with replaced_collectives(refusing):
            yield
    finally:
        if calls:  # a backward pass may have turned it into another error
            raise calls[0]
