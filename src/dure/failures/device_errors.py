"""Explanations of devices' errors: a failed GPU, a failed kernel, or a torch that does not match the driver.

The codes and texts are those of `cudaError_t` in the CUDA runtime's reference; torch prefixes them with "CUDA error: ",
NCCL with "Cuda failure ". If a GPU may be the cause, the driver is queried too.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dure.errors import message_of
from dure.host.device_kinds import current_index
from dure.host.gpu_health import GpuHealth

AskDriver = Callable[[int], GpuHealth]
"""Function that returns the health of a GPU, given its CUDA index in this process."""

GPU, GONE, EITHER, KERNEL, BUILD, SYSTEM, OTHER = "gpu", "gone", "either", "kernel", "build", "system", "other"
"""Possible causes: the GPU; a GPU that is no longer there; GPU or kernel; certainly a kernel; mismatch of torch, driver
and GPU; the host; a device whose errors have no table here."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    code: int
    """Code of `cudaError_t`; 0 for errors of libraries."""
    text: str
    """Part of the text that `cudaGetErrorString`, or the library, returns for the error."""
    of: str
    means: str
    """Explanation of the error; `{gpu}` is replaced by the name of the GPU."""
    cure: str = ""
    """Cure; empty for the usual one of its kind of cause."""


_CRASHED = "a kernel crashed, or {gpu} failed while it ran"
_OLD_DRIVER = "the NVIDIA driver is older than this torch needs"
_NEW_DRIVER = "update the driver, or install a torch that is built for an older CUDA"

