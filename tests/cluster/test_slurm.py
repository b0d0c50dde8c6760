"""Jobs under a real Slurm: ranks of srun, batch scripts, requeues."""

import pytest

from tests.cluster.jobs import BASE, SLOWLY, differences, own_address, submitted
from tests.commands import RunFiles, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_srun_when_it_starts_two_tasks_then_they_are_one_run(slurm, dure, control, tmp_path):
    done = slurm.run("srun", "-N1", "-n2", *dure, *BASE, "--name", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]
    run = RunFiles(tmp_path / "runs/run")
    assert (run.summary()["world_size"], run.events("training")[0]["transport"]) == (2, "shared memory")
    assert differences(slurm, dure, run.path, control) == ""


def test_srun_when_tasks_are_on_two_nodes_then_they_are_one_run(slurm, dure, control, tmp_path):
    done = slurm.run(
        "srun", "-N2", "-n2", *dure, *BASE, "--name", "run", cwd=tmp_path, MASTER_ADDR=own_address()
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = RunFiles(tmp_path / "runs/run")
    assert (run.summary()["world_size"], run.events("training")[0]["transport"]) == (2, "sockets (gloo)")
    assert differences(slurm, dure, run.path, control) == ""


def test_srun_when_the_first_node_has_no_name_in_the_network_then_master_addr_is_asked_for(slurm, dure, tmp_path):
    words = [*BASE, "--name", "run", "--timeout-seconds", "3"]
    done = slurm.run("srun", "-N2", "-n2", *dure, *words, cwd=tmp_path)
    assert done.returncode == 3
    assert "rank 0 is to serve n1:" in done.stderr
    assert "set MASTER_ADDR" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_srun_when_a_rank_fails_then_the_cause_is_shown(slurm, dure, tmp_path):
    fault = ("--task.fault", "raise", "--task.rank", "1")
    done = slurm.run("srun", "-N1", "-n2", *dure, *BASE, *fault, "--name", "run", cwd=tmp_path)
    assert done.returncode == 1
    assert "ValueError: a planned failure" in done.stderr
    assert RunFiles(tmp_path / "runs/run").summary()["status"] == "failed"


def test_srun_when_settings_cannot_be_then_one_rank_says_so(slurm, dure, tmp_path):
    done = slurm.run("srun", "-N1", "-n2", *dure, *BASE, "--nproc", "3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("nproc is 3 but srun started 2 processes here: leave --nproc out, srun decides") == 1


def test_srun_when_it_starts_one_task_then_that_may_start_ranks_of_its_own(slurm, dure, control, tmp_path):
    done = slurm.run("srun", "-n1", *dure, *BASE, "--nproc", "2", "--name", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert differences(slurm, dure, tmp_path / "runs/run", control) == ""


@pytest.mark.parametrize("shell", ["sbatch", "salloc"])
def test_shell_of_slurm_when_it_has_tasks_but_no_srun_then_it_is_no_rank(shell, slurm, dure, tmp_path):
    script = tmp_path / "script.sh"
    script.write_text(f"#!/bin/bash\n{' '.join([*dure, *BASE])} --name run\n")
    script.chmod(0o755)
    words = ["sbatch", "--wait", "-n2", script] if shell == "sbatch" else ["salloc", "-n2", script]
    done = slurm.run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert RunFiles(tmp_path / "runs/run").summary()["world_size"] == 1


def test_submit_when_slurm_has_room_then_the_run_completes(slurm, dure, control, tmp_path):
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    words = ["--name", "run", "--tasks-per-node", "2", "--cpus-per-task", "1", "--time", "5", "--partition", "main"]
    job = submitted(slurm, dure, folder, *words, '--sbatch=--comment="a b"', *BASE[1:])
    slurm.wait_for(job, "COMPLETED")
    assert differences(slurm, dure, folder / "runs/run", control) == ""
    assert (folder / f"run-{job}.out").exists()


def test_submit_when_the_name_is_taken_then_the_other_run_is_left_alone(slurm, dure, control, tmp_path):
    (tmp_path / "runs/run").mkdir(parents=True)
    job = submitted(slurm, dure, tmp_path, "--name", "run", "--tasks-per-node", "2", *BASE[1:])
    slurm.wait_for(job, "FAILED")
    assert "exists already: choose another --name" in (tmp_path / f"run-{job}.out").read_text()
    assert list((tmp_path / "runs/run").iterdir()) == []


def test_submit_when_slurm_announces_the_end_then_the_job_goes_back_and_the_run_goes_on(slurm, dure, control, tmp_path):
    job = submitted(slurm, dure, tmp_path, "--name", "run", "--tasks-per-node", "2", *BASE[1:], *SLOWLY)
    run = RunFiles(tmp_path / "runs/run")
    wait_until(lambda: run.records(0), "a step")
    slurm.ask("scancel", "--signal=USR1", job)
    slurm.release(job)
    seen = run.records(0)[-1]["samples_seen"]
    assert 0 < seen < 3 * 97
    assert run.checkpoints()[-1] == f"samples-{seen:012d}"
    slurm.wait_for(job, "COMPLETED")
    assert len(run.events("training")) == 2
    assert run.events("training")[1]["samples_seen"] == seen
    assert differences(slurm, dure, run.path, control) == ""


def test_submit_when_slurm_requeues_the_job_then_the_run_goes_on(slurm, dure, control, tmp_path):
    words = ["--name", "run", "--tasks-per-node", "2", *BASE[1:], *SLOWLY, "--checkpoint.every-samples", "16"]
    job = submitted(slurm, dure, tmp_path, *words)
    run = RunFiles(tmp_path / "runs/run")
    wait_until(run.checkpoints, "a checkpoint")
    slurm.ask("scontrol", "requeue", job)
    slurm.release(job)
    slurm.wait_for(job, "COMPLETED")
    used = [index for rank in (0, 1) for record in run.records(rank) for index in record["samples"]]
    assert sorted(used) == sorted([*range(97)] * 3)


def test_submit_when_the_job_runs_out_of_time_then_it_is_told_before_and_goes_back(slurm, dure, tmp_path):
    words = ["--name", "run", "--tasks-per-node", "2", "--time", "1", "--grace-seconds", "25"]
    job = submitted(slurm, dure, tmp_path, *words, *BASE[1:], "--task.pause-seconds", "2")
    slurm.wait_for(job, "PENDING BeginTime", seconds=120)
    assert f"dure: job {job} goes back into the queue" in (tmp_path / f"run-{job}.out").read_text()
    slurm.ask("scancel", job)


def test_submit_when_slurm_refuses_then_its_words_are_told(slurm, dure, tmp_path):
    done = slurm.run(*dure, "submit", "--to", "slurm", "--partition", "other", *BASE[1:], cwd=tmp_path)
    assert done.returncode == 1
    assert "sbatch did not take the job" in done.stderr
    assert "invalid partition specified: other" in done.stderr
