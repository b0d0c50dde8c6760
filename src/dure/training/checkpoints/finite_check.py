"""Check of weights for NaN and infinity, during the hashing of a checkpoint, which reads every byte of them anyway."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dure.errors import WeightsNotFinite
from dure.strategies.state.tensor_shard import own_shard
from dure.training.checkpoints.durable_files import Buffer

_INFINITY: dict[torch.dtype, np.unsignedinteger[Any]] = {
    torch.float64: np.uint64(0x7FF0000000000000),
    torch.float32: np.uint32(0x7F800000),
    torch.complex64: np.uint32(0x7F800000),
    torch.float16: np.uint16(0x7C00),
    torch.bfloat16: np.uint16(0x7F80),
}
"""The bits of infinity; without the sign, those of finite numbers are less, and those of NaN are more."""


class FiniteCheck:
    """Check of parameters' bytes as they go by: one more pass over what the processor has near anyway."""

    def __init__(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Name the parameters that must be finite, with their dtypes."""
        self._infinities = {name: _INFINITY[dtype] for name, dtype in dtypes.items() if dtype in _INFINITY}
        self._room = np.empty(0, np.uint8)

    def __call__(self, name: str | None, data: Buffer) -> None:
        """Look at some bytes of a tensor, which begin and end with an item.

        Raises:
            WeightsNotFinite: One of them is not finite.
        """
        infinity = None if name is None else self._infinities.get(name)
        if infinity is None:
            return
        kind = infinity.dtype
        bits = np.frombuffer(data, kind)
        if len(self._room) < bits.nbytes:
            self._room = np.empty(bits.nbytes, np.uint8)
        without_sign = self._room[: bits.nbytes].view(kind)
        np.bitwise_and(bits, kind.type(np.iinfo(kind).max >> 1), out=without_sign)
        if without_sign.max() >= infinity:
            raise WeightsNotFinite(f"the parameter {name} is not finite")


def finite_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that are finite on this rank: some are made with infinities (masks)."""
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, p in named if not is_lazy(p) and _is_finite(own_shard(p).tensor.detach()))


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype not in _INFINITY or tensor.numel() == 0:
        return True
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return bool(torch.stack(torch.aminmax(real)).isfinite().all())
