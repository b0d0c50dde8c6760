"""Metrics of a run for Prometheus."""

import re
from dataclasses import replace

import pytest

from dure.report.live.live_run import LiveRun
from dure.report.live.metrics import metrics_text
from tests.report.live.watched_runs import append, going_on, new_run, start

LABEL = r'[a-z_]+="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"(dure_[a-z_]+)(?:\{{({LABEL}(?:,{LABEL})*)\}})? (NaN|[+-]Inf|-?[0-9.e+-]+)")
"""Line with a sample in the text format of Prometheus."""


@pytest.fixture
def moment(tmp_path):
    run = new_run(tmp_path / "run")
    run.append_event(start())
    append(run, 0, range(1, 4), wall_seconds=1.0)
    append(run, 1, range(1, 4), wall_seconds=1.0)
    with going_on(run):
        return LiveRun(run).refresh()


def parsed(text):
    """Return the samples by name and labels, after a check of the format."""
    samples, kinds = {}, {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            name, labels, value = SAMPLE.fullmatch(line).groups()
            assert kinds[name] == ("counter" if name.endswith("_total") else "gauge")
            samples[name, labels or ""] = float(value)
    return samples


def test_metrics_have_the_state_of_the_run(moment):
    found = parsed(metrics_text(moment))
    assert found["dure_step", ""] == 3
    assert found["dure_samples_total", ""] == 24
    assert found["dure_loss", ""] == pytest.approx(1 / 3)
    assert found["dure_samples_per_second", ""] == 8
    assert found["dure_restarts_total", ""] == 0
    assert found["dure_step_seconds", 'rank="1"'] == 1.0
    assert found["dure_step_part_seconds", 'rank="0",part="sync"'] == pytest.approx(0.3)
    assert found["dure_sent_bytes_total", 'rank="0"'] == 24
    info = 'run="run",strategy="ddp",status="running",world_size="2"'
    assert found["dure_run_info", info] == 1


def test_metrics_when_nothing_is_on_record_then_have_no_values_of_steps(tmp_path):
    found = parsed(metrics_text(LiveRun(new_run(tmp_path / "run")).refresh()))
    assert {name for name, _ in found} == {"dure_run_info", "dure_restarts_total"}


def test_labels_when_their_values_are_hostile_then_are_escaped(moment):
    seen = replace(moment.records.seen, strategy='a"} 1\ndure_step 7\\\ud800')
    found = parsed(metrics_text(replace(moment, records=replace(moment.records, seen=seen))))
    assert found["dure_step", ""] == 3


@pytest.mark.parametrize(("loss", "text"), [(float("nan"), "NaN"), (float("inf"), "+Inf"), (-float("inf"), "-Inf")])
def test_values_when_they_are_not_finite_then_are_written_as_prometheus_reads_them(moment, loss, text):
    written = metrics_text(replace(moment, loss=loss))
    assert f"dure_loss {text}\n" in written
    parsed(written)
