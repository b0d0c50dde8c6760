"""GPUs that fail, kernels that do, builds that do not fit: the texts are torch's, NCCL's and CUDA's; no GPU is here."""

import json
import os
import time
from dataclasses import replace

import pytest
import torch

from dure.failures.device_errors import device_error
from dure.failures.record import FailureRecord, failure_from_json
from dure.failures.report import describe_failure, write_failure_report
from dure.failures.verdict import WorkerEnd, judge
from dure.host.gpu_health import GpuHealth
from dure.launch.rounds.restart_policy import RestartPolicy, Restarts
from dure.process.own_descriptors import keep
from tests.record_cases import failure_of

ADVICE = (  # of torch 2.11 and 2.13
    "\nSearch for `{name}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more "
    "information.\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to "
    "enable device-side assertions.\n"
)
ECC = "CUDA error: uncorrectable ECC error encountered"
LAUNCH = "CUDA error: unspecified launch failure"
NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {}, NCCL version 2.27.5\n{}\nLast error:\n{}"
).format
NCCL_CUDA = ("unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "ncclUnhandledCudaError: Call to CUDA ...")

WELL = GpuHealth(has_answered=True, smi_id="00000000:52:00.0")
LOST = GpuHealth(has_answered=True, is_lost=True, troubles=("is lost and no longer answers on its bus",))
UNSAID = GpuHealth()


def test_error_of_a_device_of_another_kind_says_that_it_may_be_the_device():
    found = device_error(torch.AcceleratorError("FieldGPU error: the queue was lost"))
    assert found is not None
    assert found.message == "FieldGPU error: the queue was lost (its device failed, or a kernel on it did)"
    assert found.advice.startswith("run it once more, and if it fails again look at the device")
    assert (found.is_of_hardware, found.is_lost) == (False, False)
    assert device_error(torch.AcceleratorError("CUDA error: of no known kind")) is None


def raised(text: str, code: int | None = None) -> Exception:
    """Return what torch raises: an AcceleratorError, which newer ones give the code."""
    error = torch.AcceleratorError(text + ADVICE.format(name="cudaErrorX"))
    if code is not None:
        error.error_code = code
    try:
        raise error
    except RuntimeError as error:
        return error


def described(error: Exception, health: GpuHealth | None = None, gpus=(1,)) -> dict:
    return describe_failure(error, 1, 5, None, gpus, None if health is None else lambda gpu: health)


@pytest.fixture(autouse=True)
def no_blocking(monkeypatch):
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)


MEANINGS = {
    (ECC, 214): ("the memory of GPU 1 had an error that ECC could not mend", "`dure preflight`"),
    ("CUDA error: uncorrectable NVLink error detected during the execution", 220): (
        "the NVLinks of GPU 1",
        "nvidia-smi",
    ),
    ("CUDA error: hardware stack error", 714): ("the hardware of GPU 1", "CUDA_VISIBLE_DEVICES"),
    ("CUDA error: unknown error", 999): ("mostly GPU 1 or its driver has failed", "`dure preflight`"),
    ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", 46): (
        "lets no process in",
        "compute mode exclusive",
    ),
    ("CUDA error: no CUDA-capable device is detected", 100): ("the driver shows no GPU", "dmesg"),
    ("CUDA error: invalid device ordinal", 101): ("fewer GPUs than this rank needs", "nvidia-smi"),
    ("CUDA error: system not yet initialized", 802): ("NVSwitches between the GPUs", "nvidia-fabricmanager"),
    (LAUNCH, 719): ("a kernel crashed, or GPU 1 failed while it ran", "CUDA_LAUNCH_BLOCKING=1"),
    ("CUDA error: an illegal memory access was encountered", 700): (
        "memory that is not its own",
        "CUDA_LAUNCH_BLOCKING",
    ),
    ("CUDA error: misaligned address", 716): ("or GPU 1 failed", "CUDA_LAUNCH_BLOCKING=1"),
    ("CUDA error: the launch timed out and was terminated", 702): ("longer than the driver allows", "BLOCKING=1"),
    ("CUDA error: device-side assert triggered", 710): ("mostly an index or a label is out of range", "BLOCKING=1"),
    ("CUDA error: no kernel image is available for execution on the device", 209): ("not built for this", "install"),
    ("CUDA error: CUDA driver version is insufficient for CUDA runtime version", 35): ("is older than", "update the"),
}


