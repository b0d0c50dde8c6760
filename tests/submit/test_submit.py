"""Jobs that `dure submit` hands to clusters, and those that it refuses."""

import json
import os
import shlex
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from dure.api.submit import Training, Wishes, prepare
from dure.cli import main
from dure.errors import EnvironmentLacks, Misuse, RunInvalid, SpecInvalid, SubmissionRefused
from dure.submit import kubernetes
from dure.submit.job import run_command, seconds_of, slurm_time

TASK = "package.tasks:Digits"
NOW = datetime(2026, 11, 20, 10, 26, 46)


def words(capsys, *argv):
    """Run `dure submit --dry-run`, and return what it prints."""
    assert main(["submit", "--dry-run", *argv]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refusal(capsys, *argv):
    """Return the sentence with which `dure submit` refuses."""
    assert main(["submit", *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("dure: ")
    assert said.count("\n") == 1
    return said


def manifests(**wishes):
    """Return the manifests that would be applied, as plain values."""
    asked = Wishes(to="kubernetes", image="dure:1", name="run", **wishes)
    options = kubernetes.KubernetesOptions(image="dure:1", kind=asked.kind or "trainjob", claim=asked.claim)
    return kubernetes.manifests(prepare(Training(task=TASK), asked, now=NOW).job, options)


# --- Slurm


def test_slurm_when_nothing_is_asked_then_the_script_has_what_a_requeue_needs(capsys):
    text = words(capsys, "--to", "slurm", "--name", "first", TASK)
    for line in ("--requeue", "--signal=USR1@120", "--open-mode=append", "--nodes=1", "--job-name=first"):
        assert f"\n#SBATCH {line}\n" in text
    assert f"--chdir={os.getcwd()}\n" in text
    assert '    scontrol requeue Incomplete "$SLURM_JOB_ID" && exec sleep 300\n' in text


def test_slurm_when_one_task_starts_its_ranks_then_it_has_a_core_for_each(capsys):
    text = words(capsys, "--to", "slurm", TASK, "--nproc", "3")
    assert "\n#SBATCH --cpus-per-task=3\n" in text
    assert 'bad-exit=0 --cpus-per-task=3 "${train[@]}"' in text
    asked = words(capsys, "--to", "slurm", "--cpus-per-task", "6", TASK, "--nproc", "3")
    assert "\n#SBATCH --cpus-per-task=6\n" in asked


def test_slurm_when_wishes_are_given_then_each_is_a_line(capsys):
    text = words(
        capsys,
        *("--to", "slurm", "--nodes", "2", "--tasks-per-node", "4", "--gpus-per-task=1", "--cpus-per-task", "3"),
        *("--time", "1:30:00", "--partition", "big", "--sbatch=--account=me", "--sbatch=--mem=8G", TASK),
    )
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    expected = ["--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=3", "--gpus-per-node=4", "--time=0-01:30:00"]
    assert lines[1:7] == [*expected, "--partition=big"]
    assert lines[-2:] == ["--account=me", "--mem=8G"]
    assert 'srun --wait=60 --kill-on-bad-exit=0 --cpus-per-task=3 "${train[@]}"\n' in text


def test_slurm_when_a_value_has_quotes_then_bash_reads_it_as_it_was_written(capsys, tmp_path):
    nasty = "a b'c\"$(touch x);`touch x`\\\ntouch x\r\x1b\u202e두레"
    text = words(capsys, "--to", "slurm", "--name", "run", TASK, "--task.word", nasty)
    stub = tmp_path / "srun"
    stub.write_text('#!/bin/bash\nshift 2\nprintf "%s\\0" "$@"\n')
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash"], input=text.encode(), cwd=tmp_path, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, check=True,
    )  # fmt: skip
    assert f"--task.word={nasty}" in done.stdout.decode().split("\0")
    assert text.replace("\n", "").isprintable()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("to", [["slurm"], ["kubernetes", "--image", "a"], ["ray"]], ids=lambda to: to[0])
@pytest.mark.parametrize("name", ["a\ntouch x", "a\rb", "a\x1b[2J", "a\u202eb", "a\udc80"], ids=ascii)
def test_submit_when_the_folders_name_would_be_a_line_of_its_own_then_it_is_refused(
    to, name, capsys, tmp_path, monkeypatch
):
    (tmp_path / name).mkdir()
    (tmp_path / name / "train.py").touch()
    monkeypatch.chdir(tmp_path / name)
    assert "use a path without control characters" in refusal(capsys, "--to", *to, "--dry-run", "train.py:T")


@pytest.mark.parametrize("to", [["slurm"], ["kubernetes", "--image", "a"], ["ray"]], ids=lambda to: to[0])
def test_submit_when_another_path_would_be_a_line_of_its_own_then_it_is_refused(to, capsys):
    assert "--python is" in refusal(capsys, "--to", *to, "--python", "py\ntouch x", TASK)
    assert "the run's folder is" in refusal(capsys, "--to", *to, TASK, "--runs-dir", "a\ntouch x")
    assert "is no text that a command can be given" in refusal(capsys, "--to", *to, TASK, "--task.word", "a\udc80")


RUNS = "JobId=12 JobState=RUNNING Reason=None PreemptTime=None Partition=low"
PREEMPTED = "JobId=12 JobState=RUNNING Reason=None PreemptTime=2026-11-22T19:49:12 Partition=low"
CANCELLED = "JobId=12 JobState=CANCELLED Reason=None PreemptTime=2026-11-22T19:49:12 Partition=low"
BACK = ["requeue Incomplete 12", "sleep 300"]


def end_of_slurms_script(capsys, folder, code, job, *, mode="REQUEUE", requeue_code=0) -> list[str]:
    """Let the script of a job run whose ranks end, and return what it does then."""
    text = words(capsys, "--to", "slurm", "--name", "run", TASK)
    program(folder, "srun", f"exit {code}")
    shown = f'"show job") echo "{job}" ;; "show partition") echo "PartitionName=$4 PreemptMode={mode} State=UP" ;;'
    program(folder, "scontrol", f'case "$1 $2" in {shown} *) echo "$@" >> calls; exit {requeue_code} ;; esac')
    program(folder, "sleep", f'echo sleep "$@" >> calls; exit {code}')
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "SLURM_JOB_PARTITION": "low"}
    done = subprocess.run(["bash"], input=text, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == code
    seen = folder / "calls"
    return seen.read_text().splitlines() if seen.exists() else []


@pytest.mark.parametrize("code", [0, 1, 75, 137, 138, 143])
def test_slurms_script_when_the_ranks_end_then_it_goes_back_if_they_were_told_to_go(code, capsys, tmp_path):
    assert end_of_slurms_script(capsys, tmp_path, code, RUNS) == (BACK if code in (75, 138) else [])


@pytest.mark.parametrize("code", [0, 1, 75, 137, 138, 143])
def test_slurms_script_when_the_job_is_preempted_then_it_goes_back_unless_it_is_done(code, capsys, tmp_path):
    assert end_of_slurms_script(capsys, tmp_path, code, PREEMPTED) == (BACK if code else [])


@pytest.mark.parametrize("code", [75, 143])
def test_slurms_script_when_the_partition_cancels_then_a_preempted_job_stays_away(code, capsys, tmp_path):
    assert end_of_slurms_script(capsys, tmp_path, code, PREEMPTED, mode="CANCEL") == []


@pytest.mark.parametrize("code", [75, 143])
def test_slurms_script_when_the_job_is_cancelled_then_it_waits_for_its_end(code, capsys, tmp_path):
    assert end_of_slurms_script(capsys, tmp_path, code, CANCELLED) == ["sleep 300"]


@pytest.mark.parametrize("job", [RUNS, ""])
def test_slurms_script_when_slurm_does_not_put_it_back_then_it_ends(job, capsys, tmp_path):
    assert end_of_slurms_script(capsys, tmp_path, 75, job, requeue_code=1) == ["requeue Incomplete 12"]


def test_slurms_script_when_it_is_started_once_more_then_it_resumes(capsys, tmp_path):
    text = words(capsys, "--to", "slurm", "--name", "run", TASK, "--epochs", "3")
    (tmp_path / "srun").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    said = []
    for restarts in ({}, {"SLURM_RESTART_COUNT": "1"}):
        environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **restarts}
        said.append(subprocess.run(["bash"], input=text, env=environ, capture_output=True, text=True).stdout)
    assert said[0].endswith(f"-m dure train {TASK} --epochs=3 --name=run --runs-dir=runs\n")
    assert said[1] == said[0].rstrip() + " --resume auto\n"


def test_slurm_when_a_run_is_to_go_on_then_it_is_named_and_no_task_is_needed(capsys, tmp_path):
    with pytest.raises(RunInvalid, match="does not exist"):
        prepare(Training(resume=tmp_path / "none"), Wishes(to="slurm"))
    assert "does not exist" in refusal(capsys, "--to", "slurm", "--", "--resume", str(tmp_path / "none"))


# --- Kubernetes


def test_kubernetes_when_a_pod_is_one_rank_then_dure_itself_is_its_command():
    (job,) = manifests(nodes=2, time="90", gpus_per_task=1, cpus_per_task=2)
    trainer = job["spec"]["trainer"]
    place = ["--name=run", "--runs-dir=runs"]
    assert trainer["command"] == ["python", "-m", "dure", "train", TASK, *place, "--resume", "auto"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 1)
    assert trainer["resourcesPerNode"] == {"requests": {"cpu": "2"}, "limits": {"nvidia.com/gpu": "1"}}
    assert job["spec"]["activeDeadlineSeconds"] == 5400


def test_kubernetes_when_a_pod_is_several_ranks_then_torchrun_starts_them():
    (job,) = manifests(tasks_per_node=4)
    assert job["spec"]["trainer"]["command"][:6] == ["python", "-m", "torch.distributed.run", "-m", "dure", "train"]
    assert job["spec"]["trainer"]["numProcPerNode"] == 4


def test_indexed_job_when_read_as_its_pods_do_then_each_is_a_rank():
    from dure.cluster.rank import RankInfo, meeting_point, read_launcher

    service, job = manifests(kind="job", nodes=3)
    pod = job["spec"]["template"]["spec"]
    environ = {entry["name"]: entry.get("value", "2") for entry in pod["containers"][0]["env"]}
    launched = read_launcher({**environ, "JOB_COMPLETION_INDEX": "2"})
    assert launched.rank == RankInfo(rank=2, node_rank=2, world_size=3)
    assert meeting_point(launched, environ).host == "run-0.run"
    assert (pod["subdomain"], service["metadata"]["name"], service["spec"]["clusterIP"]) == ("run", "run", "None")
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "run"}
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (3, 3)


