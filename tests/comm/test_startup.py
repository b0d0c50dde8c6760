"""Steps of a start that take long on some ranks: who waits how long, who is told what. Threads stand for the ranks."""

import threading
import time

import pytest
import torch.distributed as dist

from dure.comm import startup
from dure.comm.groups import Solo
from dure.comm.startup import Startup
from dure.errors import PeerLost

SILENCE = 0.3


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(startup, "_BEAT_SECONDS", 0.02)
    monkeypatch.setattr(startup, "FIRST_NOTICE_SECONDS", 0.1)


def on_threads(num_ranks, work, report=None, store=None):
    """Return what `work(rank, startup)` returned on each rank, an exception as its object."""
    store, answers = store or dist.HashStore(), [None] * num_ranks

    def run(rank):
        try:
            answers[rank] = work(rank, Startup(rank, num_ranks, store, timeout_seconds=SILENCE, report=report))
        except BaseException as error:
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize("slow", [0, 1])
def test_step_when_a_rank_takes_longer_than_the_timeout_then_all_wait_and_rank_0_reports_it(slow):
    reports, ends = [], {}

    def work(rank, steps):
        for number in range(2):
            with steps.step("preparing the data"):
                if rank == slow:
                    time.sleep(2 * SILENCE)
                    ends[number] = time.monotonic()
            assert time.monotonic() >= ends[number]
        return "through"

    assert on_threads(3, work, reports.append) == ["through"] * 3
    assert reports[0].startswith(f"rank {slow} is still preparing the data, for ")
    assert len(reports) <= 8  # two steps, ever more rarely


def test_step_when_a_rank_fails_inside_then_the_others_say_so_at_once():
    def work(rank, steps):
        with steps.step("building the model"):
            if rank == 1:
                raise ValueError("no such file")

    start = time.monotonic()
    first, cause, last = on_threads(3, work)
    assert isinstance(cause, ValueError)
    for consequence in (first, last):
        assert isinstance(consequence, PeerLost)
        assert str(consequence) == "rank 1 failed while it was building the model"
    assert time.monotonic() - start < SILENCE


def test_step_when_a_rank_shows_no_sign_of_life_then_that_is_reported_before_the_timeout(monkeypatch):
    monkeypatch.setattr(startup, "_MISSED_BEATS", 1)
    reports = []

    def work(rank, steps):
        if rank != 2:  # as if it had been stopped
            with steps.step("preparing the data"):
                pass

    on_threads(3, work, reports.append)
    assert reports[-1].startswith("rank 2 is still preparing the data, for ")
    assert reports[-1].endswith("s now, and rank 2 shows no sign of life (stopped, or in native code); the others wait")


@pytest.mark.parametrize("dead", [0, 2])
def test_step_when_a_rank_gives_no_sign_of_life_then_the_others_do_not_wait_for_ever(dead):
    def work(rank, steps):
        if rank == dead:
            return
        with steps.step("loading the data"):
            pass

    for rank, answer in enumerate(on_threads(3, work)):
        if rank != dead:
            assert isinstance(answer, PeerLost)
            assert str(answer) == f"rank {dead} gave no sign of life for 0.3 s while loading the data"


class Robbed:
    """A store from which a stranger deletes a key, once, as soon as it is there."""

    def __init__(self, name):
        self.store, self.name, self.is_taken, self.lock = dist.HashStore(), name, False, threading.Lock()

    def set(self, key, value):
        with self.lock:
            self.store.set(key, value)
            self._rob(key)

    def add(self, key, amount):
        with self.lock:
            value = self.store.add(key, amount)
            self._rob(key)
        return value

    def get(self, key):
        return self.store.get(key)

    def check(self, keys):
        with self.lock:
            return self.store.check(keys)

    def _rob(self, key):
        if key == f"start/1/{self.name}" and not self.is_taken:
            self.is_taken = self.store.delete_key(key)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", ["done/0", "done/1", "num done", "all done", "beats/0", "beats/1"])
def test_step_when_a_stranger_deletes_a_key_then_all_go_on(name):
    def work(rank, steps):
        with steps.step("loading the data"):
            time.sleep(0.05)
        return "through"

    store = Robbed(name)
    assert on_threads(2, work, store=store) == ["through"] * 2
    assert store.is_taken


def test_step_of_a_rank_alone_when_it_takes_long_then_that_is_reported_and_nobody_waits():
    reports = []
    with Solo().startup(reports.append).step("preparing the data"):
        time.sleep(SILENCE)
    assert reports[0] == "still preparing the data, for 0 s now"


def test_ranks_when_many_then_the_first_are_named():
    assert startup._ranks(list(range(10))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
