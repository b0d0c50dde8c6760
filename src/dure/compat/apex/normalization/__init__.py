"""`apex.normalization`: torch's layers by Apex's names; torch.compile fuses them."""

from typing import Any

from torch import nn


class FusedLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` with Apex's arguments."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        """Create the layer; `memory_efficient` has no effect."""
        super().__init__(normalized_shape, eps, elementwise_affine)


class FusedRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` with Apex's arguments."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        """Create the layer; `memory_efficient` has no effect."""
        super().__init__(normalized_shape, eps, elementwise_affine)


MixedFusedLayerNorm = FusedLayerNorm
MixedFusedRMSNorm = FusedRMSNorm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]