def test_indexed_job_when_exit_codes_are_known_then_misuse_is_final_and_75_is_not_counted():
    rules = manifests(kind="job")[1]["spec"]["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("FailJob", [2, 3]),
        ("Ignore", [75]),
        ("Ignore", None),
    ]
    rules = manifests(kind="job", tasks_per_node=2)[1]["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore"]  # torchrun ends with 1 whatever happened


def test_claim_when_given_then_it_is_where_the_runs_go():
    pod = manifests(kind="job", claim="shared")[1]["spec"]["template"]["spec"]
    assert {"name": "runs", "mountPath": "/runs"} in pod["containers"][0]["volumeMounts"]
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "shared"}} in pod["volumes"]
    assert "--runs-dir=/runs" in pod["containers"][0]["command"]


def test_yaml_when_written_then_texts_are_quoted_and_blocks_are_indented():
    document = {"kind": "Job", "on": [{"a": "yes", "b": {}}, [], 3], "x/y": {"z": None, "é\u2028": "😀\n"}}
    assert kubernetes.to_yaml([document, {"n": True}]).splitlines() == [
        'kind: "Job"',
        '"on":',
        '  - a: "yes"',
        "    b: {}",
        "  - []",
        "  - 3",
        "x/y:",
        "  z: null",
        '  "é\\U00002028": "😀\\n"',
        "---",
        '"n": true',
    ]


