"""Ranks that were killed and are still there."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from dure.launch.rounds import round as module
from dure.launch.worker import stacks
from dure.launch.worker.stacks import why_alive


@pytest.mark.parametrize(("looks", "expected"), [(2, 0), (8, 1)])
def test_rank_when_it_does_not_end_then_is_told_why_after_a_while(looks, expected, monkeypatch):
    left = iter([["worker"]] * looks + [[]])
    worker = SimpleNamespace(rank=1, pid=77, stop_at_once=lambda: None)
    clock = iter(range(100))
    printed = []
    monkeypatch.setattr(module, "_still_alive", lambda workers: workers if next(left) else [])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None))
    monkeypatch.setattr(module, "why_alive", lambda pid: f"waits ({pid})")
    monkeypatch.setattr(module, "_print_status", lambda launch, workers, text: printed.append(text))
    module.kill_all(None, [worker])
    assert printed == ["killed 6 s ago, and not gone: rank 1 (process 77) waits (77)"] * expected


@pytest.mark.parametrize(
    ("state", "words"), [("D", "waits in the kernel"), ("Z", "process 4 traces it"), ("R", None), ("?", None)]
)
def test_process_when_the_kernel_keeps_it_then_that_is_the_reason(state, words, monkeypatch):
    monkeypatch.setattr(stacks, "proc_stat", lambda pid: [state])
    monkeypatch.setattr(stacks, "_tracer_of", lambda pid: 4)
    assert (why_alive(1) or "").count(words or "nothing") == (words is not None)


def test_tracer_of_a_process_that_nobody_traces_is_none():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        time.sleep(0.05)
        assert (stacks._tracer_of(process.pid), stacks._tracer_of(2**22)) == (0, 0)
        process.communicate(b"\n")
