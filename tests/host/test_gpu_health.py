"""Driver's reports on one GPU, through a stand-in that has pynvml's own names, constants and errors."""

import threading
import time

import pynvml
import pytest

from dure.host.gpu_health import GpuHealth, gpu_health, visible_gpus
from tests.preflight.nvml import Card, Nvml, installed

CARDS = [Card(0x1B), Card(0x43, uncorrected=2), Card(0x52, recovery=1), Card(0x61, recovery=4)]


def asked(index: int, *cards: Card, visible: str | None = "", lost: int | None = None) -> GpuHealth:
    nvml = Nvml(*cards)
    if lost is not None:
        nvml.cards[lost].is_lost = True
    with installed(nvml, ",".join(map(str, range(len(cards)))) if visible == "" else visible):
        found = gpu_health(index)
    assert not nvml.is_open
    return found


@pytest.mark.parametrize(
    ("index", "is_lost", "troubles"),
    [
        (0, False, ()),
        (1, False, ("has had 2 memory error(s) that ECC could not mend",)),
        (2, True, ("must be reset",)),
        (3, False, ("should be reset when nobody uses it",)),
    ],
)
def test_gpu_when_it_is_there_then_its_errors_and_what_it_needs_are_told(index, is_lost, troubles):
    health = asked(index, *CARDS)
    assert (health.has_answered, health.is_lost, health.troubles) == (True, is_lost, troubles)
    assert health.smi_id == CARDS[index].bus_id.lower()


@pytest.mark.parametrize("how", ["no handle", "no answer"])
def test_gpu_when_it_is_lost_then_that_is_told_and_the_others_are_well(how):
    cards = [Card(1, has_handle=how == "no answer"), Card(2, has_handle=how == "no answer")]
    assert asked(1, *cards, lost=1).troubles == ("is lost and no longer answers on its bus",)
    assert (asked(1, *cards, lost=1).is_lost, asked(1, *cards, lost=1).smi_id) == (True, "1")
    assert asked(0, *cards, lost=1).troubles == ()


@pytest.mark.parametrize(
    ("index", "visible", "is_lost"),
    [
        (0, "1", True),
        (1, "0,1", True),
        (1, "1,0", False),
        (0, "GPU-00000001", False),
        (1, "GPU-00000001,GPU-00000002", True),  # its name went with it
    ],
)
def test_gpu_when_some_are_hidden_then_the_one_that_cuda_means_is_asked_about(index, visible, is_lost):
    assert asked(index, Card(1), Card(2, has_handle=False), visible=visible, lost=1).is_lost == is_lost


def test_gpu_when_the_driver_lists_fewer_then_it_is_lost():
    health = asked(3, Card(1), Card(2), visible="0,1,2,3")
    assert (health.is_lost, health.troubles) == (True, ("is not among the 2 that are left",))


def test_part_of_a_gpu_then_nothing_is_said_of_it():
    assert asked(0, Card(1, mig=1), visible="MIG-0a1b") == GpuHealth()


@pytest.mark.parametrize(
    ("why_not", "troubles"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, ()),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, ("cannot be looked at: Driver Not Loaded",)),
    ],
)
def test_driver_when_it_is_missing_or_broken_then_nothing_is_raised(why_not, troubles):
    with installed(Nvml(why_not=why_not)):
        health = gpu_health(0)
    assert (health.has_answered, health.is_lost, health.troubles) == (False, False, troubles)


def test_real_library_when_it_is_asked_then_nothing_is_raised():
    assert not gpu_health(0).is_lost


def test_driver_when_it_hangs_then_nobody_waits_for_it():
    hanging, released = Nvml(Card(1)), threading.Event()
    hanging.nvmlDeviceGetCount = released.wait
    begin = time.monotonic()
    with installed(hanging):
        health = gpu_health(0, limit_seconds=0.05)
    released.set()
    assert time.monotonic() - begin < 1.0
    assert health.troubles == ("may be lost, for its driver has said nothing about it for 0.05 s",)
    assert not health.is_lost  # a restart may still be tried


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["GPU-00000001-0000", "GPU-00000002-0000"]),
        ("1", ["GPU-00000002-0000"]),
        ("GPU-00000001", ["GPU-00000001-0000"]),
        ("MIG-a,MIG-b", ["MIG-a", "MIG-b"]),
        ("", []),
    ],
)
def test_visible_gpus_have_their_names(visible, names):
    with installed(Nvml(Card(1), Card(2)), visible):
        assert visible_gpus() == names


def test_visible_gpus_without_a_driver_have_none():
    with installed(Nvml(why_not=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)):
        assert visible_gpus() == []
