"""Comparison of short runs that differ in their strategy or in the number of their processes."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from dure.cli.app import main
from dure.errors import RunInvalid
from dure.records.events import DeviceMemory, MemoryUsed, RankMemory
from dure.records.run_dir import RunDir
from dure.records.step_record import step_line
from dure.report.comparison import MeasuredRun, compare, measure, where_to_stop
from tests.record_cases import step_of

DIGITS = f"{Path(__file__).parents[2] / 'examples' / 'digits.py'}:Digits"
PARTS = {"data": 0.1, "forward_backward": 0.6, "sync": 0.2, "optimizer": 0.1, "other": 0.0}


def run_with(folder, num_steps, ranks=1):
    (folder / "spec.json").write_text("{}")
    run = RunDir(folder)
    for rank in range(ranks):
        seconds = [2.0 if step <= 5 else 0.5 for step in range(1, num_steps + 1)]
        steps = [
            step_of(
                step=step, samples_seen=8 * step, wall_seconds=wall, data_seconds=0.1, forward_backward_seconds=0.2,
                sync_seconds=0.1, optimizer_seconds=0.1, loss_sum=8.0 / step, loss_count=8, sent_bytes=100,
            )
            for step, wall in enumerate(seconds, 1)
        ]  # fmt: skip
        run.records_path(rank).write_text("".join(map(step_line, steps)))
    return run


def test_run_is_measured_without_its_first_steps(tmp_path):
    run = run_with(tmp_path, 25, ranks=2)
    peaks = tuple(DeviceMemory(device="cpu", peak=peak, total=10) for peak in (3, 5))
    run.append_event(
        MemoryUsed(ranks=(RankMemory(rank=0, parameters=1, gradients=1, optimizer=1, buffers=1, devices=peaks),))
    )
    found = measure(run)
    assert (found.samples_per_second, found.step_seconds, found.sent_bytes, found.peak_bytes) == (16.0, 0.5, 100, 5)
    assert found.part_seconds == pytest.approx(
        {"data": 0.1, "forward_backward": 0.2, "sync": 0.1, "optimizer": 0.1, "other": 0.0}
    )
    assert found.loss_after(math.inf) == pytest.approx((1 / 24 + 1 / 25) / 2)
    assert found.loss_after(4.0) == pytest.approx(1 / 2)
    assert math.isnan(found.loss_after(1.0))


def test_run_of_few_steps_is_not_measured(tmp_path):
    with pytest.raises(RunInvalid, match="at most 5 steps, too few to be timed"):
        measure(run_with(tmp_path, 5))


def measured(rate, **parts):
    return MeasuredRun(
        samples_per_second=rate, step_seconds=1.0, part_seconds=PARTS | parts, sent_bytes=1.0, peak_bytes=None,
        losses=((100.0 / rate, 0.5),), not_preserved=(),
    )  # fmt: skip


def test_rows_are_relative_to_the_first_kind_and_a_fault_has_one_of_its_own():
    slow = replace(measured(10.0), losses=((1.0, 0.9), (10.0, 0.5)))
    kinds = {("single", 1): [slow, slow], ("ddp", 2): [measured(15.0), measured(17.0)], ("fsdp", 2): []}
    one, two, refused = compare(kinds, {("fsdp", 2): "no weights"})
    assert (one.result.speedup, one.result.efficiency) == (1.0, 1.0)
    assert (two.result.speedup, two.result.efficiency) == (1.6, 0.8)
    assert (two.result.slowest, two.result.fastest) == (15.0, 17.0)
    assert (one.result.loss, one.result.loss_at_equal_time) == (0.5, 0.9)
    assert two.result.exposed_fraction == pytest.approx(0.2)
    assert (refused.result, refused.fault) == (None, "no weights")


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ([10, 18, 30], "4 devices are still worth it: try more"),
        ([10, 18, 20], "stop at 2: from there to 4, each further device adds 0.10 of what one does"),
        ([10, 12], "stop at 1: from there to 2, each further device adds 0.20 of what one does"),
        ([10], "there is nothing to compare"),
    ],
)
def test_devices_are_worth_it_as_long_as_each_adds_half_of_the_first(rates, said):
    kinds = {("ddp", 2**number): [measured(rate)] for number, rate in enumerate(rates)}
    text = where_to_stop(compare(kinds, {}))
    assert text.startswith(said)
    # an even division would leave half of each part, and forward and backward exceed that most
    assert "stop" not in text or text.endswith(
        "what is lost goes to forward and backward, which do not become as much shorter"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", DIGITS, "--strategies", "ddp,dpp"], "dpp, which is no strategy"),
        (["compare", DIGITS, "--strategies", ","], "give at least one strategy"),
        (["compare", DIGITS, "--rounds", "0"], "--rounds is 0"),
        (["compare", DIGITS, "--", "--nproc", "3"], "--nproc is set by this command"),
        (["scale", DIGITS, "--nproc", "1,x"], "--nproc is 1,x"),
        (["scale", DIGITS, "--strategy", "dpp"], "dpp is no strategy"),
        (["compare", "nowhere.py:Task", "--rounds", "1"], "the run on one device, with which the others are compared"),
    ],
)
def test_wrong_words_are_refused_in_a_sentence(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_strategies_are_compared_for_real(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["compare", DIGITS, "--strategies", "ddp,pipeline", "--rounds", "1", "--samples", "1000", "--json"]
    assert main([*words, "--", "--global-batch-size", "32", "--threads", "1"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["name"], row["num_devices"], row["fault"]) for row in rows] == [
        ("single", 1, None), ("ddp", 2, None), ("pipeline", 2, None)
    ]  # fmt: skip
    assert {round(row["result"]["loss"], 4) for row in rows} == {round(rows[0]["result"]["loss"], 4)}
    assert all(row["result"]["sent_bytes"] > 0 for row in rows[1:])


@pytest.mark.slow
def test_more_and_more_processes_are_measured_for_real(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["scale", DIGITS, "--nproc", "2", "--rounds", "1", "--samples", "1000", "--", "--threads", "1"]) == 0
    shown = capsys.readouterr().out
    assert "samples/s" in shown
    assert "stop at" in shown or "worth it" in shown