@pytest.mark.parametrize("has_code", [True, False], ids=["AcceleratorError with a code", "text alone"])
@pytest.mark.parametrize("seen", MEANINGS, ids=lambda seen: str(seen[1]))
def test_error_of_a_device_then_it_is_told_in_words_with_a_cure_and_without_torchs_advice(seen, has_code):
    text, code = seen
    means, cure = MEANINGS[seen]
    error = raised(text, code) if has_code else RuntimeError(str(raised(text)))
    failure = described(error)
    assert failure.message.startswith(f"{text} (")
    assert means in failure.message
    assert cure in failure.advice
    assert "Compile with" not in failure.message
    assert "Compile with" in failure.traceback  # the whole text is kept


OTHERS = {
    "NCCL with a number": (NCCL(*NCCL_CUDA, "Cuda failure 999 'unknown error'"), "mostly GPU 1 or its driver"),
    "NCCL without": (NCCL(*NCCL_CUDA, "Cuda failure 'unspecified launch failure'"), "a kernel crashed, or GPU 1"),
    "NCCL and no more": (NCCL(*NCCL_CUDA, ""), "NCCL met an error of CUDA on GPU 1"),
    "NCCL and the host": (NCCL("unhandled system error", "ncclSystemError: ...", ""), "NCCL met an error of the host"),
    "cuBLAS": ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle)`", "a kernel crashed"),
    "cuDNN": ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "a kernel crashed, or GPU 1"),
    "Triton": ("Triton Error [CUDA]: an illegal memory access was encountered", "memory that is not its own"),
    "at the start": (
        "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() "
        "that might have already set an error? Error 802: system not yet initialized",
        "the NVSwitches between the GPUs are not ready",
    ),
    "no GPU at the start": ("No CUDA GPUs are available", "the driver shows no GPU"),
}


@pytest.mark.parametrize("which", OTHERS)
def test_error_when_another_library_says_it_then_it_is_known_too(which):
    text, means = OTHERS[which]
    assert means in described(RuntimeError(text)).message.partition("\n")[0]


@pytest.mark.parametrize(
    "error",
    [
        ValueError(ECC),  # no library raises that
        RuntimeError("the user's own unknown error"),
        RuntimeError("CUDA error: invalid argument"),
        RuntimeError("NCCL error in: a.cpp:1, remote process exited or there was a network error, NCCL version 2.27.5"),
    ],
    ids=str,
)
def test_error_of_another_kind_then_its_text_stands_as_it_is(error):
    failure = described(error)
    assert (failure.message, failure.advice) == (str(error), None)
    assert not failure.may_be_gpu


def test_memory_when_it_runs_out_then_it_is_no_lost_device():
    failure = described(RuntimeError("CUDA error: out of memory"))
    assert "microbatch" in failure.advice
    assert not failure.may_be_gpu


def test_gpu_when_the_driver_says_it_is_lost_then_that_is_told_and_no_kernel_is_blamed():
    failure = described(raised(LAUNCH, 719), LOST)
    assert failure.message.endswith("; GPU 1 is lost and no longer answers on its bus, its driver says)")
    assert "CUDA_LAUNCH_BLOCKING" not in failure.advice
    assert "leave it out with CUDA_VISIBLE_DEVICES" in failure.advice
    assert failure.is_gpu_lost


def test_gpu_when_the_driver_finds_nothing_then_the_kernel_is_looked_for():
    failure = described(raised(LAUNCH, 719), WELL)
    assert "the driver finds nothing wrong with GPU 1" in failure.message
    assert "CUDA_LAUNCH_BLOCKING=1 to see which" in failure.advice
    assert not failure.is_gpu_lost


def test_gpu_when_it_is_sick_then_nvidia_smi_is_called_with_its_address():
    sick = GpuHealth(has_answered=True, smi_id="00000000:52:00.0", troubles=("has had 2 memory error(s)",))
    failure = described(raised(ECC, 214), sick)
    assert "GPU 1 has had 2 memory error(s), its driver says" in failure.message
    assert "`nvidia-smi -q -i 00000000:52:00.0`" in failure.advice
    assert failure.origin == "task"  # nobody's: not to be reported as an error in dure


def test_gpus_when_a_rank_has_several_then_the_one_that_is_ill_is_named():
    error = device_error(raised(LAUNCH), (2, 3), lambda gpu: LOST if gpu == 3 else WELL)
    assert "one of GPU 2, 3 failed" in error.message
    assert "GPU 3 is lost" in error.message
    assert "GPU 2 is" not in error.message


def test_gpu_when_nobody_knows_which_and_the_driver_says_nothing_then_none_is_named():
    assert "or the GPU failed while it ran)" in described(raised(LAUNCH), UNSAID, gpus=()).message


def test_kernel_when_launches_block_then_the_line_is_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "it is this line's kernel" in described(raised("CUDA error: device-side assert triggered")).advice


def test_access_to_another_gpu_when_ones_own_is_well_then_it_followed_from_that_ones_failure():
    text = "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"
    assert described(raised(text, 226), WELL).is_consequence
    assert not described(raised(text, 226), LOST).is_consequence


def end(failure: FailureRecord, rank: int, time_: float) -> WorkerEnd:
    failure = replace(failure, rank=rank, time=time_)
    return WorkerEnd(rank=rank, exit_code=1, time=time_, was_stopped=False, failure=failure)


NCCL_PEER = NCCL(
    "remote process exited or there was a network error", "ncclRemoteError: A call failed possibly ...", ""
)
NCCL_SOCKET = NCCL(
    "unhandled system error", "ncclSystemError: ...", "socketProgress: Connection closed by remote peer b"
)


@pytest.mark.parametrize("consequence", [NCCL_PEER, NCCL_SOCKET], ids=["remote", "socket"])
def test_verdict_when_nccl_loses_the_rank_of_a_lost_gpu_then_the_gpu_is_the_cause(consequence, tmp_path):
    followed = end(described(RuntimeError(consequence)), 0, 1.0)  # though it was told first
    verdict = judge(tmp_path, [followed, end(described(raised(ECC, 214), LOST), 1, 2.0)])
    first, *rest = verdict.text.splitlines()
    assert first.startswith(f"rank 1 failed after step 5: AcceleratorError: {ECC} (the memory of GPU 1")
    assert "GPU 1 is lost" in first
    assert "leave it out with CUDA_VISIBLE_DEVICES" in first
    assert rest[-1].startswith("  rank 0 ended as a consequence")


def test_restart_when_the_gpu_is_lost_then_there_is_none_and_it_is_said_why():
    restarts = Restarts(RestartPolicy(most=3, after_any=True))
    assert restarts.after([end(described(raised(LAUNCH), LOST), 1, 1.0)], lambda rank: 5) is None
    assert restarts.refusal == "a GPU that is gone does not come back by itself, so the ranks were not started again"


def test_restart_when_the_gpu_is_still_there_then_it_is_tried():
    restarts = Restarts(RestartPolicy(most=3))
    assert restarts.after([end(described(raised(LAUNCH), WELL), 1, 1.0)], lambda rank: 5) is not None


def test_word_when_the_driver_is_asked_then_a_record_without_it_stands_there_before():
    report, before = keep(os.memfd_create("report")), []

    def describe(ask) -> FailureRecord:
        if ask is not None:
            before.append(failure_from_json(json.loads(os.pread(report, 2**20, 0))))
        # shorter than the first: it must cover it all the same
        message = "first, and long" if ask is None else "then"
        return failure_of(may_be_gpu=True, time=time.time(), message=message)

    left = write_failure_report(describe, report)
    assert [failure.message for failure in before] == ["first, and long"]
    assert failure_from_json(json.loads(os.pread(report, 2**20, 0))) == left
    assert (left.message, left.time) == ("then", before[0].time)  # when it failed, and not when it was asked
    os.close(report)
