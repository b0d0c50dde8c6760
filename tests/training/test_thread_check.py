"""Whether a rank's threads wait for cores, as far as a test can make them."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from dure.training import thread_check
from dure.training.thread_check import slowdown_of_threads


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def with_clock(monkeypatch, seconds_of):
    """Let a clock go on by so many seconds at each look, as the number of threads is then."""
    now = itertools.accumulate(iter(lambda: seconds_of(torch.get_num_threads()), None))
    monkeypatch.setattr(thread_check, "time", SimpleNamespace(perf_counter=lambda: next(now)))


def test_threads_that_wait_for_cores_are_measured(monkeypatch, two_threads):
    with_clock(monkeypatch, lambda threads: 1e-2 if threads == 2 else 1e-5)
    assert slowdown_of_threads() == pytest.approx(1000, rel=0.1)
    assert torch.get_num_threads() == 2


def test_threads_that_have_cores_are_left_alone(monkeypatch, two_threads):
    with_clock(monkeypatch, lambda threads: 1e-5 * threads)
    assert slowdown_of_threads() is None


def test_one_thread_waits_for_no_other(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert slowdown_of_threads() is None
