"""Abilities of kinds of devices, and the backends that reach them."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dure.errors import EnvironmentLacks, SpecInvalid
from dure.host import backends, device_kinds, devices
from dure.host.backends import backend_name, fault_of_backend, reaches, sends_between_devices, takes_devices_only
from dure.host.device_kinds import KINDS, device_kind, waited_event
from dure.host.devices import resolve_device


@pytest.fixture
def outside(monkeypatch):
    """Let torch have an accelerator of a kind from outside, with nothing known of it."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="fieldgpu"))
    monkeypatch.setattr(device_kinds, "_module", lambda name: SimpleNamespace())
    device_kinds._count_in_child.cache_clear()
    yield
    device_kinds._count_in_child.cache_clear()


def test_abilities_of_a_kind_from_outside_are_those_that_are_tried():
    assert all(kind.copies_beside is False for name, kind in KINDS.items() if not kind.has_several)
    kind = device_kind("fieldgpu")
    assert (kind.title, kind.has_several, kind.has_nvml) == ("fieldgpu", True, False)
    assert [kind.copies_beside, kind.has_timed_events, kind.has_float64, kind.compiles] == [None] * 4


def test_devices_when_counting_starts_their_runtime_then_a_child_counts(outside, monkeypatch):
    here = os.getpid()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0 if os.getpid() == here else 3)
    assert devices.count_accelerators("fieldgpu") == 3
    assert devices.count_accelerators("cuda") == 0
    assert resolve_device("auto") == "fieldgpu"
    assert device_kinds.reason_fork_would_lose_devices() is None


def test_devices_when_a_child_would_have_lost_them_then_this_process_counts(outside, monkeypatch):
    here = os.getpid()
    module = SimpleNamespace(_is_in_bad_fork=lambda: os.getpid() != here)
    monkeypatch.setattr(device_kinds, "_module", lambda name: module)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3 if os.getpid() == here else 0)
    assert devices.count_accelerators("fieldgpu") == 3
    reason = "fieldgpu was asked for in this process (torch.fieldgpu.is_available() is enough)"
    assert device_kinds.reason_fork_would_lose_devices() == reason
    module.is_initialized = lambda: True
    assert device_kinds.reason_fork_would_lose_devices() == "fieldgpu is in use in this process"


def test_counting_that_fails_is_no_device(outside, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1 / 0)
    assert devices.count_accelerators("fieldgpu") == 0


