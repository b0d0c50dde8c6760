"""Replicas of a model inside one process, and the primitives that move tensors between them.

torch's `nn.DataParallel` has the same five parts (replicate, scatter, parallel apply, gather, reduce) but refuses the
CPU. Here a device may also be virtual: several replicas on one CPU, each driven by its own thread.
"""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dure.errors import TaskInvalid


def build_replicas(model: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Return one module per device, the first of them the model itself."""
    return [model, *(copy.deepcopy(model).to(device) for device in devices[1:])]


class BroadcastParameters(torch.autograd.Function):
    """Copy parameters to the other devices; backward adds the replicas' gradients up, in the devices' order."""

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *parameters: Tensor) -> tuple[Tensor, ...]:
        """Return the copies, device by device: `len(devices) * len(parameters)` tensors."""
        ctx.home = parameters[0].device
        ctx.num_parameters = len(parameters)
        copies = [p.detach().to(device, copy=True, non_blocking=True) for device in devices for p in parameters]
        ctx.mark_non_differentiable(
            *(c for i, c in enumerate(copies) if not parameters[i % len(parameters)].requires_grad)
        )
        ctx.set_materialize_grads(False)
        return tuple(copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Add up the gradients of each parameter's copies on the first device."""
        summed: list[Tensor | None] = []
        for i in range(ctx.num_parameters):
            arrived = [g.to(ctx.home) for g in gradients[i :: ctx.num_parameters] if g is not None]
            summed.append(torch.stack(arrived).sum(0) if len(arrived) > 1 else (arrived[0] if arrived else None))
        return (None, *summed)


def gather(outputs: Sequence[Any], device: torch.device) -> Any:
    """Concatenate the replicas' outputs along dim 0 on one device, through tuples, lists and mappings.

    Raises:
        TaskInvalid: A scalar output: it stands for its own samples only, and a mean of means is wrong.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        if first.dim() == 0:
            raise TaskInvalid(
                "the model returned a scalar on each device: dp gathers outputs along the samples; return one row per "
                "sample and reduce in the task's loss, or use balanced_dp or ddp"
            )
        return torch.cat([output.to(device) for output in outputs])
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(gather(items, device) for items in zip(*outputs, strict=True)))
    if isinstance(first, tuple | list):
        return type(first)(gather(items, device) for items in zip(*outputs, strict=True))
    if isinstance(first, dict):
        return type(first)((key, gather([output[key] for output in outputs], device)) for key in first)
    return first


class DeviceThreads:
    """A thread per device for what runs on all of them at once."""

    def __init__(self, devices: Sequence[torch.device], *, in_order: bool) -> None:
        self._devices = devices
        # CPU threads share one generator: only one after the other do they draw the same numbers every time
        self._pool = None if in_order else ThreadPoolExecutor(len(devices), "dure-device")

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run call `i` on device `i`'s thread, in this thread's gradient mode; return the answers in order.

        Raises:
            Exception: The first device's exception, after all threads have come to an end.
        """
        grad_enabled = torch.is_grad_enabled()

        def on_device(device: torch.device, call: Callable[[], Any]) -> Any:
            with torch.set_grad_enabled(grad_enabled):
                if device.type == "cuda":
                    with torch.accelerator.device_index(device.index):
                        return call()
                return call()

        pairs = list(zip(self._devices, calls, strict=False))
        if self._pool is None or len(pairs) == 1:
            return [on_device(device, call) for device, call in pairs]
        futures = [self._pool.submit(on_device, device, call) for device, call in pairs]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def copy_state(source: nn.Module, replicas: Sequence[nn.Module], *, buffers_only: bool = False) -> None:
    """Copy parameters and buffers into replicas.

    Communication: (P-1) times the copied bytes leave the source's device.
    """
    with torch.no_grad():
        for replica in replicas:
            pairs = list(zip(replica.buffers(), source.buffers(), strict=True))
            if not buffers_only:
                pairs += zip(replica.parameters(), source.parameters(), strict=True)
            for target, value in pairs:
                target.copy_(value, non_blocking=True)
