"""Simulated devices of a kind from outside, as its maker's package would show them: by torch's own interfaces."""

from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from simulated_cuda_runtime import cuda, nccl

BACKEND = "fieldccl"


def show(core: ModuleType) -> None:
    """Give PrivateUse1 its name, its module and the backend for its tensors."""
    torch.utils.rename_privateuse1_backend(core.kind)
    module = ModuleType(f"torch.{core.kind}")
    functions = cuda.functions_of(core)
    del functions["default_generators"]  # torch does not ask makers for them
    for name, found in functions.items():
        setattr(module, name, found)
    module.device_count = lambda: _counted(core)
    module.simulated = core
    module.device = lambda device: torch.accelerator.device_index(cuda.index_of(core, device))
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch._register_device_module(core.kind, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)
    cuda.let_storages_move(core)
    if dist.is_available():
        dist.Backend.register_backend(BACKEND, _maker(core), extended_api=True, devices=[core.kind])


def _counted(core: ModuleType) -> int:
    """Count devices as a runtime does that has to start for it: children that are forked later have none."""
    if core.num_devices():
        core.claim()
    return core.num_devices()


def _maker(core: ModuleType) -> Any:
    group = nccl.group_class(core, BACKEND)

    def make(told: Any, options: Any) -> Any:
        options = nccl.Options()
        options._timeout = told.timeout or timedelta(minutes=10)
        options.group_name = told.group_id
        return group(told.store, told.group_rank, told.group_size, options)

    return make
