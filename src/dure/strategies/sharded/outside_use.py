"""Errors of units that `fsdp` gathers separately, and uses of their parameters outside them."""

from collections.abc import Container, Iterator
from contextlib import contextmanager

from dure.errors import TaskInvalid
from dure.strategies.state.containers import tensors_in
from dure.torchcompat.gradients import Arguments


@contextmanager
def explained() -> Iterator[None]:
    """Enter the context in which torch's errors about units are replaced by sentences with a cure.

    Raises:
        TaskInvalid: A unit changes an input in place, a parameter of a unit is used outside it, or the loss takes
            derivatives of derivatives through one.
    """
    try:
        yield
    except RuntimeError as error:
        if "is a view and is being modified inplace" in str(error):
            raise TaskInvalid(
                "a unit changes one of its inputs in place, which fully_shard gives it as a view: let it make a new "
                "tensor (x = x + y), name other units with --fsdp.units, or use ddp"
            ) from error
        if "out of bounds for storage of size 0" in str(error):
            raise TaskInvalid(
                "a backward pass needs the parameters of a unit after the unit's own backward, which frees them: the "
                "task takes derivatives of derivatives (torch.autograd.grad with create_graph, as for a gradient "
                "penalty), or goes through a graph twice; use ddp"
            ) from error
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise _used_outside(f"{str(error).splitlines()[0]:.200}") from error


def without_shards(shards: Container[int], function: type, arguments: Arguments) -> Arguments:
    """Refuse a shard among the arguments of an autograd function, which would get no gradient for it.

    Raises:
        TaskInvalid: There is one.
    """
    if any(id(tensor) in shards for tensor in tensors_in(arguments)):
        raise _used_outside(f"{function.__qualname__}.apply")
    return arguments


def _used_outside(where: str) -> TaskInvalid:
    return TaskInvalid(
        "a parameter of a unit was used outside that unit's forward, where this rank has a shard of it only "
        f"({where}): name other units with --fsdp.units, or use ddp"
    )