_KINDS = (
    _Kind(
        code=214,
        text="uncorrectable ECC error",
        of=GPU,
        means="the memory of {gpu} had an error that ECC could not mend",
    ),
    _Kind(code=220, text="uncorrectable NVLink error", of=GPU, means="the NVLinks of {gpu} failed"),
    _Kind(
        code=226,
        text="Invalid access of peer GPU memory over nvlink or a hardware error",
        of=GPU,
        means="the hardware of {gpu}, or of another that it reaches over NVLink, had an error",
    ),
    _Kind(code=714, text="hardware stack error", of=GPU, means="the hardware of {gpu} found its own stack damaged"),
    _Kind(code=999, text="unknown error", of=GPU, means="mostly {gpu} or its driver has failed"),
    _Kind(
        code=401,
        text="cannot be performed in the present state",
        of=GPU,
        means="{gpu} or its driver is in no fit state",
    ),
    _Kind(
        code=46,
        text="busy or unavailable",
        of=GPU,
        means="{gpu} lets no process in",
        cure="see with `nvidia-smi` whether another process has it for itself (compute mode exclusive), or it is lost",
    ),
    _Kind(code=100, text="no CUDA-capable device is detected", of=GONE, means="the driver shows no GPU"),
    _Kind(code=100, text="No CUDA GPUs are available", of=GONE, means="the driver shows no GPU"),
    _Kind(code=101, text="invalid device ordinal", of=GONE, means="there are fewer GPUs than this rank needs"),
    _Kind(
        code=802,
        text="system not yet initialized",
        of=SYSTEM,
        means="the NVSwitches between the GPUs are not ready",
        cure="start nvidia-fabricmanager, of the driver's very version (`systemctl status nvidia-fabricmanager`)",
    ),
    _Kind(code=719, text="unspecified launch failure", of=EITHER, means=_CRASHED),
    _Kind(
        code=700,
        text="illegal memory access",
        of=EITHER,
        means="a kernel used memory that is not its own, or {gpu} failed",
    ),
    _Kind(
        code=716,
        text="misaligned address",
        of=EITHER,
        means="a kernel read or wrote across two numbers, or {gpu} failed",
    ),
    _Kind(code=715, text="illegal instruction", of=EITHER, means="a kernel was damaged, or {gpu} failed"),
    _Kind(code=718, text="invalid program counter", of=EITHER, means="a kernel was damaged, or {gpu} failed"),
    _Kind(
        code=702,
        text="launch timed out",
        of=EITHER,
        means="a kernel ran for longer than the driver allows, or {gpu} hangs",
    ),
    _Kind(code=0, text="CUBLAS_STATUS_EXECUTION_FAILED", of=EITHER, means=_CRASHED),
    _Kind(code=0, text="CUDNN_STATUS_EXECUTION_FAILED", of=EITHER, means=_CRASHED),
    _Kind(
        code=710,
        text="device-side assert triggered",
        of=KERNEL,
        means="a check inside a kernel failed: mostly an index or a label is out of range",
        cure="the rank's log has the condition (`Assertion ... failed`); ",
    ),
    _Kind(
        code=209,
        text="no kernel image is available",
        of=BUILD,
        means="this torch is not built for this kind of GPU",
        cure="install a torch that is (`torch.cuda.get_arch_list()` says for which ones this one is)",
    ),
    _Kind(code=35, text="driver version is insufficient", of=BUILD, means=_OLD_DRIVER, cure=_NEW_DRIVER),
    _Kind(code=36, text="not supported in the installed CUDA driver", of=BUILD, means=_OLD_DRIVER, cure=_NEW_DRIVER),
    _Kind(code=222, text="PTX was compiled with an unsupported", of=BUILD, means=_OLD_DRIVER, cure=_NEW_DRIVER),
    _Kind(
        code=803,
        text="unsupported display driver / cuda driver",
        of=BUILD,
        means="the NVIDIA driver's module and its library are of two versions",
        cure="reboot, so that both are of the newer one",
    ),
)
_NCCL = _Kind(
    code=0,
    text="unhandled cuda error",
    of=EITHER,
    means="NCCL met an error of CUDA on {gpu}",
    cure="run once more with NCCL_DEBUG=INFO to see which",
)
_NCCL_SYSTEM = _Kind(
    code=0,
    text="unhandled system error",
    of=SYSTEM,
    means="NCCL met an error of the host: mostly of the network or of /dev/shm, or of a device",
    cure="try them with `dure preflight`; NCCL_DEBUG=INFO says which call it was",
)
_OF_ANOTHER_KIND = _Kind(
    code=0,
    text="",
    of=OTHER,
    means="its device failed, or a kernel on it did",
    cure="run it once more, and if it fails again look at the device with its maker's tools",
)
_SAYS_ERROR = re.compile(
    r"CUDA error: |CUDA driver error: |Triton Error \[CUDA\]: |cuDNN error: |No CUDA GPUs are available"
    r"|Cuda failure (?:(?P<of_nccl>\d+) )?'|cudaGetDeviceCount\(\).* Error (?P<of_torch>\d+): ",
    re.DOTALL,
)
_ADVICE = (
    "CUDA kernel errors might be asynchronously",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING",
    "For more detailed error information, run with CUDA_LOG_FILE",
    "Compile with `TORCH_USE_CUDA_DSA`",
    "Device-side assertions were explicitly omitted",
    "Search for `cudaError",
    "GPU device may be out of range",
)
"""Beginnings of the lines of advice that torch appends to errors. The cure repeats what is useful."""
_CPP_STACK = "\nException raised from "


@dataclass(frozen=True, kw_only=True)
class DeviceError:
    """Error raised by a GPU, its driver or NCCL."""

    message: str
    """Text of the error without torch's advice, with its explanation added."""
    plain_text: str
    """Text of the error without torch's advice."""
    advice: str
    is_of_hardware: bool
    """True if the hardware is at fault, and no code."""
    may_be_gpu: bool
    """True if the driver may know more."""
    is_lost: bool
    """True if a GPU is lost, and will still be lost when the rank restarts."""
    is_consequence: bool
    """True if another rank's GPU has failed."""


