"""`apex.parallel.SyncBatchNorm`, and the functions that put it into a model."""

import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from dure.errors import TaskInvalid
from dure.strategies.state.batchnorm import SyncBatchNorm as OverRanks
from dure.strategies.state.batchnorm import is_plain
from dure.torchcompat.modules import BatchNorm


class SyncBatchNorm(OverRanks):
    """BatchNorm with the statistics of all ranks of a group, for any device and number of dimensions.

    Ranks may have different numbers of samples.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        """Make the layer.

        Args:
            num_features: Channels.
            eps: Added to the variance.
            momentum: Weight of a batch in the running statistics; None for their plain mean.
            affine: Whether there are weights and a bias.
            track_running_stats: Whether there are running statistics.
            process_group: Ranks whose samples count; None for all.
            channel_last: Whether channels are the last dimension, and not the second.
            fuse_relu: Whether a ReLU follows.
        """
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group, self.channel_last, self.fuse_relu = process_group, channel_last, fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalise by the statistics of the group in training, and add `z` before the ReLU, if given."""
        moved = input.movedim(-1, 1) if self.channel_last else input
        # without a group of processes it is a plain layer, as in Apex
        normalise = super().forward if dist.is_initialized() else functools.partial(BatchNorm.forward, self)
        out = normalise(moved)
        out = out.movedim(1, -1) if self.channel_last else out
        out = out if z is None else out + z
        return functional.relu(out) if self.fuse_relu else out


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """Replace every BatchNorm of a model by one over ranks, with its weights and statistics; return the model.

    Args:
        module: Model, or one layer.
        process_group: Ranks whose samples count; None for all.
        channel_last: Whether channels are the last dimension.

    Raises:
        TaskInvalid: A layer has code, hooks or attributes of its own, which would be lost.
    """
    new: dict[int, nn.Module] = {}  # by identity, because a model may use one layer in several places
    for name, each in module.named_modules():
        if isinstance(each, BatchNorm) and not isinstance(each, OverRanks | nn.modules.instancenorm._InstanceNorm):
            if not is_plain(each):
                raise TaskInvalid(
                    f"convert_syncbn_model would lose what {name or 'the model'} ({type(each).__name__}) does beside "
                    "BatchNorm, in code, hooks or attributes of its own: replace it in the model first"
                )
            new[id(each)] = _converted(each, process_group, channel_last)
    for parent in [*module.modules()]:
        for name, child in [*parent._modules.items()]:
            if id(child) in new:
                setattr(parent, name, new[id(child)])
    return new.get(id(module), module)


def _converted(old: Any, process_group: dist.ProcessGroup | None, channel_last: bool) -> SyncBatchNorm:
    new = SyncBatchNorm(
        old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, process_group, channel_last
    )
    new.running_mean, new.running_var = old.running_mean, old.running_var
    new.num_batches_tracked = old.num_batches_tracked
    if old.affine:
        new.weight, new.bias = old.weight, old.bias
    new.training = old.training
    return new


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Create groups of consecutive ranks, on all ranks, and return that of this one; None for 0, which means all.

    Raises:
        ValueError: The number of ranks is no multiple of the size.
    """
    if group_size == 0:
        return None
    world_size = dist.get_world_size()
    if group_size < 0 or world_size < group_size or world_size % group_size:
        raise ValueError(f"{world_size} ranks cannot be divided into groups of {group_size}")
    own = None
    for first in range(0, world_size, group_size):
        ranks = [*range(first, first + group_size)]
        group = dist.new_group(ranks)
        own = group if dist.get_rank() in ranks else own
    return own
