"""Parameters of `FullyShardedDataParallel` (FSDP1) put together from the shards of all ranks (private in torch)."""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class FlatShard:
    """Shard of a parameter on this rank."""

    group: Any
    """Group over which it is divided; None if each rank has all of it."""
    num_elements: int | None
    """Elements of the whole parameter without padding; None if there is no padding."""

    def whole(self, values: Tensor | None) -> Tensor | None:
        """Return the flat tensor of all ranks' values, which are of the parameter or its gradient.

        Communication:
            Two blocking all-gathers in the group of the shard; all its ranks must call this, also those with no values.

        Args:
            values: Values of this rank; None if it has none.

        Returns:
            All values, or None if no rank has any.
        """
        here = torch.empty(0) if values is None else values.detach().flatten()
        if self.group is not None:
            here = _gathered(here, self.group)
        if not len(here):
            return None
        return here if self.num_elements is None else here[: self.num_elements]


def flat_shards(module: nn.Module) -> dict[int, FlatShard]:
    """Return the shards of a module's parameters that FSDP1 has divided, by the identity of each parameter."""
    found: dict[int, FlatShard] = {}
    if not dist.is_available() or not dist.is_initialized():
        return found
    kind = importlib.import_module("torch.distributed.fsdp").FullyShardedDataParallel
    for part in module.modules():
        handle = part._handle if isinstance(part, kind) else None
        if handle is None:
            continue
        group = handle.process_group if handle.uses_sharded_strategy and handle.world_size > 1 else None
        flat = handle.flat_param
        originals = flat._params if handle._use_orig_params else None
        if originals is None:
            found[id(flat)] = FlatShard(group, flat._unpadded_unsharded_size.numel())
        else:
            found |= {id(original): FlatShard(group, None) for original in originals}
    return found


def _gathered(values: Tensor, group: Any) -> Tensor:
    world_size = dist.get_world_size(group)
    facts: list[Any] = [None] * world_size
    dist.all_gather_object(facts, (len(values), values.dtype), group=group)
    longest = max(length for length, _ in facts)
    if not longest:
        return values
    kind = next(kind for length, kind in facts if length)
    padded = torch.zeros(longest, dtype=kind, device=values.device)
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in facts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:length] for part, (length, _) in zip(parts, facts, strict=True)])
