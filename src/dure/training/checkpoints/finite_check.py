"""Check of weights for NaN and infinity while a checkpoint is hashed, which reads every byte of them anyway."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dure.errors import WeightsNotFinite
from dure.strategies.state.tensor_shard import own_shard
from dure.training.checkpoints.direct_file import Buffer

_INFINITY: dict[torch.dtype, np.unsignedinteger[Any]] = {
    torch.float64: np.uint64(0x7FF0000000000000),
    torch.float32: np.uint32(0x7F800000),
    torch.complex64: np.uint32(0x7F800000),
    torch.float16: np.uint16(0x7C00),
    torch.bfloat16: np.uint16(0x7F80),
}
"""Bits of infinity by dtype; without the sign bit, those of finite numbers are lower, and those of NaN are higher."""


class FiniteCheck:
    """Check of the parameters' bytes as they are written, while they are still in the cache."""

    def __init__(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Set the parameters that must be finite, with their dtypes."""
        self._infinities = {name: _INFINITY[dtype] for name, dtype in dtypes.items() if dtype in _INFINITY}
        self._room = np.empty(0, np.uint8)

    def __call__(self, name: str | None, data: Buffer) -> None:
        """Check a block of a tensor's bytes, which must begin and end at item boundaries.

        Raises:
            WeightsNotFinite: An item is not finite.
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
    """Return the names of this rank's finite parameters; some models create parameters with infinities (masks)."""
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, p in named if not is_lazy(p) and _is_finite(own_shard(p).tensor.detach()))


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype not in _INFINITY or tensor.numel() == 0:
        return True
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return bool(torch.stack(torch.aminmax(real)).isfinite().all())
