"""The campaign of random faults: what it draws, and that it sees a promise that was broken."""

import importlib
import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from dure.strategies.table import STRATEGIES
from tests.commands import Command, RunFiles

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def campaign(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("campaign_case", "campaign_run", "campaign_promises")
    return {name: importlib.import_module(name) for name in names}


def draw(campaign, number, seed=1):
    return campaign["campaign_case"].draw_case(seed, number, can_have_hosts=True, can_mount=True)


@pytest.fixture
def completed(campaign, tmp_path):
    """Give what is seen of a run that used each sample once and ended well."""
    case = campaign["campaign_case"]
    order = [sample for _ in range(case.EPOCHS) for sample in range(case.SAMPLES)]
    records, step = [], 0
    for epoch in range(case.EPOCHS):
        for begin in range(0, case.SAMPLES, case.BATCH):
            step += 1
            samples = order[begin : min(begin + case.BATCH, case.SAMPLES)]
            records.append({"step": step, "epoch": epoch, "time": float(step), "samples": samples})
    summary = {"status": "completed", "samples": len(order), "metrics": {"loss": {"count": case.EVAL_SAMPLES}}}
    run = tmp_path / "runs/run"
    run.mkdir(parents=True)
    (run / "rank0.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "events.jsonl").write_text("")
    (run / "summary.json").write_text(json.dumps(summary))
    commands = (Command(pid=0, output=tmp_path / "output-1", codes={0: 0}),)
    return campaign["campaign_run"].Seen(RunFiles(run), commands, happened=True, time=5.5, codes=(0,))


def test_cases_when_drawn_again_then_they_are_the_same_and_all_strategies_and_faults_come(campaign):
    cases = [draw(campaign, number) for number in range(600)]
    assert [draw(campaign, number) for number in (17, 3)] == [cases[17], cases[3]]
    assert {case.strategy for case in cases} == set(STRATEGIES)
    assert {case.fault.kind for case in cases} == {*campaign["campaign_case"].KINDS, "cut"}
    assert {case.fault.moment for case in cases} == set(campaign["campaign_case"].MOMENTS)
    assert {case.nnodes for case in cases} == {"1", "2", "1:2"}


def with_fault(campaign, **changes):
    case = next(case for number in range(600) if (case := draw(campaign, number)).strategy == "ddp")
    plain = {"kind": "SIGKILL", "target": "rank", "rank": 0, "moment": "step"}
    return replace(case, nnodes="1", max_restarts=3, fault=replace(case.fault, **(plain | changes)))


def test_end_when_a_stop_signal_had_no_effect_then_it_is_a_broken_promise(campaign, completed):
    of_the_end = campaign["campaign_promises"].of_the_end
    assert list(of_the_end(with_fault(campaign), completed)) == []
    (text,) = of_the_end(with_fault(campaign, kind="SIGTERM"), completed)
    assert text.startswith("exit code 0 instead of 143")
    late = replace(completed, time=float(campaign["campaign_case"].STEPS))
    assert list(of_the_end(with_fault(campaign, kind="SIGTERM"), late)) == []


def test_end_when_it_is_another_than_promised_then_it_is_a_broken_promise(campaign, completed):
    failed = replace(completed, codes=(1,))
    promised_codes = campaign["campaign_promises"].promised_codes
    assert promised_codes(with_fault(campaign), failed, 0) == {0}
    assert promised_codes(replace(with_fault(campaign), max_restarts=0), failed, 0) == {1}
    assert promised_codes(with_fault(campaign, target="supervisor"), failed, 0) == {-signal.SIGKILL}
    deaf = replace(with_fault(campaign, kind="SIGHUP", target="loader"), max_restarts=0)
    assert promised_codes(deaf, failed, 0) == {0}
    for seconds, codes in ((0.5, {0}), (3.0, {0, 1})):
        held = with_fault(campaign, kind="SIGSTOP", target="loader", seconds=seconds)
        assert promised_codes(replace(held, max_restarts=0), failed, 0) == codes


@pytest.mark.parametrize(
    ("start", "seconds", "is_kept"), [("fork", 18, False), ("spawn", 18, True), ("spawn", 31, False)]
)
def test_end_when_it_takes_long_then_it_is_a_broken_promise_unless_ranks_are_spawned(
    start, seconds, is_kept, campaign, completed
):
    with (completed.run.path / "events.jsonl").open("a") as file:
        file.write('{"event": "attempt", "time": 1}\n{"event": "training", "time": 8}\n{"event": "restart"}\n')
    case, late = replace(with_fault(campaign), start=start), replace(completed, seconds=float(seconds))
    assert (list(campaign["campaign_promises"].of_the_end(case, late)) == []) == is_kept


def test_samples_when_one_is_lost_or_used_twice_then_it_is_a_broken_promise(campaign, completed):
    of_samples = campaign["campaign_promises"].of_samples
    assert list(of_samples(with_fault(campaign), completed)) == []
    records = completed.run.records(0)
    records[3]["samples"][0] = records[2]["samples"][0]
    (completed.run.path / "rank0.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = list(of_samples(with_fault(campaign), completed))
    assert [text.partition(":")[0] for text in found] == ["samples were used twice", "samples were not used"]


def test_leftovers_when_a_file_or_half_a_checkpoint_is_left_then_it_is_a_broken_promise(campaign, completed, tmp_path):
    (tmp_path / "tmpabc").touch()
    (completed.run.path / "checkpoints/.writing-1").mkdir(parents=True)
    case = replace(with_fault(campaign), num_workers=0)
    found = list(campaign["campaign_promises"].of_what_is_left(case, completed, tmp_path))
    assert found == ["a temporary file is left: tmpabc", "half a checkpoint is left: .writing-1"]


def test_disk_when_a_case_is_over_then_its_run_is_moved_away(campaign, tmp_path):
    disk, folder = tmp_path / "disk", tmp_path / "case-3"
    (disk / folder.name / "run").mkdir(parents=True)
    folder.mkdir()
    campaign["campaign_run"].Places(tmp_path, server=None, hosts=None, disk=disk).take_from_disk(folder)
    assert list(disk.iterdir()) == []
    assert (folder / "runs" / "run").is_dir()
