"""Use of the machine by a rank: of its process and loaders, and of GPUs through a stand-in for their driver."""

import subprocess
import sys
import time

import pynvml
import pytest

from dure.host.usage import GpuMeter, ProcessMeter
from tests.preflight.nvml import TOTAL, Card, Nvml, installed


def test_process_when_it_computes_and_has_a_child_that_does_then_both_are_measured():
    meter = ProcessMeter()
    others = meter.read().loaders  # the test's process may have some
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            meter.read()  # sees the child for the first time
            until = time.process_time() + 0.1
            while time.process_time() < until:
                pass
            found = meter.read()
        finally:
            child.kill()
    assert found.cores > 0
    assert found.loader_cores > 0
    assert found.loaders == others + 1
    assert found.resident_bytes > 2**20 < found.loader_bytes
    assert meter.read().loaders == others


def test_gpus_when_read_then_are_those_that_this_process_sees():
    cards = Card(1), Card(2, busy=0.9, free=0.25, events=pynvml.nvmlClocksEventReasonHwThermalSlowdown)
    with installed(Nvml(*cards), "1"):
        meter = GpuMeter()
        [use] = meter.read([0, 1])
        meter.close()
    assert (use.device, use.busy, use.memory_bytes) == (0, 0.9, int(TOTAL * 0.75))
    assert (use.watts, use.most_watts, use.megahertz, use.most_megahertz) == (350.5, 700.0, 1200, 1980)
    assert use.slowed_by == ("HW thermal slowdown",)


def test_gpus_when_one_is_lost_then_it_is_left_out():
    with installed(Nvml(Card(1, is_lost=True, has_handle=False), Card(2)), None):
        meter = GpuMeter()
        assert [use.device for use in meter.read([0, 1])] == [1]
        meter.close()


def test_driver_when_there_is_none_then_is_an_error_of_the_system():
    with installed(Nvml(why_not=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND), None), pytest.raises(OSError):  # noqa: PT011
        GpuMeter()
