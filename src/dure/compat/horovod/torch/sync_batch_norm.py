"""Batch normalisation with the statistics of all ranks, on any device."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from dure.compat.horovod.common.basics import size
from dure.compat.horovod.engine.requests import SUM
from dure.compat.horovod.torch.movements import allgather
from dure.compat.horovod.torch.reductions import allreduce


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation of any dimension; in training, mean and variance are those of all ranks' samples."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a batch of shape `(N, C, ...)`."""
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        running = None
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
            running = (self.running_mean, self.running_var)
        return _Normalize.apply(input, self.weight, self.bias, running, self.eps, momentum)  # type: ignore[no-any-return, no-untyped-call]


class _Normalize(torch.autograd.Function):
    """Normalisation by the statistics of all ranks, of which the gradient takes account."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, running: Any, eps: float, momentum: float
    ) -> Tensor:
        """Gather each rank's count, mean and squared deviations, and combine them (Chan et al., 1983)."""
        wide = input if input.dtype in (torch.float32, torch.float64) else input.float()
        rows = wide.transpose(0, 1).reshape(wide.shape[1], -1)
        count, channels = rows.shape[1], rows.shape[0]
        mean = rows.mean(1) if count else rows.new_zeros(channels)
        deviations = (rows - mean[:, None]).square().sum(1)
        own = torch.cat([rows.new_full((1,), float(count)), mean, deviations])[None]
        gathered = allgather(own, name="sync_batch_norm.statistics")
        counts, means, squares = gathered[:, :1], gathered[:, 1 : channels + 1], gathered[:, channels + 1 :]
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (squares.sum(0) + (counts * (means - mean).square()).sum(0)) / total
        if running is not None:
            unbiased = variance * (total / (total - 1).clamp(min=1))
            for buffer, value in zip(running, (mean, unbiased), strict=True):
                buffer.mul_(1 - momentum).add_(value.to(buffer.dtype), alpha=momentum)
        shape = [1, channels, *[1] * (input.dim() - 2)]
        inverse = (variance + eps).rsqrt()
        normal = (wide - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, weight, inverse, total)
        output = normal if weight is None else normal * weight.view(shape)
        return (output if bias is None else output + bias.view(shape)).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Add up over ranks what depends on the common statistics; gradients of weight and bias stay local."""
        normal, weight, inverse, total = ctx.saved_tensors
        grad = grads[0].to(normal.dtype)
        channels = normal.shape[1]
        shape = [1, channels, *[1] * (normal.dim() - 2)]
        others = [dim for dim in range(normal.dim()) if dim != 1]
        of_bias, of_weight = grad.sum(others), (grad * normal).sum(others)
        sums = allreduce(torch.cat([of_bias, of_weight]), name="sync_batch_norm.gradients", op=SUM) / total
        scale = inverse if weight is None else inverse * weight
        centred = grad - sums[:channels].view(shape) - normal * sums[channels:].view(shape)
        of_input = (centred * scale.view(shape)).to(grads[0].dtype)
        needs = ctx.needs_input_grad
        return of_input, of_weight if needs[1] else None, of_bias if needs[2] else None, None, None, None
