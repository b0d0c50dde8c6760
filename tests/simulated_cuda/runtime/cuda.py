"""`torch.cuda` on simulated devices: what a build with CUDA has compiled in."""

import contextlib
import os
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from simulated_cuda_runtime import nvml
from torch import Tensor


def show(core: ModuleType) -> None:
    """Replace the functions of `torch.cuda` that a CPU build refuses."""
    cuda = torch.cuda
    torch.version.cuda = "13.0"
    cuda.simulated = core
    for name, found in functions_of(core).items():
        setattr(cuda, name, found)
    for name, found in _compiled(core).items():
        setattr(torch._C, name, found)
    cuda.nccl.version = lambda: (2, 28, 0)
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # it warns of every build without cuDNN
    let_storages_move(core)


def functions_of(core: ModuleType) -> dict[str, Any]:
    """Return what the module of a kind of devices, such as `torch.cuda`, has."""
    return {
        **_counting(core),
        **_describing(core),
        **_drawing(core),
        **_measuring(core),
        **_streaming(core),
        "empty_cache": lambda: None,
    }


def index_of(core: ModuleType, device: Any = None) -> int:
    """Return the index that a caller of `torch.cuda` means; None and -1 are the current device."""
    if device is None:
        return core.current_device()
    if not isinstance(device, int):
        device = torch.device(device).index
    return core.current_device() if device is None or device < 0 else device


def _counting(core: ModuleType) -> dict[str, Any]:
    def device_count() -> int:
        # by NVML, which starts nothing, and otherwise by the driver
        return core.num_devices() if nvml.is_installed() else core.count_by_driver()

    def is_available() -> bool:
        # without this variable torch asks CUDA's driver, after which a forked process has no devices; the others do not
        asks_nvml = core.kind != "cuda" or os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1"
        return (device_count() if asks_nvml else core.count_by_driver()) > 0

    def start() -> None:
        core.start()
        torch.get_device_module(core.kind)._initialized = True

    def current_device() -> int:
        start()
        return core.current_device()

    def set_device(device: Any) -> None:
        start()
        core.set_device(index_of(core, device))

    def exchange(index: int) -> int:
        before = core.current_device()
        core.set_device(index)
        return before

    return {
        "is_available": is_available,
        "is_initialized": core.is_started_here,
        "_is_in_bad_fork": core.is_started_elsewhere,
        "_lazy_init": start,
        "device_count": device_count,
        "current_device": current_device,
        "set_device": set_device,
        "_exchange_device": exchange,
        "_maybe_exchange_device": lambda index: exchange(index),  # torch.compile wants another object than above
        "synchronize": lambda device=None: core.synchronize(index_of(core, device)),
    }


def _describing(core: ModuleType) -> dict[str, Any]:
    def properties(device: Any = None) -> SimpleNamespace:
        core.start()
        physical = core.visible_devices()[index_of(core, device)]
        return SimpleNamespace(
            name="Simulated GPU",
            total_memory=core.most_bytes(),
            major=9,
            minor=0,
            multi_processor_count=1,
            uuid=core.uuid_of(physical).removeprefix("GPU-"),
        )

    return {
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: (properties(device).major, properties(device).minor),
        "get_device_properties": properties,
    }


def _drawing(core: ModuleType) -> dict[str, Any]:
    class Generators(Sequence):
        """A generator for each visible device, whose number is known when somebody asks."""

        def __len__(self) -> int:
            return core.num_devices()

        def __getitem__(self, index: int) -> torch.Generator:
            if not 0 <= index < len(self):
                raise IndexError(index)
            return core.default_generator(index)

    def of(device: Any) -> torch.Generator:
        core.start()
        return core.default_generator(index_of(core, device))

    generators = Generators()
    return {
        "default_generators": generators,
        "get_rng_state": lambda device=core.kind: of(device).get_state(),
        "set_rng_state": lambda state, device=core.kind: of(device).set_state(state),
        "manual_seed": lambda seed: generators[core.current_device()].manual_seed(int(seed)) and None,
        "manual_seed_all": lambda seed: [one.manual_seed(int(seed)) for one in generators] and None,
        "initial_seed": lambda: of(None).initial_seed(),
    }