@pytest.mark.parametrize(
    ("wanted", "error", "sentence"),
    [
        (
            "gpu",
            SpecInvalid,
            "device is 'gpu' but torch knows no accelerator of this name here: use --device cpu or",
        ),
        ("meta", SpecInvalid, "device is 'meta' but torch knows no accelerator of this name here: use --device cpu"),
        ("cuda:1", SpecInvalid, "must be a kind, without a number: use --device .*, and choose devices with CUDA_VIS"),
        (
            "xpu",
            EnvironmentLacks,
            "this machine shows no xpu device, and this torch is built for the CPU only: use",
        ),
    ],
)
def test_device_that_is_not_here_is_refused_with_what_is(wanted, error, sentence, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    with pytest.raises(error, match=sentence):
        resolve_device(wanted)
    assert resolve_device("auto") == "cpu"


@pytest.mark.parametrize(
    ("backend", "kind", "is_reached", "sends", "is_of_devices"),
    [
        ("gloo", "cpu", True, False, False),
        ("gloo", "cuda", True, False, False),
        ("gloo", "xpu", False, False, False),
        ("nccl", "cuda", True, True, True),
        ("nccl", "cpu", False, False, True),
        ("xccl", "xpu", True, True, True),
        ("cpu:gloo,cuda:nccl", "cuda", True, True, False),
        ("cpu:gloo,cuda:gloo", "cuda", True, False, False),
        ("cpu:dure_shm", "cpu", True, False, False),
        ("cpu:dure_shm", "cuda", False, False, False),
        ("none", "cuda", False, False, False),
    ],
)
def test_reach_of_backends(backend, kind, is_reached, sends, is_of_devices):
    assert reaches(backend, kind) is is_reached
    assert sends_between_devices(backend, kind) is sends
    assert takes_devices_only(backend) is is_of_devices


@pytest.mark.parametrize(
    ("chosen", "kind", "is_one_host", "sends", "name"),
    [
        ("auto", "cuda", True, True, "nccl"),
        ("auto", "xpu", False, True, "xccl"),
        ("auto", "xpu", False, False, "gloo"),
        ("auto", "mps", True, True, "gloo"),
        ("auto", "hpu", True, True, "gloo"),  # no package for it is here
        ("auto", "cpu", True, True, "cpu:dure_shm"),
        ("auto", "cpu", False, True, "gloo"),
        ("gloo", "xpu", True, True, "gloo"),
    ],
)
def test_backend_of_a_run_is_that_of_its_devices(chosen, kind, is_one_host, sends, name):

    assert backend_name(chosen, kind, is_one_host=is_one_host, sends_from_devices=sends) == name


@pytest.mark.parametrize(
    ("chosen", "kind", "fault"),
    [
        ("gloo", "xpu", None),
        ("auto", "xpu", None),
        ("dure_shm", "cpu", None),
        ("dure_shm", "cuda", "backend is dure_shm, which moves CPU tensors only, but device is cuda: use nccl or gloo"),
        ("nccl", "xpu", "backend is nccl, which moves CUDA tensors only, but device is xpu: use xccl"),
        ("nccl", "cpu", "backend is nccl, which moves CUDA tensors only, but device is cpu: use gloo"),
        ("glo", "cpu", "unknown backend 'glo': known here: auto, gloo, dure_shm"),
        ("fake", "hpu", "unknown backend 'fake': known here: auto, gloo, dure_shm"),
    ],
)
def test_backend_that_cannot_reach_the_devices_is_refused(chosen, kind, fault):
    assert fault_of_backend(chosen, kind) == fault


def test_backend_that_torch_is_built_without_is_refused(monkeypatch):
    monkeypatch.setattr(backends, "is_available", lambda name: False)
    assert fault_of_backend("nccl", "cuda") == (
        "backend is nccl, but this torch is built without it: install one that has it, or use gloo"
    )
    assert fault_of_backend("xccl", "xpu") == (
        "backend is xccl, but this torch is built without it: install one that has it, or use --device cpu"
    )


def test_task_that_asks_for_devices_is_let_ask_without_their_runtime(monkeypatch):
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    with device_kinds.runtimes_left_alone():
        assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


ROWS = {
    "several devices of a host": "has_several",
    "copies to and from pinned memory while it computes": "copies_beside",
    "events that measure time": "has_timed_events",
    "float64": "has_float64",
    "pins memory that torch did not allocate": "pins_any_memory",
    "health and memory by NVML": "has_nvml",
    "algorithms chosen by timing (cuDNN)": "times_convolutions",
    "`--precision tf32`": "has_tf32",
    "`--numa-binding`": "has_address",
    "torch's SyncBatchNorm": "has_sync_batchnorm",
    "`torch.compile`": "compiles",
    "counted without starting its runtime": "counts_without_runtime",
}
"""Ability of each row of docs/devices.md."""


def test_page_of_devices_has_the_abilities_of_each_kind():
    page = (Path(__file__).parents[2] / "docs/devices.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    found = {cells[0]: cells[1:6] for cells in lines if cells[0] in ROWS}
    words = {True: "yes", False: "no", None: "tried"}
    kinds = [[KINDS["cpu"]], [KINDS["cuda"]], [KINDS["mps"]], [KINDS["xpu"]]]
    kinds.append([KINDS["hpu"], KINDS["mtia"], device_kind("fieldgpu")])
    for label, ability in ROWS.items():
        of_kinds = [{words[getattr(kind, ability)] for kind in alike} for alike in kinds]
        assert [{word} for word in found[label]] == of_kinds, label


@pytest.mark.parametrize("enable_timing", [False, True])
def test_event_that_is_waited_for_leaves_the_core_to_others_where_the_kind_can(enable_timing, monkeypatch):
    made = []
    monkeypatch.setattr(device_kinds, "_module", lambda name: SimpleNamespace(Event=lambda **given: made.append(given)))
    waited_event(torch.device("cuda", 1), enable_timing=enable_timing)
    assert made == [{"enable_timing": enable_timing, "blocking": True}]
    assert isinstance(waited_event(torch.device("cpu")), torch.Event)
