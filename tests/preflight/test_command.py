"""`dure preflight`, and runs that begin with it."""

import io
import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dure.cli import main
from dure.cli.preflight import table
from dure.preflight.findings import Finding, Report, by_gravity, failure, ok, same_together, warning

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
HERE = ("preflight", "--nproc", "2", "--threads", "1", "--device", "cpu")


def test_preflight_when_all_is_well_then_says_so_and_leaves_nothing(prewarmed, tmp_path):
    run = prewarmed.run(tmp_path, *HERE)
    assert run.code == 0, run.err
    assert run.err == ""
    lines = run.out.splitlines()
    assert lines[-1].startswith("ready: 9 checks in ")
    assert any(line.startswith("ok      collective  2 ranks over cpu:dure_shm: sums right") for line in lines)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("output-")] == []


@pytest.mark.slow
def test_preflight_when_asked_for_json_then_prints_one_object_and_nothing_else(prewarmed, tmp_path):
    run = prewarmed.run(tmp_path, *HERE, "--json", "--backend", "gloo")
    said = json.loads(run.out)
    assert (run.code, run.err, said["status"], said["backend"]) == (0, "", "ok", "gloo")
    assert said["nodes"][0]["open_files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert {check["name"]: check["status"] for check in said["checks"]}["collective"] == "ok"


def test_preflight_when_a_gpu_is_missing_then_ends_with_three_and_the_cure(prewarmed, tmp_path):
    run = prewarmed.run(tmp_path, "preflight", "--nproc", 2, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert run.code == 3
    assert run.out.startswith("failure GPUs")
    assert "or use --device cpu" in " ".join(run.out.split())
    assert "collective  it could not come through: see GPUs" in run.out
    assert run.err == "dure: not ready: GPUs\n"


NODES = ("--nnodes", "2", "--node-rank", "0", "--rendezvous")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nproc", "0"], "nproc is 0 but must be from 1 to 4096"),
        (["--nproc", "many"], "nproc is 'many' but must be from 1 to 4096, or auto"),
        (["--timeout", "0"], "timeout is 0 but must be a number of seconds above 0"),
        (["--nnodes", "1:x"], "nnodes is '1:x' but must be a whole number above 0"),
        (["--nnodes", "1:3", "--node-rank", "3", *NODES[4:], "10.0.0.1"], "node_rank is 3 but must be 0 to 2"),
        (["--threads", "0"], "threads is 0 but must be a whole number above 0"),
        (["--num-workers", "-1"], "num_workers is -1 but must be a whole number of at least 0"),
        (
            ["--device", "tpu"],
            "device is 'tpu' but torch knows no accelerator of this name here: use --device cpu or auto",
        ),
        (["--device", "cpu", "--backend", "nccl"], "backend is nccl, which moves CUDA tensors only, but device is cpu"),
        (["--device", "cuda", "--backend", "dure_shm"], "backend is dure_shm, which moves CPU tensors only"),
        (
            [*NODES, "10.0.0.1", "--backend", "dure_shm", "--device", "cpu"],
            "which is memory of one host, but nnodes is 2",
        ),
        (["--nnodes", "2", "--node-rank", "5", "--rendezvous", "10.0.0.1"], "node_rank is 5 but must be 0 to 1"),
        ([*NODES, "10.0.0.1:x"], "rendezvous is '10.0.0.1:x' but 'x' is no port: write it as 10.0.0.1:29400"),
        ([*NODES, "192.0.2.1"], "the rendezvous host 192.0.2.1 is not this host, which is node 0"),
        ([*NODES, "127.0.0.1", "--secret-file", "/proc/no/secret"], "the secret /proc/no/secret cannot be made"),
        (["--node-rank", "1"], "node_rank and rendezvous are for a run on several nodes"),
        (["extra"], "'extra' is one argument too many: see `dure preflight --help`"),
    ],
)
def test_preflight_when_it_cannot_be_then_one_sentence_says_so(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["preflight", *words]) == 2
    said = capsys.readouterr()
    assert (sentence in said.err, said.out) == (True, ""), said.err


def test_preflight_when_nobody_else_comes_then_this_host_is_told_of_all_the_same(prewarmed, tmp_path):
    run = prewarmed.run(
        tmp_path, *HERE, *NODES, "127.0.0.1:29499", "--secret-file", "secret", "--rendezvous-timeout", 0.5, "--json"
    )
    said = json.loads(run.out)
    assert (run.code, said["status"]) == (3, "failure")
    checks = {check["name"]: check for check in said["checks"]}
    assert "node 1 of 2 did not come to 127.0.0.1:29499 within 0.5 s" in checks["nodes"]["seen"]
    assert checks["disk"]["status"] == "ok"