def device_error(
    error: BaseException, gpus: Sequence[int] = (), ask_driver: AskDriver | None = None
) -> DeviceError | None:
    """Explain an error of a GPU, its driver or NCCL with a known meaning; return None for other exceptions.

    Args:
        error: Exception.
        gpus: CUDA indices of the rank's GPUs; empty for the current GPU of torch, if it uses one.
        ask_driver: Queries the driver about a GPU; None to skip that.
    """
    kind = _kind(error)
    if kind is None:
        return None
    used = tuple(gpus) or _current_gpu()
    is_asked = ask_driver is not None and kind.of in (GPU, GONE, EITHER)
    found = {gpu: ask_driver(gpu) for gpu in used} if ask_driver is not None and is_asked else {}
    ill = {gpu: health for gpu, health in found.items() if health.troubles}
    are_well = bool(found) and all(health.has_answered and not health.troubles for health in found.values())
    is_lost = kind.of == GONE or any(health.is_lost for health in found.values())
    means = kind.means.format(gpu=_named(used))
    if ill:
        means = "; ".join([means, *(_health_text(gpu, health) for gpu, health in ill.items())])
    elif are_well and kind.of == EITHER:
        means += f"; the driver finds nothing wrong with {_named(used)}"
    plain_text = _without_advice(message_of(error))
    first, *rest = plain_text.split("\n", 1)
    return DeviceError(
        message="\n".join([f"{first} ({means})", *rest]),
        plain_text=plain_text,
        advice=_cure(kind, ill, found, is_lost=is_lost),
        is_of_hardware=kind.of in (GPU, GONE) or bool(ill),
        may_be_gpu=kind.of in (GPU, GONE, EITHER),
        is_lost=is_lost,
        is_consequence=kind.code == 226 and are_well,
    )


def _kind(error: BaseException) -> _Kind | None:
    if not isinstance(error, RuntimeError):
        return None
    text = message_of(error)
    match = _SAYS_ERROR.search(text)
    if match is not None:
        number = getattr(error, "error_code", None) or match["of_nccl"] or match["of_torch"]
        by_code = next((kind for kind in _KINDS if number is not None and kind.code == int(number)), None)
        # a backtrace, which torch may add, may contain such words in function names
        shown = text.partition(_CPP_STACK)[0][match.start() :]
        found = by_code or next((kind for kind in _KINDS if kind.text in shown), None)
        if found is not None:
            return found
    if match is None and isinstance(error, torch.AcceleratorError):
        return _OF_ANOTHER_KIND
    return next((kind for kind in (_NCCL, _NCCL_SYSTEM) if "NCCL" in text and kind.text in text), None)


def _current_gpu() -> tuple[int, ...]:
    """Return the GPU that torch uses in this thread; none before it uses one, which must not happen now."""
    try:
        index = current_index()
    except RuntimeError:  # every call raises the error that is being explained
        return ()
    return () if index is None else (index,)


def _named(gpus: Sequence[int]) -> str:
    if not gpus:
        return "the GPU"
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"one of GPU {', '.join(map(str, gpus))}"


def _health_text(gpu: int, health: GpuHealth) -> str:
    return f"GPU {gpu} {' and '.join(health.troubles)}" + (", its driver says" if health.has_answered else "")


def _without_advice(text: str) -> str:
    lines = text.partition(_CPP_STACK)[0].splitlines()
    return "\n".join(line for line in lines if line.strip() and not line.startswith(_ADVICE)).strip() or text


def _cure(kind: _Kind, ill: dict[int, GpuHealth], found: dict[int, GpuHealth], *, is_lost: bool) -> str:
    known = next((health.smi_id for health in (ill or found).values() if health.smi_id), None)
    # without an id nvidia-smi would reset all GPUs
    show, reset = f"`nvidia-smi -q{f' -i {known}' if known else ''}`", f"`nvidia-smi -i {known or 'NUMBER'} -r`"
    if kind.of == GONE and not ill:
        return "see what `nvidia-smi` lists, what CUDA_VISIBLE_DEVICES names, and the kernel's log (`dmesg`, Xid)"
    if is_lost:
        return (
            f"it comes back with a reset ({reset}) or a reboot of its host; until then leave it out with "
            "CUDA_VISIBLE_DEVICES, and use a smaller --nproc"
        )
    if kind.cure and kind.of != KERNEL:
        return kind.cure
    if kind.of == GPU or ill:
        return (
            f"look at it with `dure preflight` and {show}; reset it ({reset}) or leave it out with "
            "CUDA_VISIBLE_DEVICES, and have it replaced if this happens again"
        )
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        late = "CUDA_LAUNCH_BLOCKING is 1, so it is this line's kernel: look at what it is given"
    else:
        late = (
            "errors of kernels arrive late, so a line before the one shown may be the cause: run once more with "
            "CUDA_LAUNCH_BLOCKING=1 to see which"
        )
    if kind.of == KERNEL:
        return kind.cure + late
    return f"{late}; if it comes elsewhere each time, or on one GPU only, look at that GPU with `dure preflight`"
