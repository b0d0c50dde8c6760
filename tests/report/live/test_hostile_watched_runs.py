"""Run folders as no process of dure leaves them: each is shown as far as it can be read."""

import json
import shutil
from pathlib import Path

import pytest

from dure.doctor.findings import diagnose
from dure.errors import DureError
from dure.records.run_dir import RunDir
from dure.report.live.live_run import LiveRun
from dure.report.live.metrics import metrics_text
from dure.report.live.page_updates import PageUpdates, page_contents
from dure.report.live.screen import view
from dure.report.page import rendered_page
from dure.styled import drawn
from tests.records.test_hostile_runs import DAMAGES
from tests.report.live.test_metrics import parsed
from tests.report.live.watched_runs import append, new_run, start

pytest.importorskip("bokeh", reason="draws the page: pip install 'dure[report]'")

RUN_FOLDERS = Path(__file__).parents[2] / "samples" / "run_folders"


def shown(run):
    """Return the state of a run with its findings, after a look at its metrics."""
    try:
        findings = diagnose(run).findings
    except DureError:
        findings = ()
    moment = LiveRun(run).refresh()
    parsed(metrics_text(moment))
    return moment, findings


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_run_when_it_is_damaged_then_is_shown_as_far_as_it_can_be_read(damage, tmp_path):
    run = new_run(tmp_path / "run")
    (run.path / "logs").mkdir()
    (run.path / "summary.json").write_text("{}")
    run.append_event(start())
    append(run, 0, [1, 2])
    append(run, 1, [1, 2])
    live = LiveRun(run)
    live.refresh()
    damage(run.path)
    assert live.refresh().step is not None
    moment, findings = shown(run)
    found = page_contents(moment, findings)
    assert [section.id for section in found["sections"]][:2] == ["loss", "throughput"]
    assert "<h1>run " in rendered_page(run, found, is_live=True)
    assert drawn(view(moment, findings, 80, 24), 80).startswith("run ")


@pytest.mark.parametrize("name", sorted(path.name for path in RUN_FOLDERS.iterdir()))
def test_run_of_every_kind_is_shown(name, tmp_path):
    shutil.copytree(RUN_FOLDERS / name, tmp_path / name)
    moment, findings = shown(RunDir(tmp_path / name))
    updates = PageUpdates()
    updates.update(moment, findings)
    whole = json.loads(updates.whole())
    assert [*whole["charts"]] == [*whole["numbers"]] == whole["order"]
    assert drawn(view(moment, findings, 80, 24), 80).startswith(f"{name} ")
