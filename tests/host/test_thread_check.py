"""Check whether threads wait for cores, with a torch that has neither: no test may start threads of torch's."""

from types import SimpleNamespace

import pytest

from dure.host import thread_check
from dure.host.thread_check import slowdown_of_threads


class Torch:
    """Operations that take so many seconds, by the number of threads."""

    def __init__(self, seconds_of: dict[int, float]) -> None:
        self.seconds_of, self.num_threads, self.now = seconds_of, max(seconds_of), 0.0
        self.num_calls, self.interrupted_call, self.interruption = 0, -1, 0.0

    def get_num_threads(self):
        return self.num_threads

    def set_num_threads(self, number):
        self.num_threads = number

    def ones(self, size):
        return None

    empty = ones

    def add(self, x, y, out):
        self.now += self.seconds_of[self.num_threads]
        self.num_calls += 1
        self.now += self.interruption * (self.num_calls == self.interrupted_call)


@pytest.mark.parametrize(
    ("seconds_of", "ratio"),
    [({1: 1e-5, 2: 1e-2}, 1000), ({1: 1e-5, 4: 1e-4}, 10), ({1: 1e-5, 2: 2e-5}, None), ({1: 1e-5}, None)],
)
def test_threads_that_wait_for_cores_are_found(monkeypatch, seconds_of, ratio):
    torch = Torch(seconds_of)
    monkeypatch.setattr(thread_check, "torch", torch)
    monkeypatch.setattr(thread_check, "time", SimpleNamespace(perf_counter=lambda: torch.now))
    assert slowdown_of_threads() == (ratio if ratio is None else pytest.approx(ratio))
    assert torch.num_threads == max(seconds_of)


@pytest.mark.parametrize("call", range(51, 57))
def test_threads_when_one_call_is_interrupted_then_do_not_count_as_slow(monkeypatch, call):
    torch = Torch({1: 1e-5, 2: 2e-5})
    torch.interrupted_call, torch.interruption = call, 0.5
    monkeypatch.setattr(thread_check, "torch", torch)
    monkeypatch.setattr(thread_check, "time", SimpleNamespace(perf_counter=lambda: torch.now))
    assert slowdown_of_threads() is None
