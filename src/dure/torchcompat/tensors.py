"""Tensors: their memory, parts and attributes."""

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor that holds a DTensor's values on this rank (private in torch); others are returned as is."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def read_whole_numbers() -> None:
    """Let a number that is read from a DTensor be that of the whole in this process (private in torch).

    By itself `.item()` of a sum over shards is that of this rank's shard. Every rank of the mesh must read it.
    """
    from torch.distributed.tensor import DTensor, Replicate

    def read(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (value,) = args
        return operator(value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local())

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = read


def divided_like(parameter: Any, local: Tensor) -> Tensor:
    """Return a DTensor of a rank's part, divided like a parameter; it stays on its device (private in torch).

    `DTensor.from_local` would move a part in host memory to the devices of the mesh.
    """
    from torch.distributed.tensor import DTensor  # takes 0.4 s to import, and is there where a parameter is one

    spec = parameter._spec
    constructor: Any = DTensor
    whole: Tensor = constructor(
        local, replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype)), requires_grad=False
    )
    return whole


def multiply_(tensors: list[Tensor], factor: "Tensor | float") -> None:
    """Multiply tensors in place by one factor, in one call for all that share device and dtype (private in torch)."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def copy_all(targets: list[Tensor], sources: list[Tensor], *, non_blocking: bool = False) -> None:
    """Copy tensors into others of the same shapes, in as few calls as devices and dtypes permit (private in torch)."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def give_data(tensor: Tensor, data: Tensor) -> None:
    """Give a tensor other memory, as `tensor.data = data` does; it stays the same object, with its hooks.

    torch refuses that between the host and kinds of devices from outside (PrivateUse1), whose tensors have another
    implementation. There the two implementations are swapped (private in torch).
    """
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
        return
    moved: Any = data.detach().requires_grad_(tensor.requires_grad)
    owner: Any = tensor
    torch._C._swap_tensor_impl(owner, moved)
    # their C++ side stayed with the other implementation
    owner._backward_hooks = owner._backward_hooks
    owner._post_accumulate_grad_hooks = owner._post_accumulate_grad_hooks


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that were set on a tensor, without those of torch's own classes of tensors."""
    return {name: value for name, value in vars(tensor).items() if name not in ("_local_tensor", "_spec")}


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as bytes in one dimension: a view of its memory if it is contiguous.

    Of a DTensor they are those that this rank has: operators on DTensors, `torch.equal` too, exchange messages, and one
    rank alone may compare.

    `view` requires an innermost stride of 1. A dimension of size 1 keeps any other stride, through `contiguous` and
    `reshape` too: a column of a batch of one sample has that of its row.
    """
    flat = local_tensor(tensor).detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FlatShard:
    """Shard of a parameter on this rank, as FullyShardedDataParallel (FSDP1) divides it (private in torch)."""

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
    here = torch.tensor([len(values), _FLOATING.index(values.dtype)], device=values.device)
    facts = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
    dist.all_gather(facts, here, group=group)
    lengths = [int(length) for length, _ in facts]
    if not any(lengths):
        return values
    kind = next(_FLOATING[int(kind)] for length, kind in facts if length)
    padded = torch.zeros(max(lengths), dtype=kind, device=values.device)
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in facts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
