"""Tensors that a checkpoint gives back as they were; the others are refused before anything is written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dure.strategies.state.tensor_shard import TensorShard
from dure.training.checkpoints.safetensors_file import check_dtype


def check_kind(name: str, value: Tensor | TensorShard) -> None:
    """Refuse a tensor that no file can hold.

    Raises:
        TypeError: Names it.
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

    After a resume each has memory of its own, and a change of one would no longer be a change of the other. Tensors
    that are one and the same have one name, and stay one.

    Raises:
        TypeError: Names two of them.
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