@pytest.mark.slow
def test_script_when_all_is_well_before_it_then_one_line_says_so_and_it_runs(prewarmed, tmp_path):
    (tmp_path / "script.py").write_text("print('it runs')\n")
    run = prewarmed.run(tmp_path, "run", "--nproc", 2, "--threads", 1, "--preflight", "script.py")
    assert run.code == 0, run.err
    assert "dure: preflight: ready: 9 checks in " in run.err
    assert run.out.count("it runs") == 2


REFUSED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (70, 70))
from dure.cli import main
sys.exit(main({words}))
"""


@pytest.mark.parametrize(
    "words",
    [["run", "--preflight", "--nproc", "2", "script.py"], ["train", TASK, "--preflight", "--nproc", "2"]],
    ids=["run", "train"],
)
def test_run_when_something_is_missing_then_it_does_not_start(words, prewarmed, tmp_path):
    (tmp_path / "script.py").write_text("print('it runs')\n")
    (tmp_path / "refused.py").write_text(REFUSED.format(words=words))
    run = prewarmed.run(tmp_path, script=tmp_path / "refused.py")
    assert (run.code, run.out) == (3, "")
    assert run.err.startswith(
        "dure: the preflight says: not ready: open files\n  open files: a process may have 70 files open, but this run"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_training_when_all_is_well_before_it_then_one_line_says_so_and_it_trains(prewarmed, tmp_path):
    words = ("train", TASK, "--nproc", 2, "--epochs", 1, "--global-batch-size", 8, "--name", "run", "--threads", 1)
    run = prewarmed.run(tmp_path, *words, DURE_PREFLIGHT="true")
    assert run.code == 0, run.err
    assert run.err.startswith("dure: preflight: ready: 9 checks in ")
    assert json.loads((tmp_path / "runs/run/summary.json").read_text())["status"] == "completed"


def test_training_when_another_launcher_started_it_then_a_preflight_is_refused(prewarmed, tmp_path):
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x"}
    run = prewarmed.run(tmp_path, "train", TASK, "--preflight", **torchrun)
    assert run.code == 2
    assert "call `dure preflight` before, in the same job" in run.err


# --- what is shown

LOST = failure("pairs", "node 0 does not reach node 1", "it listens there", "open the firewall", ("node 0", "node 1"))
NAMES = ("node 0 (a, 10.0.0.1)", "node 1 (b, 10.0.0.2)", "node 2 (c, 10.0.0.3)")


def shown(*findings: Finding, columns: int = 100) -> str:
    report = Report(findings=by_gravity(findings), names=NAMES)
    file = io.StringIO()
    Console(file=file, width=columns).print(table(report))
    return file.getvalue()


def test_table_when_something_is_wrong_then_it_comes_first_with_its_cure():
    lines = shown(ok("clocks", "0.1 ms apart"), warning("memory", "little", "more is better", "add some"), LOST)
    assert [line.split()[0] for line in lines.splitlines()] == ["failure", "cure:", "warning", "cure:", "ok"]
    assert "node 0 does not reach node 1, but it listens there" in lines


@pytest.mark.parametrize("columns", [60, 100])
def test_table_when_the_terminal_is_narrow_then_no_word_is_lost(columns):
    text = shown(replace(LOST, seen="node " * 60), columns=columns)
    assert max(len(line) for line in text.splitlines()) <= columns
    assert text.count("node") == 60


def test_table_when_many_ways_are_lost_then_the_rest_is_counted():
    text = shown(*(replace(LOST, seen=f"way {number}") for number in range(20)))
    assert "way 7," in text
    assert "12 more: --json has them all" in text
    assert "way 8" not in text


def test_table_when_nodes_are_well_in_different_ways_then_one_is_told_and_the_others_counted():
    each = [replace(ok("disk", f"{rank} GiB free"), nodes=(rank,)) for rank in range(3)]
    assert "node 0 (a, 10.0.0.1): 0 GiB free; 2 more nodes well" in shown(*each)


def test_findings_of_nodes_when_they_are_the_same_then_are_one():
    each = [replace(ok("disk", "1 GiB free"), nodes=(rank,)) for rank in range(3)]
    assert [finding.nodes for finding in same_together(each)] == [(0, 1, 2)]


def test_markup_in_what_was_seen_when_shown_then_is_only_text():
    assert "in [bold]runs[/bold]" in shown(ok("disk", "in [bold]runs[/bold]"))