# --- Ray


def test_ray_when_ranks_are_on_two_nodes_then_each_actor_has_torchruns_variables(capsys):
    plan = json.loads(words(capsys, "--to", "ray", "--nodes", "2", "--tasks-per-node", "2", "--name", "run", TASK))
    assert plan["placement_group"] == {"bundles": [{"CPU": 2.0}] * 2, "strategy": "STRICT_SPREAD"}
    from dure.cluster.rank import RankInfo

    places = [RankInfo.from_environment(actor["environment"]) for actor in plan["actors"]]
    assert [(place.rank, place.local_rank, place.node_rank) for place in places] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 0, 1),
        (3, 1, 1),
    ]
    assert [actor["bundle"] for actor in plan["actors"]] == [0, 0, 1, 1]
    assert plan["command"] == ["dure", "train", TASK, "--name=run", "--runs-dir=runs"]


def test_ray_when_a_rank_is_alone_then_it_may_start_ranks_of_its_own(capsys):
    plan = json.loads(words(capsys, "--to", "ray", "--gpus-per-task", "2", TASK, "--nproc", "2"))
    assert plan["actors"] == [{"bundle": 0, "num_cpus": 2, "num_gpus": 2, "environment": {}}]
    assert plan["placement_group"]["bundles"] == [{"CPU": 2.0, "GPU": 2.0}]


# --- what all have in common