def _measuring(core: ModuleType) -> dict[str, Any]:
    def free_and_total(device: Any = None) -> tuple[int, int]:
        core.start()
        return core.most_bytes() - core.live_bytes(index_of(core, device)), core.most_bytes()

    return {
        "memory_allocated": lambda device=None: core.live_bytes(index_of(core, device)),
        "memory_reserved": lambda device=None: core.live_bytes(index_of(core, device)),
        "max_memory_allocated": lambda device=None: core.peak_bytes(index_of(core, device)),
        "max_memory_reserved": lambda device=None: core.peak_bytes(index_of(core, device)),
        "reset_peak_memory_stats": lambda device=None: core.reset_peak(index_of(core, device)),
        "mem_get_info": free_and_total,
    }


def _streaming(core: ModuleType) -> dict[str, Any]:
    class Stream(torch.Stream):
        """A stream whose work nobody sees before they have waited for it."""

        def __new__(cls, device: Any = None, priority: int = 0, **more: Any) -> "Stream":
            if {"stream_id", "device_index"} <= more.keys():
                return torch.Stream.__new__(cls, **more)
            found = torch.device(core.kind if device is None else device)
            return torch.Stream.__new__(cls, device=found, priority=priority)

    class IsEvent(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch.Event)

    class Event(metaclass=IsEvent):
        """A point in a stream's work, which is a `torch.Event`: torch measures between no others."""

        def __new__(cls, enable_timing: bool = False, blocking: bool = False, **unused: Any) -> Any:
            return torch.Event(device=core.kind, enable_timing=enable_timing, blocking=blocking)

    def stream(wanted: torch.Stream | None) -> Any:
        return contextlib.nullcontext() if wanted is None else wanted

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "set_stream": torch.accelerator.set_stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(device),
        "default_stream": lambda device=None: Stream(
            stream_id=0,
            device_index=torch.accelerator.current_stream(device).device_index,
            device_type=torch.accelerator.current_stream(device).device_type,
        ),
        "is_current_stream_capturing": lambda: False,
    }


def _compiled(core: ModuleType) -> dict[str, Any]:
    def broadcast(tensors: Sequence[Tensor], devices: Sequence[int], _: int) -> list[list[Tensor]]:
        return [[tensor.to(f"cuda:{index}") for tensor in tensors] for index in devices]

    def scatter(tensor: Tensor, devices: Sequence[int], sizes: Any, dim: int, _: Any) -> tuple[Tensor, ...]:
        parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(sizes, dim)
        return tuple(part.to(f"cuda:{index}") for part, index in zip(parts, devices, strict=False))

    def gather(tensors: Sequence[Tensor], dim: int, index: int | None) -> Tensor:
        device = torch.device("cpu") if index == -1 else torch.device("cuda", index or 0)
        return torch.cat([tensor.to(device) for tensor in tensors], dim)

    return {
        "_cuda_getDeviceCount": core.count_by_driver,
        "_cuda_init": core.start,
        "_cuda_getDevice": core.current_device,
        "_cuda_setDevice": core.set_device,
        "_cuda_synchronize": lambda: core.synchronize(-1),
        "_cuda_isInBadFork": core.is_started_elsewhere,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCurrentRawStream": lambda index: 0,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        # of nn.DataParallel
        "_broadcast_coalesced": broadcast,
        "_scatter": scatter,
        "_gather": gather,
    }


def let_storages_move(core: ModuleType) -> None:
    """Let untyped storages be resized, copied and moved, which is compiled for known devices only."""
    storage = torch.UntypedStorage
    of_torch, cloned = storage.resize_, storage.clone

    def bytes_of(held: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=held.device).set_(held)

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        if self.device.type != core.kind:
            return of_torch(self, size)
        core.resize_storage(bytes_of(self), size)
        return self

    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        wanted = torch.device(device)
        return self if self.device == wanted else bytes_of(self).to(wanted, non_blocking=non_blocking).untyped_storage()

    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        return bytes_of(self).clone().untyped_storage() if self.device.type == core.kind else cloned(self)

    storage.resize_ = resize
    storage.clone = clone
    storage.to = to

    def moved(self: torch.UntypedStorage, device: Any = None, non_blocking: bool = False) -> torch.UntypedStorage:
        return to(self, device=torch.device(core.kind, index_of(core, device)), non_blocking=non_blocking)

    setattr(storage, core.kind, moved)
    storage.cpu = lambda self: to(self, device="cpu")
