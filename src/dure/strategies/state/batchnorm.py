"""BatchNorm layers: a version with statistics over the samples of all ranks, and whether a layer is frozen."""

from collections.abc import Container
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dure.errors import TaskInvalid
from dure.host.device_kinds import device_kind
from dure.strategies.state.objects.namespaces import ATOMS
from dure.strategies.state.trial import is_equal
from dure.torchcompat.modules import BatchNorm


class _AllReduceSum(torch.autograd.Function):
    """Sum over the ranks of a group; backward sums their gradients, because every rank's loss depends on the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        summed = tensor.detach().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        summed = gradient.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class SyncBatchNorm(BatchNorm):
    """Simple counterpart of torch's CUDA-only `SyncBatchNorm`, for any device and backend.

    Two all-reduces per forward (counts and sums, then squared deviations from the global mean), so that the variance
    has no cancellation, unlike a mean of squares; two in backward. Ranks may hold different numbers of samples.
    """

    process_group: dist.ProcessGroup | None = None
    """Ranks whose samples count; None for all."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs (B, C, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `(B, C, ...)` by the statistics of all ranks in training.

        In an evaluation ranks have different numbers of batches, so none waits for another: the running statistics are
        used, or if there are none those of the batch, as in nn.BatchNorm.
        """
        self._check_input_dim(input)
        if not self.training:
            plain: Tensor = super().forward(input)
            return plain
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        # half precision under autocast can hold neither a count above 2048 (256) nor a sum: use float32, as torch does
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        count = torch.full((1,), input.numel() // input.size(1), dtype=values.dtype, device=input.device)
        group = self.process_group
        summed = _AllReduceSum.apply(torch.cat([values.sum(dims), count]), group)  # type: ignore[no-untyped-call]
        count = summed[-1].detach()
        mean = summed[:-1] / count
        deviation = values - mean.view(shape)
        squares = _AllReduceSum.apply(deviation.square().sum(dims), group)  # type: ignore[no-untyped-call]
        variance = squares / count
        if self.running_mean is not None and self.running_var is not None:
            self._update_running(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        normalised: Tensor = deviation * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normalised = torch.addcmul(self.bias.view(shape), normalised, self.weight.view(shape))
        return normalised.to(input.dtype)

    def _update_running(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked or 1) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), momentum)


def convert_sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace every BatchNorm by one over all ranks: torch's on CUDA, dure's elsewhere.

    Parameters and buffers keep their identity and names, so an existing optimiser remains valid.

    Raises:
        TaskInvalid: A layer has code, hooks or attributes of its own, which may do more.
    """
    for path, module in model.named_modules():
        if isinstance(module, BatchNorm) and not is_plain(module):
            raise TaskInvalid(
                f"--sync-batchnorm replaces BatchNorm layers, and {path or 'the model'} ({type(module).__name__}) has "
                "code, hooks or attributes of its own, which would be lost: leave it out, or use torch's own layers"
            )
    return _converted(model, device)


def is_plain(module: BatchNorm) -> bool:
    """Return whether a layer is one of torch's or dure's classes, without hooks and attributes that may act."""
    if type(module).__module__ not in (__name__, nn.BatchNorm1d.__module__):
        return False
    return all(isinstance(value, ATOMS) for value in _further_attributes(module).values()) and not any(
        value for name, value in vars(module).items() if name.endswith("_hooks")
    )


def _further_attributes(module: BatchNorm) -> dict[str, Any]:
    """Return the attributes that no BatchNorm has by itself, such as the marks that libraries set on every layer."""
    known = {*vars(SyncBatchNorm(1)), "process_group"}
    return {name: value for name, value in vars(module).items() if name not in known}


def _converted(model: nn.Module, device: torch.device) -> nn.Module:
    # by identity, because a model may use one layer in several places
    new = {
        id(module): _synchronised(module, device)
        for module in model.modules()
        if isinstance(module, BatchNorm) and not isinstance(module, SyncBatchNorm)
    }
    for parent in [*model.modules()]:
        for name, child in [*parent._modules.items()]:
            if id(child) in new:
                setattr(parent, name, new[id(child)])
    return new.get(id(model), model)


def _synchronised(old: BatchNorm, device: torch.device) -> nn.Module:
    has_kernels = device_kind(device.type).has_sync_batchnorm
    new = nn.SyncBatchNorm.convert_sync_batchnorm(old) if has_kernels else _plainly_synchronised(old)
    vars(new).update(_further_attributes(old))
    return new


def _plainly_synchronised(old: BatchNorm) -> SyncBatchNorm:
    new = SyncBatchNorm(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats)
    new.load_state_dict(old.state_dict())
    if old.affine:
        new.weight, new.bias = old.weight, old.bias
    for name, buffer in old.named_buffers(recurse=False):
        new.register_buffer(name, buffer)
    new.train(old.training)
    return new


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of all BatchNorm layers by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        if isinstance(module, BatchNorm)
        for name, buffer in module.named_buffers(recurse=False)
    }


def learns_statistics(model: nn.Module, changed: Container[str]) -> bool:
    """Return whether a BatchNorm may have used the statistics of a batch in calls of the model.

    Args:
        model: Model.
        changed: Names of the buffers that the calls changed.
    """
    without_count = any(isinstance(m, BatchNorm) and m.num_batches_tracked is None for m in model.modules())
    return without_count or any(name in changed for name in statistics_of(model))


class FrozenStatistics:
    """Statistics of BatchNorm layers that training should leave as they are."""

    def __init__(self, model: nn.Module) -> None:
        """Record the current statistics."""
        self._model = model
        self._values = {name: buffer.clone() for name, buffer in statistics_of(model).items()}

    def have_changed(self) -> bool:
        """Return whether a layer has other statistics now."""
        now = statistics_of(self._model)
        return now.keys() != self._values.keys() or any(
            not is_equal(now[name], value) for name, value in self._values.items()
        )
