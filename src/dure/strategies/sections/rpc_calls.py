"""Messages between the ranks of an rpc_model: a call of the model, and a section's result."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dure.errors import FAILED, DureError, message_of
from dure.failures.frames import format_error, frames_of
from dure.failures.report import user_line
from dure.strategies.contract.batches import map_tensors
from dure.strategies.sections.values import Description
from dure.terminal import print_traceback

HOST = torch.device("cpu")
"""Device of tensors while they are sent."""


class Call(NamedTuple):
    """One call of the model, on its way through the sections."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int
    """Seed of the sections' random numbers."""
    is_training: bool
    has_gradient: bool


class Result(NamedTuple):
    """Result of a section: the value for the next one, or the model's output, and the blocks' values so far."""

    value: Any
    known: list[Description]


class Failed(NamedTuple):
    """Result of a section that raised: an exception sent through RPC would have its traceback as its message."""

    message: str
    exit_code: int

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "Failed":
        """Return the failure of a rank; the traceback is written to this rank's log."""
        print_traceback(format_error(error))
        if isinstance(error, DureError):
            return cls(str(error), error.exit_code)
        line, last = user_line(error), frames_of(error)[-1]
        where = f"{last.filename}:{last.lineno} in {last.name}: {last.line}" if line is None else str(line)
        return cls(f"rank {rank} failed in its section: {type(error).__name__}: {message_of(error)}\n  {where}", FAILED)


_IN_PYTHON = re.compile(r"Error on Node (\d+): python_error$")
"""End of torch's message if Python code raised on another rank in the backward pass: it does not say what."""


def backward_error(error: RuntimeError) -> Exception:
    """Return the error to raise for one of the distributed backward pass, with the rank whose code raised it."""
    if (found := _IN_PYTHON.search(message_of(error).strip())) is None:
        return error
    return DureError(
        f"rank {found[1]} failed in the backward pass of its section: a hook, or the backward of an autograd.Function, "
        "raised an exception there, of which torch's distributed backward tells no more; --strategy pipeline or single "
        "shows it with its line"
    )


def leads_to(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> bool:
    """Return whether backward from `outputs` reaches any of `inputs`; True also if none of these has a `grad_fn`.

    torch's distributed backward waits for each message that carried a gradient, forever if nothing leads to it.
    """
    ends = [tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None]
    if not ends:
        return True
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = {id(node) for node in waiting}
    alive: list[Any] = []  # kept alive, so that no other node gets the same id
    while waiting:
        node = waiting.pop()
        alive.append(node)
        if any(node is end for end in ends):
            return True
        for following, _ in node.next_functions:
            if following is not None and id(following) not in seen:
                seen.add(id(following))
                waiting.append(following)
    return False


def on_host(result: Any) -> Any:
    """Return a result in host memory, for sending; a reference is returned unchanged."""
    return map_tensors(result, _travelling) if isinstance(result, Result) else result


def _travelling(tensor: Tensor) -> Tensor:
    # a leaf would arrive as a leaf, with its own gradient that no rank collects
    is_leaf = tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled()
    return (tensor.view_as(tensor) if is_leaf else tensor).to(HOST)
