"""Compression of gradients on their way between ranks."""

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """Conversion of a tensor before it is sent, and back."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return a received tensor in its first form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Transfer of tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Transfer of floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return a floating-point tensor in float16, any other itself, and its type."""
        sent = tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor
        return sent, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor in its first type."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """Choices for `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor
