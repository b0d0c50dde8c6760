"""Settings of a run on several hosts; the runs themselves are in `tests/faults/test_nodes.py`."""

import json
from pathlib import Path
from typing import Any

import pytest

import dure
from dure.api.external_launcher import total_devices, with_world_size, without_extra_processes
from dure.api.local import finish, notes_on
from dure.api.multi_node import facts_to_agree_on
from dure.cli import main
from dure.cluster.rank import Launched, RankInfo
from dure.errors import SpecInvalid, WorkerFailed
from dure.launch.nodes.peers import Nodes
from dure.launch.rounds.outcome import Outcome
from dure.records.run_dir import RunDir
from dure.records.run_list import overview
from dure.spec import RunSpec
from tests.spec.test_spec import settle

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
WHERE = ("--nnodes", "2", "--node-rank", "0", "--rendezvous", "10.0.0.1")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nnodes", "2"], "node_rank is not given but must be 0 to 1, another on each of the 2 nodes"),
        (["--nnodes", "2", "--node-rank", "0"], "rendezvous is not given: all nodes need node 0's address"),
        (["--node-rank", "1"], "node_rank and rendezvous are for a run on several nodes"),
        ([*WHERE[:-1], "x:y"], "rendezvous is 'x:y' but 'y' is no port: write it as 10.0.0.1:29400"),
        (
            [*WHERE, "--strategy", "single"],
            "one device but the world size is 2 (nnodes 2 x nproc 1): choose ddp, or say",
        ),
        ([*WHERE, "--strategy", "dp"], "strategy is dp, which is one process, but nnodes is 2: use --strategy ddp"),
        (
            [*WHERE, "--nproc", "3", "--strategy", "fsdp", "--mesh", "replica=2,shard=2"],
            "the world size is 6 (nnodes 2 x nproc 3) but mesh replica 2 x shard 2 needs 4: start as many, or set mesh",
        ),
        (
            [*WHERE, "--nproc", "4", "--global-batch-size", "7"],
            "global_batch_size is 7, less than one sample for each of 8 devices: raise it to at least 8",
        ),
        ([*WHERE, "--nproc", "2", "--strategy", "parameter_server"], "has servers, which are not spread over hosts"),
        ([*WHERE, "--nproc", "2", "--start", "inline"], "ranks on several nodes are processes: use fork or spawn"),
        (["--nnodes", "1:2"], "node_rank is not given but must be 0 to 1, another on each of the 2 nodes"),
        (["--nnodes", "3:2", *WHERE[2:], "--nproc", "2"], "nnodes is 3:2 but must be the fewest and the most hosts"),
        (["--nnodes", "1:2:3"], "nnodes is '1:2:3' but must be a whole number above 0, or the fewest and the most"),
        (
            ["--nnodes", "1:2", *WHERE[2:], "--nproc", "2", "--strategy", "fsdp", "--mesh", "replica=2,shard=2"],
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


def torchrun(local_world_size: int, world_size: int, rank: int = 0) -> Launched:
    places = {"local_rank": 0, "local_world_size": local_world_size, "node_rank": 0}
    return Launched(by="torchrun", rank=RankInfo(rank=rank, world_size=world_size, **places), cores=None)


@pytest.mark.parametrize(
    ("launched", "nproc", "sentence"),
    [
        (torchrun(4, 8), 8, "nproc is 8 but torchrun started 4 processes here, 8 on all hosts: leave --nproc out"),
        (torchrun(4, 4), "x", "nproc is x but torchrun started 4 processes here: leave --nproc out, torchrun decides"),
        (torchrun(1, 1), 2, "nproc is 2 but torchrun started 1 process here: leave --nproc out"),
    ],
)
def test_nproc_when_a_launcher_started_others_then_both_numbers_are_said(launched, nproc, sentence):
    with pytest.raises(SpecInvalid, match=sentence):
        with_world_size({"nproc": nproc}, launched)
    with pytest.raises(SpecInvalid, match=sentence):
        with_world_size({"nproc_per_node": nproc}, launched)


def under(launched: Launched, **settings: Any) -> RunSpec:
    """Return the settings of a rank that a launcher started."""
    flags = with_world_size(settings, launched)
    return without_extra_processes(settle(flags, total_devices=total_devices(launched)), launched).spec


def test_spec_when_a_launcher_started_ranks_on_several_hosts_then_nproc_is_of_this_one_and_the_world_is_all():
    spec = under(torchrun(4, 8), nproc_per_node="4", strategy="fsdp", mesh="replica=2,shard=4")
    assert (spec.nproc, spec.num_devices) == (4, 8)
    one_host = under(torchrun(4, 4))
    assert (one_host.nproc, one_host.num_devices, one_host.total_devices, one_host.strategy) == (4, 4, None, "ddp")
    uneven = [under(torchrun(local, 4)) for local in (3, 1)]
    assert [(spec.nproc, spec.num_devices, spec.strategy) for spec in uneven] == [(3, 4, "ddp"), (1, 4, "ddp")]
    facts = [facts_to_agree_on(spec, is_resumed=False, is_launched=True) for spec in uneven]
    assert facts[0] == facts[1]
    with pytest.raises(SpecInvalid, match="the world size is 8 but mesh replica 2 x shard 2 needs 4"):
        under(torchrun(4, 8), strategy="fsdp", mesh="replica=2,shard=2")


@pytest.mark.parametrize(
    ("here", "world_size", "servers", "nproc", "num_devices"), [(4, 4, None, 2, 2), (4, 8, 1, 4, 7), (4, 8, 5, 3, 3)]
)
def test_spec_when_a_launcher_started_servers_too_then_they_are_no_devices(
    here, world_size, servers, nproc, num_devices
):
    spec = under(torchrun(here, world_size), strategy="parameter_server", parameter_server={"servers": servers})
    assert (spec.nproc, spec.num_devices) == (nproc, num_devices)


OLD = Path(__file__).parents[1] / "samples" / "spec_before_nproc_per_host.json"
"""Record of `--nnodes 2 --nproc 4` when that meant two devices on each host."""


def test_run_of_before_nproc_was_of_each_host_then_its_record_is_read_as_it_was_meant(tmp_path):
    run = RunDir(tmp_path)
    run.write_json("spec.json", json.loads(OLD.read_text()))
    spec = run.read_spec()
    assert (spec.nproc, spec.nnodes, spec.num_devices, spec.strategy) == (2, "2", 4, "ddp")
    assert overview(run).num_devices == 4
    resumed = settle({"nnodes": "2"}, base=spec).spec
    assert (resumed.nproc, resumed.num_devices) == (2, 4)


def test_run_of_before_nproc_was_of_each_host_when_it_is_resumed_then_it_goes_on_with_the_ranks_of_one(tmp_path):
    usual = {"device": "cpu", "threads": 1, "quiet": True, "runs_dir": tmp_path, "name": "run"}
    dure.train(TASK, **usual)
    run = RunDir.open(tmp_path / "run")
    now, then = run.read_json("spec.json"), json.loads(OLD.read_text())
    place = {name: now["spec"][name] for name in ("task", "task_options", "runs_dir", "name")}
    run.write_json("spec.json", {**now, "spec": {**then["spec"], **place}, "origin": then["origin"]})
    summary = dure.train(resume=run.path, epochs=2, trust_task=True)
    assert (summary.world_size, summary.num_devices, summary.epochs) == (2, 2, 2.0)


def test_run_when_a_node_is_lost_before_ranks_are_started_then_the_sentence_about_it_is_the_error(tmp_path):
    run, spec = RunDir.create(tmp_path, "run"), RunSpec(task="task.py:Task")
    notes = notes_on(run, spec, Nodes.alone(1), max_restarts=0)
    with pytest.raises(WorkerFailed, match=r"^node 1 is gone; `dure train --resume .*run` goes on from the last check"):
        finish(notes, spec, Outcome(ends=[], lost="node 1 is gone"))
    assert run.read_json("summary.json")["status"] == "failed"
