"""Restarts: after which failures, and how often."""

import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dure.failures.verdict import WorkerEnd
from dure.launch.rounds.restart_policy import RestartPolicy, Restarts
from tests.record_cases import LINE, failure_of


def killed(rank=1, number=signal.SIGKILL):
    return WorkerEnd(rank=rank, exit_code=-number, time=1.0, was_stopped=False)


def followed(rank=0):
    return WorkerEnd(rank=rank, exit_code=-signal.SIGKILL, time=2.0, was_stopped=True)


def raised(rank=1, *, is_ours=False, is_consequence=False, origin="task", message="a planned failure"):
    failure = failure_of(
        rank, message=message, is_ours=is_ours, origin=origin, is_consequence=is_consequence, user_line=LINE
    )
    return WorkerEnd(rank=rank, exit_code=1, time=1.0, was_stopped=False, failure=failure)


def decide(*ends, step=5, most=3):
    restarts = Restarts(RestartPolicy(most=most))
    return restarts.after(list(ends), lambda rank: step), restarts


def test_rank_when_killed_then_the_first_cause_is_named():
    restart, _ = decide(followed(), killed())
    assert restart is not None
    assert (restart.number, restart.rank, restart.step) == (1, 1, 5)
    assert restart.cause.startswith("rank 1 was killed (SIGKILL)")


def test_exception_then_its_line_is_in_the_cause():
    restart, _ = decide(raised(), followed())
    assert restart is not None
    assert restart.cause == "rank 1 failed: ValueError: a planned failure (train.py:7)"


@pytest.mark.parametrize(
    ("end", "step"),
    [
        (raised(), 1),  # nothing has ever gone well
        (raised(is_ours=True), 5),  # what dure refuses stays refused
        (raised(origin="dure"), 5),
        (WorkerEnd(rank=1, exit_code=143, time=1.0, was_stopped=False), 5),  # it was asked to stop
        (WorkerEnd(rank=1, exit_code=3, time=1.0, was_stopped=False), 5),  # the task's code left
    ],
)
def test_end_when_a_restart_would_not_help_then_there_is_none(end, step):
    restart, restarts = decide(end, followed(), step=step)
    assert restart is None
    assert restarts.refusal is None


def test_peer_lost_without_a_cause_then_a_restart_may_help():
    restart, _ = decide(raised(is_ours=True, is_consequence=True), raised(0, is_ours=True, is_consequence=True))
    assert restart is not None


@pytest.mark.parametrize(("step", "where"), [(5, "at step 5"), (-1, "before the first step")])
def test_failure_when_the_same_at_the_same_step_then_it_is_not_tried_again(step, where):
    restarts = Restarts(RestartPolicy(most=9))
    assert restarts.after([killed()], lambda rank: step) is not None
    assert restarts.after([killed()], lambda rank: step) is None
    assert restarts.refusal == f"the same failure came again {where} after a restart, so it was not tried once more"


def test_memory_when_the_kernel_ends_another_rank_at_the_same_step_then_it_is_not_tried_again():
    restarts = Restarts(RestartPolicy(most=9))
    first, second = (replace(killed(rank), is_out_of_memory=True, memory_limit_bytes=2**30) for rank in (1, 0))
    assert restarts.after([first], lambda rank: 5) is not None
    assert restarts.after([second], lambda rank: 5) is None
    assert "the same failure came again" in str(restarts.refusal)


def test_failures_when_more_than_the_budget_then_the_window_says_so(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("dure.launch.rounds.restart_policy.time.monotonic", lambda: now[0])
    restarts = Restarts(RestartPolicy(most=2, window_seconds=60.0))
    for step in (1, 2):
        assert restarts.after([killed()], lambda rank, step=step: step) is not None
    assert restarts.after([killed()], lambda rank: 3) is None
    assert restarts.refusal == "2 restarts within 60 s are used up (--max-restarts)"
    now[0] += 61.0
    fourth = restarts.after([killed()], lambda rank: 4)
    assert fourth is not None
    assert fourth.number == 3


def starved(size, rank=1):
    failure = replace(raised(rank).failure, type="OutOfMemoryError", microbatch_size=size)
    return WorkerEnd(rank=rank, exit_code=1, time=1.0, was_stopped=False, failure=failure)


def test_memory_when_it_runs_out_then_all_halve_and_no_restart_is_used_up():
    restarts = Restarts(RestartPolicy(most=1))
    found = [restarts.after([followed(), starved(size)], lambda rank: 1) for size in (11, 6, 3, 2, 1)]
    assert [one and one.microbatch_sizes for one in found] == [(11, 6), (6, 3), (3, 2), (2, 1), None]
    assert restarts.refusal is None
    assert restarts.after([killed()], lambda rank: 5) is not None


def test_memory_when_there_is_no_restart_then_nothing_is_halved():
    assert decide(starved(8), most=0)[0] is None


def diverged(rank, message="rank 2 holds other values"):
    failure = replace(raised(rank, is_ours=True, message=message).failure, go_back_to=32)
    return WorkerEnd(rank=rank, exit_code=1, time=1.0, was_stopped=False, failure=failure)


def test_replicas_when_they_differ_then_all_go_back_to_where_they_agreed():
    restart, restarts = decide(diverged(1), diverged(0), step=1)
    assert restart is not None
    assert (restart.go_back_to, restart.number, restart.cause) == (32, 1, "rank 2 holds other values")
    # the same again, told by another rank
    assert restarts.after([diverged(0), diverged(1)], lambda rank: 1) is None
    assert "the same failure came again" in str(restarts.refusal)


def test_policy_of_none_then_nothing_is_tried_again():
    assert decide(killed(), most=0)[0] is None


def hang(*culprits, step=7):
    states = [SimpleNamespace(rank=rank, step=step) for rank in range(2)]
    return SimpleNamespace(culprits=culprits, states=states)


def test_hang_when_the_same_rank_hangs_again_at_the_same_step_then_it_is_not_tried_again():
    restarts = Restarts(RestartPolicy(most=9))
    assert restarts.after_hang(hang(1)).step == 7
    assert restarts.after_hang(hang(1, step=8)) is not None
    assert restarts.after_hang(hang(1, step=8)) is None
    assert "the same failure came again at step 8" in restarts.refusal


def test_hang_when_no_rank_is_to_blame_then_it_may_come_again():
    restarts = Restarts(RestartPolicy(most=3))
    assert [restarts.after_hang(hang()) is not None for _ in range(4)] == [True, True, True, False]
    assert "3 restarts within" in restarts.refusal


def test_failure_when_only_numbers_differ_then_it_is_the_same():
    restarts = Restarts(RestartPolicy(most=9))
    messages = "cannot map 0x7f01 at 12:30:01", "cannot map 0x8f02 at 12:30:09", "cannot open it"
    found = [restarts.after([raised(1, message=message)], lambda rank: 5) for message in messages]
    assert [restart is not None for restart in found] == [True, False, True]
