"""`apex.parallel.DistributedDataParallel` over the reducer of `ring_ddp`, and `apex.parallel.Reducer`."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dure.parallel import RingDDP


class DistributedDataParallel(RingDDP):
    """Model whose gradients are averaged over all ranks while backward runs, with the options of Apex.

    Parameters are those of rank 0 at the start; buffers are left to each rank, as in Apex.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Iterable[nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        """Send rank 0's parameters to all ranks, and prepare the buckets.

        Args:
            module: Model, on one device.
            message_size: Gradient elements from which a bucket is full.
            delay_allreduce: Whether nothing is sent before backward has ended.
            shared_param: Refused, as in Apex.
            allreduce_trigger_params: Parameters at which a bucket ends, in place of `message_size`.
            retain_allreduce_buffers: Whether `allreduce_buffers` has the averaged buckets.
            allreduce_always_fp32: Whether halves are sent and added in float32.
            num_allreduce_streams: Number of streams; buckets are reduced one after the other whatever it is.
            allreduce_communicators: Groups and streams; checked as in Apex, and not needed.
            gradient_average: Whether the sum over ranks is divided by their number.
            gradient_predivide_factor: Divisor before adding up.
            gradient_average_split_factor: Without effect, as in Apex.
            prof: Without effect: there are no NVTX ranges.

        Raises:
            ValueError: Options exclude each other.
        """
        if num_allreduce_streams > 1 and delay_allreduce:
            raise ValueError("num_allreduce_streams above 1 needs delay_allreduce=False")
        if allreduce_communicators and num_allreduce_streams != len(allreduce_communicators[0]):
            raise ValueError("allreduce_communicators needs one group for each of num_allreduce_streams")
        if shared_param is not None:
            raise ValueError("shared_param is no longer an option: use delay_allreduce to send after backward")
        if allreduce_trigger_params is not None and delay_allreduce:
            raise ValueError("allreduce_trigger_params needs delay_allreduce=False")
        super().__init__(
            module,
            message_size=message_size,
            delay_allreduce=delay_allreduce,
            allreduce_always_fp32=allreduce_always_fp32,
            gradient_average=gradient_average,
            gradient_predivide_factor=gradient_predivide_factor,
            broadcast_buffers=False,
            bucket_ends=allreduce_trigger_params,
        )
        self.retain_allreduce_buffers = retain_allreduce_buffers

    @property
    def allreduce_buffers(self) -> list[Tensor]:
        """Averaged buckets of the last backward; empty unless they are retained."""
        return [bucket.gradients for bucket in self.gradients.buckets] if self.retain_allreduce_buffers else []

    def enable_allreduce(self) -> None:
        """Average from the next backward on."""
        self._synchronises = True

    def disable_allreduce(self) -> None:
        """Accumulate gradients of this rank alone from the next backward on."""
        self._synchronises = False


class Reducer:
    """Averages of gradients over all ranks, when `reduce` is called."""

    def __init__(self, module_or_grads_list: Any) -> None:
        """Take a model, whose parameters become those of rank 0, or tensors in containers.

        Communication: one broadcast of the parameters of each dtype.
        """
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads = [] if self.module is not None else list(_tensors(module_or_grads_list))
        if self.module is not None:
            for flat, parts in _flat([parameter.detach() for parameter in self.module.parameters()]):
                dist.broadcast(flat, 0)
                _scatter(flat, parts)

    def reduce(self) -> None:
        """Replace the gradients by their means over the ranks; one that only other ranks have counts as zero here.

        Communication: one all_reduce for each dtype, and one for the parameters that have a gradient.
        """
        grads = self.grads
        if self.module is not None:
            grads = _gradients_of([each for each in self.module.parameters() if each.requires_grad])
        for flat, parts in _flat([each.detach() for each in grads]):
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            _scatter(flat, parts)


def _gradients_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of the parameters that any rank has used."""
    if not parameters:
        return []
    used = torch.tensor([each.grad is not None for each in parameters], dtype=torch.uint8)
    used = used.to(parameters[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    found = []
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if is_used:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found.append(parameter.grad)
    return found


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Iterable):
        for each in found:
            yield from _tensors(each)


def _flat(tensors: list[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield one vector for each dtype and device, and the tensors that it was made of."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for parts in kinds.values():
        yield torch.cat([part.reshape(-1) for part in parts]), parts


def _scatter(flat: Tensor, parts: list[Tensor]) -> None:
    start = 0
    for part in parts:
        part.copy_(flat[start : start + part.numel()].view_as(part))
        start += part.numel()
