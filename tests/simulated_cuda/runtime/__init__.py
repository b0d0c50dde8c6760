"""Simulated devices: memory and kernels are the host's, the rules are CUDA's.

`import torch` calls `autoload`. If `SIMULATED_GPUS` is set, a CPU build of torch shows CUDA from then on; otherwise
nothing changes. `torch.cuda.simulated` is the compiled part: counts, memory, and devices that break. If
`SIMULATED_DEVICE_TYPE` is `privateuse1`, the same devices are of a kind from outside, as torch has it for makers of
others: `torch.fieldgpu`, with the backend `fieldccl`.

Variables: `SIMULATED_GPUS`, the number of devices of this host; `SIMULATED_GPU_BYTES`, the memory of each;
`SIMULATED_NVML`, what NVIDIA's management library reports.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

CORE = "simulated_cuda_runtime.core"


def autoload() -> None:
    """Show the devices, unless none are wanted or this torch has CUDA of its own."""
    if CORE in sys.modules or not os.environ.get("SIMULATED_GPUS") or torch.version.cuda:
        return
    core = _load_quietly()
    from simulated_cuda_runtime import cuda, nccl, nvml, outside

    if core.kind == "cuda":
        cuda.show(core)
        nccl.show(core)
        nvml.show(core)
    else:
        outside.show(core)


def _load_quietly() -> ModuleType:
    """Load the compiled part without the dispatcher's warnings that kernels of gloo are replaced."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        spec = importlib.util.spec_from_file_location(CORE, Path(__file__).with_name("core.so"))
        core = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(core)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
    sys.modules[CORE] = core
    return core
