"""Ranks of a parameter server run are killed: who can be missed is missed, and the rest ends with the cause."""

import json
import os
import signal
from itertools import chain, pairwise
from pathlib import Path

import pytest

from dure.data.partition import shares as dure_shares
from tests.commands import RunFiles, wait_until
from tests.faults.test_torchrun import torchrun

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
WORKERS, SERVERS, NUM_SAMPLES, BATCH = 3, 2, 97, 8
UNCOUNTED = (
    *("train", TASK, "--strategy", "parameter_server", "--parameter-server.servers", SERVERS, "--name", "run"),
    *("--global-batch-size", BATCH, "--quiet", "--max-restarts", 0),
)
BASE = (*UNCOUNTED, "--nproc", WORKERS)
SHORT = (*BASE, "--epochs", 4)
PACED = (*BASE, "--epochs", 12, "--task.pause-seconds", 0.01)

ASYNC, SYNC = "--no-parameter-server.sync", "--parameter-server.sync"
TRANSPORT = "--parameter-server.transport"

PACES = {
    "in step but for one": ("--parameter-server.staleness", 1),
    # it dies when the others have planned no step that is near it
    "far ahead": ("--task.pause-seconds", 0.1, "--task.rank-without-pause", 2),
}

pytestmark = pytest.mark.faults


def fault(kind, rank, step=20, place="loss"):
    return ("--task.fault", kind, "--task.rank", rank, "--task.step", step, "--task.place", place)


def lost_samples(run, rank=1):
    (event,) = run.events("rank_lost")
    assert event["rank"] == rank
    return event["shares"]


@pytest.mark.parametrize(("loaders", "transport"), [(0, "c10d"), (1, "c10d"), (0, "rpc")])
def test_worker_when_killed_then_the_others_go_on_and_what_nobody_used_is_written_down(
    loaders, transport, prewarmed, tmp_path
):
    options = (*fault("kill", 1), "--record-samples", "--num-workers", loaders, TRANSPORT, transport)
    command = prewarmed.run(tmp_path, *SHORT, ASYNC, *options)
    run = RunFiles(tmp_path / "runs/run")
    assert command.code == 0, command.err
    shares = lost_samples(run)
    assert shares[0]["step"] == 20
    not_used = sorted(chain.from_iterable(share["samples"] for share in shares))
    last = shares[-1]["step"]
    # the dead rank's last records may not have been written; after its shares are dealt anew, two have everything
    used = [chain.from_iterable(r["samples"] for r in run.records(rank) if r["step"] > last) for rank in (0, 2)]
    assert (
        len(list(chain(*used)))
        == 4 * NUM_SAMPLES - next(r for r in run.records(0) if r["step"] == last)["samples_seen"]
    )
    summary = run.summary()
    assert summary["status"] == "completed"
    assert summary["metrics"]["loss"]["count"] == 30  # every sample was evaluated, without the dead
    assert f"rank 1 was lost: {len(not_used)} samples of its shares were not used" in summary["not_preserved"]
    assert len(run.records(0)) == len(run.records(3)) == 52