@pytest.mark.parametrize("to", ["slurm", "kubernetes", "ray"])
def test_dry_run_when_json_is_asked_for_then_one_object_is_printed(to, capsys):
    image = ["--image", "dure:1"] if to == "kubernetes" else []
    shown = json.loads(words(capsys, "--json", "--to", to, "--name", "run", *image, TASK))
    assert (shown["to"], shown["name"], shown["run"]) == (to, "run", "runs/run")
    assert ("plan" in shown) == (to == "ray")


@pytest.mark.parametrize("to", ["slurm", "kubernetes", "ray"])
def test_name_when_none_is_given_then_it_is_one_that_the_cluster_takes(to):
    job = prepare(Training(task="my.tasks:Big_Task"), Wishes(to=to, image="x" if to == "kubernetes" else None), now=NOW)
    expected = "dure-big-task-20261120-102646" if to == "kubernetes" else "2026-11-20_10-26-46_big-task_single"
    assert job.job.name == expected


def test_options_and_tables_when_the_training_has_them_then_they_go_through(capsys):
    flags = ("--strategy", "fsdp", "--fsdp.units", "0", "--no-fsdp.reshard-after-forward", "--checkpoint.keep", "3")
    text = words(capsys, "--to", "slurm", "--tasks-per-node", "2", TASK, *flags)
    for word in ("--fsdp.units=0", "--fsdp.reshard-after-forward=false", "--checkpoint.keep=3", "--strategy=fsdp"):
        assert f" {word}" in text
    assert "strategy ddp has no option units" in refusal(
        capsys, "--to", "slurm", "--tasks-per-node", "2", TASK, "--fsdp.units", "0"
    )
    assert "--fsdp.units is a flag of the training: write it after the task" in refusal(
        capsys, "--to", "slurm", "--fsdp.units", "0", TASK
    )


def test_flags_when_the_training_has_them_then_they_go_through_as_they_were_written(capsys):
    flags = ["--no-shuffle", "--compile", "--epochs", "3", "--task.hidden", "64", "--no-task.deep", "--name", "mine"]
    text = words(capsys, "--to", "slurm", TASK, *flags)
    (line,) = [line for line in text.splitlines() if line.startswith("train=(")]
    rest = shlex.split(line.removeprefix("train=(").removesuffix(")"))[5:]
    assert sorted(rest) == sorted(
        [
            *("--shuffle=false", "--compile=true", "--epochs=3", "--task.hidden=64", "--task.deep=false"),
            *("--name=mine", "--runs-dir=runs"),
        ]
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--to", "cray", TASK], "unknown cluster 'cray': did you mean ray?"),
        (["--to", "slurm"], "no task is given: write it after the flags"),
        (["--to", "slurm", "--image", "x", TASK], "--image is given but slurm has no such thing"),
        (["--to", "ray", "--time", "9", TASK], "--time is given but ray has no such thing"),
        (["--to", "slurm", "--strategy", "ddp", TASK], "--strategy is a flag of the training: write it after the task"),
        (["--to", "slurm", TASK, "--nodes", "2"], "--nodes stands after the task"),
        (["--to", "slurm", "--nodes", "0", TASK], "--nodes is 0 but must be a whole number from 1"),
        (["--to", "slurm", "--time", "soon", TASK], "time is 'soon' but must be minutes"),
        (["--to", "slurm", "--time", "0:00", TASK], "time is '0:00' but must be minutes"),
        (["--to", "slurm", "--name", "../x", TASK], "'../x' cannot name a run"),
        (["--to", "slurm", "--name", "a", TASK, "--name", "b"], "--name is a and b: give it once"),
        (["--to", "slurm", "--partition", "a b", TASK], "--partition is 'a b' but must be"),
        (["--to", "slurm", "--sbatch", "account=me", TASK], "--sbatch 'account=me' is no option of sbatch"),
        (["--to", "slurm", "--sbatch=--a=b\n#SBATCH --c", TASK], "is no option of sbatch: write one line"),
        (["--to", "slurm", "none.py:T"], "none.py does not exist"),
        (["--to", "slurm", TASK, "--epochs", "-1"], "epochs is '-1' but must be a number above 0"),
        (["--to", "slurm", "--nodes", "2", TASK, "--nproc", "3"], "nproc is 3 but --tasks-per-node is 1, and both are"),
        (
            ["--to", "slurm", TASK, "--preflight"],
            "preflight is for runs that dure starts itself, but slurm starts these",
        ),
        (["--to", "slurm", "--nodes", "2", TASK, "--strategy", "dp"], "strategy is dp, which is one process, but 2"),
        (["--to", "slurm", "--nodes", "2", TASK, "--global-batch-size", "1"], "less than one sample for each of 2"),
        (["--to", "kubernetes", TASK], "--to kubernetes needs --image"),
        (["--to", "kubernetes", "--image", "a b", TASK], "--image is 'a b' but must name a container image"),
        (["--to", "kubernetes", "--image", "a", "--kind", "pod", TASK], "--kind is 'pod' but must be one of"),
        (["--to", "kubernetes", "--image", "a", "--name", "My_Run", TASK], "'My_Run' cannot name a job of Kubernetes"),
        (["--to", "kubernetes", "--image", "a", "--name", "x" * 49, TASK], "use 1 to 48 lower-case letters"),
        (["--to", "kubernetes", "--image", "a", "--namespace", "A", TASK], "--namespace is 'A' but must be a name"),
        (["--to", "kubernetes", "--image", "a", "--claim", "c", TASK, "--runs-dir", "r"], "must begin with / in a pod"),
        (
            ["--to", "kubernetes", "--image", "a", "--kind", "job", "--runtime", "r", TASK],
            "--runtime is given but --kind job needs none",
        ),
    ],
)
def test_submit_when_something_cannot_be_then_one_sentence_says_so(argv, said, capsys):
    assert said in refusal(capsys, *argv)


