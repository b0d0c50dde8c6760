"""Preemption under a real Slurm: jobs in a partition of a higher tier take the nodes of those in a lower one."""

import getpass
import signal
import time
from collections.abc import Iterator

import pytest

from tests.cluster.jobs import BASE, SAMPLES, differences, own_address, submitted
from tests.commands import PATIENCE_SECONDS, RunFiles, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

RANKS = {
    "a rank on each node": ("--nodes", "2"),
    "two ranks on a node": ("--tasks-per-node", "2"),
    "ranks of its own": ("--cpus-per-task", "2"),
}


@pytest.fixture(autouse=True)
def nothing_left(slurm) -> Iterator[None]:
    """Let no job of a test that failed take the nodes of the next one."""
    yield
    slurm.ask("scancel", "--user", getpass.getuser())


def queued(slurm, dure, folder, partition, ranks="two ranks on a node", pause=1.0) -> tuple[str, RunFiles]:
    """Submit a job that is slow, until it is told to hurry, to one of the partitions of the lower tier."""
    slowly = ("--task.pause-seconds", pause, "--task.paused-until", folder / "in a hurry")
    words = ["--name", "run", "--partition", partition, *RANKS[ranks], *BASE[1:], *slowly]
    own = ("--nproc", "2") if ranks == "ranks of its own" else ()
    job = submitted(slurm, dure, folder, *words, *own, MASTER_ADDR=own_address())
    return job, RunFiles(folder / "runs/run")


def training(*arguments, **named) -> tuple[str, RunFiles]:
    """Submit a job and wait until it trains."""
    job, run = queued(*arguments, **named)
    wait_until(lambda: run.records(0) and run.records(1), "a step", 2 * PATIENCE_SECONDS)
    return job, run


def hurry(run: RunFiles) -> None:
    """Let what is left of a run take no longer than it has to."""
    (run.path.parents[1] / "in a hurry").touch()


def agreed_end(run: RunFiles) -> int:
    """Return after how many samples both ranks stopped, which is where the newest checkpoint is."""
    seen, other = (run.records(rank)[-1]["samples_seen"] for rank in (0, 1))
    assert seen == other
    assert run.checkpoints()[-1:] == [f"samples-{seen:012d}"]
    assert 0 < seen < SAMPLES
    return seen


def starts(run: RunFiles) -> list[int]:
    """Return after how many samples each start of the run began to train."""
    return [event["samples_seen"] for event in run.events("training")]


def stays_away(slurm, job, state) -> None:
    """See that a job has ended as it is said, and that free nodes do not bring it back."""
    slurm.wait_for(job, state)
    time.sleep(8)  # as long as `release` gives Slurm to put one back
    assert slurm.state(job).startswith(state)
    assert slurm.fields(job)["Restarts"] == "0"


@pytest.mark.parametrize(
    ("partition", "ranks"),
    [
        ("low", "a rank on each node"),
        ("low", "two ranks on a node"),
        ("low", "ranks of its own"),
        ("low_grace", "a rank on each node"),
        ("low_grace", "ranks of its own"),
    ],
)
def test_job_when_it_is_preempted_then_it_comes_back_and_loses_no_step(
    partition, ranks, slurm, dure, control, tmp_path
):
    job, run = training(slurm, dure, tmp_path, partition, ranks)
    with slurm.nodes_taken():
        slurm.release(job)
        slurm.wait_for(job, "PENDING Resources")
        seen = agreed_end(run)
    hurry(run)
    slurm.wait_for(job, "COMPLETED")
    assert starts(run) == [0, seen]
    assert differences(slurm, dure, run.path, control) == ""


def test_job_when_it_is_preempted_again_and_again_then_it_loses_no_step(slurm, dure, control, tmp_path):
    job, run = training(slurm, dure, tmp_path, "low_grace")
    begun = [0]
    for _ in range(2):
        with slurm.nodes_taken():
            slurm.release(job)
            begun.append(agreed_end(run))
        wait_until(lambda: run.records(0)[-1]["samples_seen"] > begun[-1], "a further step", 2 * PATIENCE_SECONDS)
    hurry(run)
    slurm.wait_for(job, "COMPLETED")
    assert starts(run) == begun
    assert differences(slurm, dure, run.path, control) == ""


