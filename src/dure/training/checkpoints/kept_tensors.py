"""Check for tensors that a checkpoint cannot restore exactly, before anything is written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dure.strategies.state.tensor_shard import TensorShard
from dure.training.checkpoints.safetensors_file import check_dtype


def check_kind(name: str, value: Tensor | TensorShard) -> None:
    """Refuse a tensor that no file can hold.

    Raises:
        TypeError: The tensor is of such a kind; the message names it.
    """
    tensor = value.tensor if isinstance(value, TensorShard) else value
    kind = type(tensor)
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"tensor {name} is {layout}, which safetensors files cannot hold: make it dense")
    if hasattr(kind, "__tensor_flatten__"):
        raise TypeError(f"tensor {name} is a {kind.__module__}.{kind.__qualname__}, which is made of several tensors")
    check_dtype(name, tensor)


def check_apart(optimizer: Mapping[str, Tensor | TensorShard], model: Mapping[str, Tensor | TensorShard]) -> None:
    """Refuse tensors of an optimiser that share memory with each other or with the model.

    After a resume each would have memory of its own, and a change of one would no longer change the other. Tensors that
    are identical have one name, and stay identical.

    Raises:
        TypeError: Two tensors share memory; the message names both.
    """
    owners = {_storage(value): f"the model's {name}" for name, value in model.items()}
    for name, value in optimizer.items():
        tensor = value.tensor if isinstance(value, TensorShard) else value
        if tensor.numel() and (other := owners.setdefault(_storage(value), name)) != name:
            raise TypeError(
                f"{name} is a view of memory that {other} is a view of too, and a checkpoint would part them: give "
                "each a tensor of its own, by clone()"
            )


def _storage(value: Tensor | TensorShard) -> tuple[torch.device, int]:
    tensor = value.tensor if isinstance(value, TensorShard) else value
    return tensor.device, tensor.untyped_storage().data_ptr()