@pytest.mark.parametrize("pace", PACES)
def test_samples_when_a_worker_was_killed_then_each_is_used_or_named_once(pace, prewarmed, tmp_path):
    command = prewarmed.run(tmp_path, *SHORT, ASYNC, *fault("kill", 2), "--record-samples", *PACES[pace])
    run = RunFiles(tmp_path / "runs/run")
    assert command.code == 0, command.err
    shares = lost_samples(run, rank=2)
    named = {(share["epoch"], sample) for share in shares for sample in share["samples"]}
    found = [(record["epoch"], s) for rank in (0, 1) for record in run.records(rank) for s in record["samples"]]
    assert len(found) == len(set(found))
    assert not named & set(found)
    # what is neither is the dead worker's, of steps before
    rest = {(epoch, s) for epoch in range(4) for s in range(NUM_SAMPLES)} - named - set(found)
    sizes = [*[BATCH] * (NUM_SAMPLES // BATCH), NUM_SAMPLES % BATCH] * 4
    assert len(rest) == sum(dure_shares(size, WORKERS)[2] for size in sizes[:19])


@pytest.mark.parametrize("place", ["late eval", "build_model"])
def test_worker_when_killed_between_steps_then_the_run_goes_on_and_before_the_first_it_ends(place, prewarmed, tmp_path):
    command = prewarmed.run(tmp_path, *SHORT, ASYNC, *fault("kill", 1, place=place))
    if place == "build_model":
        assert command.code == 1
        assert "dure: rank 1 was killed (SIGKILL)" in command.err
    else:
        assert command.code == 0, command.err
        assert RunFiles(tmp_path / "runs/run").summary()["metrics"]["loss"]["count"] == 30


@pytest.mark.parametrize(("rank", "mode"), [(3, SYNC), (4, SYNC), (0, SYNC), (3, ASYNC), (4, ASYNC)])
@pytest.mark.parametrize("transport", ["c10d", "rpc"])
def test_rank_that_is_needed_when_killed_then_all_end_within_two_seconds_and_it_is_named(
    rank, mode, transport, prewarmed, tmp_path
):
    command = prewarmed.start(tmp_path, *PACED, mode, TRANSPORT, transport)
    run = RunFiles(tmp_path / "runs/run")
    pids = command.ranks(WORKERS + SERVERS)
    run.wait_for("checkpoint", command)
    os.kill(pids[rank], signal.SIGKILL)
    assert command.wait(seconds=2) == 1
    assert f"dure: rank {rank} was killed (SIGKILL)" in command.err.replace("\n", " ")
    assert run.summary()["status"] == "failed"


@pytest.mark.parametrize("lost", [None, 1])
def test_server_when_killed_then_all_start_again_from_the_last_checkpoint(lost, prewarmed, tmp_path):
    paced = [1 if before == "--max-restarts" else word for before, word in pairwise((None, *PACED))]
    command = prewarmed.start(tmp_path, *paced, ASYNC, "--record-samples")
    run = RunFiles(tmp_path / "runs/run")
    pids = command.ranks(WORKERS + SERVERS)
    run.wait_for("checkpoint", command)
    if lost is not None:
        os.kill(pids[lost], signal.SIGKILL)
        wait_until(lambda: run.events("rank_lost"), "the worker to be missed")
    os.kill(pids[WORKERS], signal.SIGKILL)
    assert command.wait() == 0, command.err
    assert [event["rank"] for event in run.events("restart")] == [WORKERS]
    assert run.summary()["samples"] == 12 * NUM_SAMPLES
    used = [[i for r in run.records(rank) if r["epoch"] == 11 for i in r["samples"]] for rank in range(WORKERS)]
    assert all(used)  # all workers take part again
    assert sorted(chain(*used)) == list(range(NUM_SAMPLES))


def test_worker_in_step_when_killed_then_the_run_ends_and_goes_on_with_fewer(prewarmed, tmp_path):
    command = prewarmed.start(tmp_path, *PACED)
    run = RunFiles(tmp_path / "runs/run")
    pids = command.ranks(WORKERS + SERVERS)
    run.wait_for("checkpoint", command)
    os.kill(pids[1], signal.SIGKILL)
    assert command.wait(seconds=2) == 1
    assert "dure: rank 1 was killed (SIGKILL)" in command.err
    command = prewarmed.run(tmp_path, "train", "--resume", "runs/run", "--nproc", 2, "--quiet")
    assert command.code == 0, command.err
    assert run.summary()["samples"] == 12 * NUM_SAMPLES


def test_worker_when_its_task_fails_then_the_run_ends_with_that(prewarmed, tmp_path):
    command = prewarmed.run(tmp_path, *SHORT, ASYNC, *fault("raise", 1))
    assert command.code == 1
    assert "dure: rank 1 failed after step 19: ValueError: a planned failure" in command.err


@pytest.mark.parametrize("rank", ["all", 1, 3, 4])
def test_rank_when_asked_to_stop_then_all_stop_at_one_step_and_go_on_later(rank, prewarmed, tmp_path):
    command = prewarmed.start(tmp_path, *PACED, ASYNC, "--parameter-server.staleness", 2)
    run = RunFiles(tmp_path / "runs/run")
    pids = command.ranks(WORKERS + SERVERS)
    run.wait_for("checkpoint", command)
    if rank == "all":
        command.send(signal.SIGTERM)
    else:
        os.kill(pids[rank], signal.SIGTERM)
    assert command.wait() == 143, command.err
    event, _ = run.events("interrupted")  # the ranks' and the supervisor's
    assert event["signal"] == signal.SIGTERM
    assert len({len(run.records(rank)) for rank in range(WORKERS + SERVERS)}) == 1
    done = run.records(0)[-1]["samples_seen"]
    assert run.checkpoints()[-1] == f"samples-{done:012d}"
    assert prewarmed.run(tmp_path, "train", "--resume", "runs/run", "--quiet").code == 0
    assert run.summary()["samples"] == 12 * NUM_SAMPLES


def test_torchrun_when_it_starts_five_then_the_last_two_are_servers(tmp_path):
    command = torchrun(tmp_path, *UNCOUNTED, "--epochs", 4, ASYNC, nproc=WORKERS + SERVERS)
    _, err = command.communicate(timeout=100)
    assert command.returncode == 0, err
    summary = RunFiles(tmp_path / "runs/run").summary()
    assert (summary["status"], summary["world_size"], summary["num_devices"]) == ("completed", 5, 3)
    command = torchrun(tmp_path, "train", TASK, "--strategy", "parameter_server", nproc=3)
    _, err = command.communicate(timeout=100)
    assert "torchrun started 3 processes, of which servers is to be as many as there are others: start more" in err


@pytest.mark.parametrize("transport", ["c10d", "rpc"])
def test_the_first_rank_when_killed_then_the_next_one_speaks_for_all(transport, prewarmed, tmp_path):
    command = prewarmed.run(tmp_path, *SHORT, ASYNC, *fault("kill", 0), TRANSPORT, transport)
    run = RunFiles(tmp_path / "runs/run")
    assert command.code == 0, command.err
    assert lost_samples(run, rank=0)[0]["step"] == 20
    assert len(run.events("completed")) == 1
    assert len(run.events("evaluated")) == 4
    assert run.checkpoints()[-1] == f"samples-{4 * NUM_SAMPLES:012d}"
    summary = run.summary()
    assert (summary["status"], summary["samples"], summary["steps"]) == ("completed", 4 * NUM_SAMPLES, 52)
    again = prewarmed.run(tmp_path, "train", "--resume", "runs/run", "--epochs", 5, "--task.fault", "none", "--quiet")
    assert again.code == 2  # a task's option is part of what the run is: without the fault it is another one
    single = ("--strategy", "single", "--nproc", 1)
    again = prewarmed.run(tmp_path, "train", "--resume", "runs/run", "--epochs", 4.5, *single, "--quiet")
    assert again.code == 0, again.err


def test_all_workers_when_killed_then_the_run_ends_with_that(prewarmed, tmp_path):
    command = prewarmed.start(tmp_path, *PACED, ASYNC)
    pids = command.ranks(WORKERS + SERVERS)
    RunFiles(tmp_path / "runs/run").wait_for("checkpoint", command)
    for pid in pids[:WORKERS]:
        os.kill(pid, signal.SIGKILL)
    assert command.wait(seconds=2) == 1
    assert "was killed (SIGKILL)" in command.err


def test_two_workers_when_killed_then_the_last_one_does_it_all(prewarmed, tmp_path):
    command = prewarmed.start(tmp_path, *PACED, ASYNC)
    run = RunFiles(tmp_path / "runs/run")
    pids = command.ranks(WORKERS + SERVERS)
    run.wait_for("checkpoint", command)
    os.kill(pids[2], signal.SIGKILL)
    wait_until(lambda: run.events("rank_lost"), "the first to be missed")
    os.kill(pids[1], signal.SIGKILL)
    assert command.wait() == 0, command.err
    assert [event["rank"] for event in run.events("rank_lost")] == [2, 1]
    assert json.loads((run.path / "summary.json").read_text())["samples"] == 12 * NUM_SAMPLES
