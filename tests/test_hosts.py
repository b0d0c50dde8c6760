"""Settings of a run on several hosts; the runs themselves are in `tests/faults/test_nodes.py`."""

from pathlib import Path

import pytest

from dure.api.multi_node import facts_to_agree_on
from dure.cli import main
from dure.spec import RunSpec

TASK = f"{Path(__file__).with_name('faulty_task.py')}:Faulty"
WHERE = ("--nnodes", "2", "--node-rank", "0", "--rendezvous", "10.0.0.1")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nnodes", "2"], "node_rank is not given but must be 0 to 1, another on each of the 2 nodes"),
        (["--nnodes", "2", "--node-rank", "0"], "rendezvous is not given: all nodes need node 0's address"),
        (["--node-rank", "1"], "node_rank and rendezvous are for a run on several nodes"),
        ([*WHERE[:-1], "x:y"], "rendezvous is 'x:y' but 'y' is no port: write it as 10.0.0.1:29400"),
        ([*WHERE, "--nproc", "3"], "nproc counts the devices of all nodes, of which each has as many: use --nproc 2"),
        ([*WHERE], "strategy is single, which is one process, but nnodes is 2: use --strategy ddp or fsdp"),
        ([*WHERE, "--nproc", "2", "--strategy", "parameter_server"], "has servers, which are not spread over hosts"),
        ([*WHERE, "--nproc", "2", "--start", "inline"], "ranks on several nodes are processes: use fork or spawn"),
        (["--nnodes", "1:2"], "node_rank is not given but must be 0 to 1, another on each of the 2 nodes"),
        (["--nnodes", "3:2", *WHERE[2:], "--nproc", "2"], "nnodes is 3:2 but must be the fewest and the most hosts"),
        (["--nnodes", "1:2:3"], "nnodes is '1:2:3' but must be a whole number above 0, or the fewest and the most"),
        (
            ["--nnodes", "1:2", *WHERE[2:], "--nproc", "4", "--strategy", "fsdp", "--mesh", "replica=2,shard=2"],
            "a layout of 4 devices, but nnodes is 1:2, so that there may be fewer: leave one of them out",
        ),
        ([*WHERE, "--nproc", "2", "--backend", "dure_shm"], "backend is dure_shm, which is memory of one host"),
        (["--nnodes", "0"], "nnodes is '0' but must be a whole number above 0"),
    ],
)
def test_training_when_it_cannot_be_on_these_hosts_then_one_sentence_says_so(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    monkeypatch.setattr("builtins.print", lambda *text, **_: said.append(" ".join(map(str, text))))
    assert main(["train", TASK, "--device", "cpu", *words]) == 2
    assert sentence in "\n".join(said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nnodes", "2"], "node_rank is not given but must be 0 to 1"),
        ([*WHERE, "--max-restarts", "1"], "ranks on several nodes are not started again"),
        ([*WHERE, "--on-hang", "restart"], "ranks on several nodes are not started again"),
    ],
)
def test_script_when_it_cannot_be_on_these_hosts_then_one_sentence_says_so(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    said = []
    monkeypatch.setattr("builtins.print", lambda *text, **_: said.append(" ".join(map(str, text))))
    assert main(["run", *words, "script.py"]) == 2
    assert sentence in "\n".join(said)


def test_facts_when_hosts_keep_the_task_elsewhere_then_they_are_the_same():
    spec = RunSpec(task="/here/train.py:T", nnodes=2, node_rank=0, runs_dir=Path("/a"))
    other = spec.model_copy(update={"task": "/there/train.py:T", "node_rank": 1, "runs_dir": Path("/b")})
    assert facts_to_agree_on(spec, is_resumed=False) == facts_to_agree_on(other, is_resumed=False)
    assert facts_to_agree_on(spec, is_resumed=False)["task"] == "train.py:T"