def test_job_when_a_step_outlasts_the_grace_time_then_the_next_sigterm_does_not_end_it(slurm, dure, control, tmp_path):
    job, run = training(slurm, dure, tmp_path, "low_short_grace", pause=3.0)
    with slurm.nodes_taken():
        slurm.release(job)
        seen = agreed_end(run)
    hurry(run)
    slurm.wait_for(job, "COMPLETED")
    assert starts(run) == [0, seen]
    assert differences(slurm, dure, run.path, control) == ""


@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_job_when_it_is_preempted_before_it_trains_then_it_begins_when_it_is_back(
    seconds, slurm, dure, control, tmp_path
):
    job, run = queued(slurm, dure, tmp_path, "low_grace")
    wait_until(lambda: f"{job}.0" in slurm.ask("squeue", "-h", "--steps", "-o%i").split(), "srun")
    time.sleep(seconds)
    with slurm.nodes_taken():
        slurm.release(job)
    hurry(run)
    slurm.wait_for(job, "COMPLETED")
    assert differences(slurm, dure, run.path, control) == ""


@pytest.mark.parametrize(
    ("partition", "told"),
    [
        ("low", {signal.SIGUSR1, signal.SIGTERM}),  # within milliseconds of each other
        ("low_grace", {signal.SIGUSR1}),
    ],
    ids=["low", "low_grace"],
)
def test_job_when_preemption_is_told_by_its_own_signal_then_it_comes_back(
    partition, told, slurm, dure, control, tmp_path
):
    with slurm.configured("SlurmctldParameters=preempt_send_user_signal"):
        job, run = training(slurm, dure, tmp_path, partition)
        with slurm.nodes_taken():
            slurm.release(job)
            seen = agreed_end(run)
    hurry(run)
    slurm.wait_for(job, "COMPLETED")
    assert run.events("interrupted")[0]["signal"] in told
    assert starts(run) == [0, seen]
    assert differences(slurm, dure, run.path, control) == ""


@pytest.mark.parametrize(("partition", "state"), [("low_cancel", "PREEMPTED"), ("low_cancel_grace", "FAILED")])
def test_job_when_its_partition_cancels_then_it_stays_away_and_another_goes_on(
    partition, state, slurm, dure, control, tmp_path
):
    job, run = training(slurm, dure, tmp_path, partition)
    with slurm.nodes_taken():
        slurm.wait_for(job, state)
        seen = agreed_end(run)
    stays_away(slurm, job, state)
    hurry(run)
    again = submitted(slurm, dure, tmp_path, "--tasks-per-node", "2", "--", "--resume", "runs/run")
    slurm.wait_for(again, "COMPLETED")
    assert starts(run) == [0, seen]
    assert differences(slurm, dure, run.path, control) == ""


@pytest.mark.parametrize("ranks", ["two ranks on a node", "ranks of its own"])
def test_job_when_the_user_cancels_it_then_it_stays_away_with_a_checkpoint(ranks, slurm, dure, tmp_path):
    job, run = training(slurm, dure, tmp_path, "low_grace", ranks)
    slurm.ask("scancel", job)
    stays_away(slurm, job, "CANCELLED")
    agreed_end(run)


def test_job_when_the_user_cancels_it_in_its_grace_time_then_it_stays_away(slurm, dure, tmp_path):
    job, run = training(slurm, dure, tmp_path, "low_grace", pause=3.0)
    taking = slurm.ask("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    wait_until(lambda: slurm.fields(job).get("PreemptTime", "None") != "None", "the preemption")
    assert slurm.state(job).startswith("RUNNING")
    slurm.ask("scancel", job)
    slurm.wait_for(job, "CANCELLED")
    slurm.ask("scancel", taking)
    stays_away(slurm, job, "CANCELLED")
    agreed_end(run)


def test_job_when_the_user_sends_it_sigterm_then_it_ends_with_a_checkpoint(slurm, dure, tmp_path):
    job, run = training(slurm, dure, tmp_path, "low_grace")
    slurm.ask("scancel", "--signal=TERM", job)
    stays_away(slurm, job, "FAILED")
    assert slurm.fields(job)["ExitCode"] == "143:0"
    agreed_end(run)
