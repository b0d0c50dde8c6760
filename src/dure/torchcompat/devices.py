"""Devices: compilation for them, pinned memory, generators and near cores."""

import importlib
import inspect
import logging
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Generator, Tensor

from dure.errors import EnvironmentLacks


def has_inductor_for(device_type: str) -> bool:
    """Return whether Inductor generates code for a type of device (private in torch); the import takes seconds."""
    common: Any = importlib.import_module("torch._inductor.codegen.common")
    common.init_backend_registration()
    return common.get_scheduling_for_device(device_type) is not None


def pin_host_memory(address: int, num_bytes: int) -> bool:
    """Lock pages of the host, so that CUDA copies into them asynchronously; return whether that succeeded.

    `pin_memory` allocates new memory; this is for existing memory.
    """
    runtime = torch.cuda.cudart()
    if runtime is None:  # another kind of device, or one with a compatible API under CUDA's name
        return False
    is_pinned = int(runtime.cudaHostRegister(address, num_bytes, 0)) == 0
    if not is_pinned:
        with suppress(RuntimeError):  # the error is kept until the next kernel, which would raise it
            torch.zeros((), device=torch.accelerator.current_accelerator())
    return is_pinned


def unpin_host_memory(address: int) -> None:
    """Undo `pin_host_memory`."""
    torch.cuda.cudart().cudaHostUnregister(address)


def default_generator(device: torch.device) -> Generator:
    """Return the generator that random functions use by default on `device`.

    `torch.accelerator` has no function for it, and every backend has another name for it.
    """
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    if not hasattr(module, "default_generators"):  # a kind of device from outside has the states only
        return cast(Generator, _GeneratorOfModule(module, torch.device(device.type, index)))
    return cast(Generator, module.default_generators[index])


class _GeneratorOfModule:
    """Default generator of a device, by the functions that torch requires of modules of devices from outside."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self.device = device

    def get_state(self) -> Tensor:
        return cast(Tensor, self._module.get_rng_state(self.device))

    def set_state(self, state: Tensor) -> "_GeneratorOfModule":
        self._module.set_rng_state(state, self.device)
        return self

    def manual_seed(self, seed: int) -> "_GeneratorOfModule":
        return self.set_state(torch.Generator(self.device).manual_seed(seed).get_state())


def bind_to_numa_node(device: int, mode: str) -> None:
    """Bind the threads of this process to the cores near a CUDA device (private in torch, whose launcher does it).

    Args:
        device: Index of the device.
        mode: Name of a `torch.numa.binding.AffinityMode`.

    Raises:
        EnvironmentLacks: The system does not tell which cores are near it, or does not allow them.
    """
    try:
        from torch.numa import binding

        options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode), should_fall_back_if_binding_fails=False)
        log, level = binding.logger, binding.logger.level
        log.setLevel(logging.CRITICAL)
        try:
            apply: Any = binding._maybe_apply_numa_binding_to_current_process
            index, others = inspect.signature(apply).parameters  # `device_index` since torch 2.14
            apply(**{index: device, others: options})
        finally:
            log.setLevel(level)
    except Exception as error:
        raise EnvironmentLacks(
            f"numa_binding is {mode}, and the cores near device {device} cannot be used "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): leave it out"
        ) from error
