"""Primitives for several devices in one process: copies of parameters with their gradients, and a thread per device.

A device may also be virtual: several replicas on one CPU, each driven by its own thread.
"""

import contextvars
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dure.errors import TaskInvalid
from dure.host.device_kinds import device_kind
from dure.torchcompat.modes import has_modes_of_thread
from dure.torchcompat.modules import transforms_in_turn, watched_parametrizations


class BroadcastParameters(torch.autograd.Function):
    """Copy of parameters on other devices; backward sums the replicas' gradients in the devices' order."""

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
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Sum the gradients of each parameter's copies on the first device; double backward is supported."""
        summed: list[Tensor | None] = []
        for i in range(ctx.num_parameters):
            arrived = [g.to(ctx.home) for g in gradients[i :: ctx.num_parameters] if g is not None]
            summed.append(functools.reduce(operator.add, arrived) if arrived else None)
        return (None, *summed)


class DeviceThreads:
    """Threads for calls on all devices at once, one per device."""

    def __init__(self, devices: Sequence[torch.device], *, in_order: bool) -> None:
        self._devices = devices
        # CPU threads share one generator: only in sequence do they draw the same numbers every time
        self._pool = None if in_order else ThreadPoolExecutor(len(devices), "dure-device")

    def run(self, calls: Sequence[Callable[[], Any]], *, in_order: bool = False) -> list[Any]:
        """Run call `i` on device `i`'s thread, in this thread's modes; return the results in order.

        Args:
            calls: At most one for each device.
            in_order: Run them one after the other in this thread.

        Raises:
            TaskInvalid: One uses `parametrize.cached()`, whose cache all devices have in common.
            Exception: The first device's exception, after all threads have finished.
        """
        with watched_parametrizations(_refuse_cached) if len(calls) > 1 else nullcontext():
            return self._run(list(zip(self._devices, calls, strict=False)), in_order=in_order)

    def _run(self, pairs: list[tuple[torch.device, Callable[[], Any]]], *, in_order: bool) -> list[Any]:
        # several threads may not enter a context of the task around its model's call at the same time
        if self._pool is None or in_order or len(pairs) == 1 or has_modes_of_thread():
            return [_on_device(device, call) for device, call in pairs]
        modes = _Modes({device.type for device in self._devices})
        with transforms_in_turn():
            futures = [self._pool.submit(modes.run, functools.partial(_on_device, *pair)) for pair in pairs]
            errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _refuse_cached() -> None:
    raise TaskInvalid(
        "parametrize.cached() keeps one tensor for all devices of a process, and each needs its own: leave it out, or "
        "use ddp"
    )


def _on_device(device: torch.device, call: Callable[[], Any]) -> Any:
    if not device_kind(device.type).has_several:
        return call()
    with torch.accelerator.device_index(device.index):
        return call()


class _Modes:
    """Settings that torch and Python keep for each thread: gradients, inference, autocast and context variables."""

    def __init__(self, device_types: set[str]) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {"cpu", *device_types}
        ]
        self._context = contextvars.copy_context()

    def run(self, call: Callable[[], Any]) -> Any:
        # a context is entered by one thread at a time
        return self._context.copy().run(self._in_modes, call)

    def _in_modes(self, call: Callable[[], Any]) -> Any:
        with self._entered():
            return call()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, is_enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_enabled))
            yield