def test_settings_when_several_cannot_be_then_all_are_said_at_once():
    with pytest.raises(SpecInvalid, match="seed is 'x'") as caught:
        prepare(Training(task=TASK, settings={"seed": "x", "epochs": "0"}), Wishes(to="slurm"))
    assert len(caught.value.faults) == 2


# --- the clusters' own commands


@pytest.mark.parametrize(("to", "command"), [("slurm", "sbatch"), ("kubernetes", "kubectl")])
def test_submit_when_the_clusters_command_is_missing_then_it_is_said_with_3(to, command, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    image = ["--image", "dure:1"] if to == "kubernetes" else []
    assert main(["submit", "--to", to, *image, TASK]) == 3
    assert f"{command} cannot be run here (No such file or directory)" in capsys.readouterr().err


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """Return a folder whose programs come first."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def program(folder, name, body):
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def test_slurm_when_it_takes_the_job_then_its_number_is_told(path, capsys):
    program(path, "sbatch", f'echo "$@" > {path}/args; cat > {path}/script; echo "12;cluster"')
    assert main(["submit", "--to", "slurm", "--name", "run", TASK]) == 0
    assert capsys.readouterr().out == "job 12 of Slurm: run runs/run, output in run-12.out\n"
    assert (path / "args").read_text() == "--parsable\n"
    assert (path / "script").read_text().startswith("#!/bin/bash\n")


def test_kubernetes_when_kubectl_applies_then_it_gets_the_manifest(path, capsys):
    program(path, "kubectl", f'echo "$@" > {path}/args; cat > {path}/manifest; echo trainjob/run created')
    assert main(["submit", "--to", "kubernetes", "--image", "dure:1", "--name", "run", TASK]) == 0
    assert capsys.readouterr().out == "trainjob/run created\nrun runs/run in its pods\n"
    assert (path / "args").read_text() == "apply -f -\n"
    assert (path / "manifest").read_text().startswith('apiVersion: "trainer.kubeflow.org/v1alpha1"\n')


def test_slurm_when_it_refuses_then_its_words_are_told(path, capsys):
    program(path, "sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    assert main(["submit", "--to", "slurm", "--partition", "x", TASK]) == 1
    assert "sbatch did not take the job (exit code 1): sbatch: error: invalid partition" in capsys.readouterr().err


def test_command_when_it_fails_without_a_word_then_that_is_said():
    with pytest.raises(SubmissionRefused, match=r"false did not take the job \(exit code 1\): no word"):
        run_command(["false"], given="", lacking="")
    with pytest.raises(EnvironmentLacks, match="cannot be run here"):
        run_command(["/nowhere/at/all"], given="", lacking="")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("2-0", 172800), ("1-12:30", 131400), ("1-00:00:05", 86405)],
)
def test_time_when_written_as_slurm_does_then_it_is_seconds(text, seconds):
    assert seconds_of(text) == seconds
    assert seconds_of(slurm_time(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "-", "1-", "a", "1:2:3:4", "1-2:3:4:5", "-5", "1.5", "0"])
def test_time_when_it_is_none_then_it_is_refused(text):
    with pytest.raises(Misuse, match="must be minutes"):
        seconds_of(text)
