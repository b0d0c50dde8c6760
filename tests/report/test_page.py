"""Page of a run."""

import json
import re
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from dure.cli.app import main
from dure.host.usage import GpuUse, ProcessUse
from dure.records.finding import Finding
from dure.records.run_dir import RunDir
from dure.records.step_record import step_line
from dure.records.usage import usage_line, usage_path
from dure.report.page import page
from tests.record_cases import step_of
from tests.report.hostile import add_hostile_records

pytest.importorskip("bokeh", reason="draws the page: pip install 'dure[report]'")

RUN_FOLDERS = Path(__file__).parents[1] / "samples" / "run_folders"


@pytest.fixture
def run(tmp_path):
    shutil.copytree(RUN_FOLDERS / "resumed", tmp_path / "run")
    return RunDir(tmp_path / "run")


def own_text(html):
    """Return the page without BokehJS and the charts' data."""
    return re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)


@pytest.mark.parametrize("name", sorted(path.name for path in RUN_FOLDERS.iterdir()))
def test_page_of_every_kind_of_run_is_drawn(name, tmp_path, capsys):
    shutil.copytree(RUN_FOLDERS / name, tmp_path / name)
    assert main(["report", str(tmp_path / name)]) == 0
    written = tmp_path / name / "report.html"
    assert capsys.readouterr().out == f"{written}\n"
    assert f"<h1>{name} " in written.read_text()


def test_page_when_opened_then_loads_nothing(run):
    html = page(run, [])
    assert "default-src 'none'" in html
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", own_text(html))


def test_page_when_texts_are_hostile_then_they_are_shown_and_not_run(run):
    hostile = add_hostile_records(run)
    html = page(run, [hostile])
    assert "alert(1)</script>" not in html
    assert "<img" not in own_text(html)
    assert "\x1b" not in html
    assert own_text(html).count("&lt;/script&gt;") >= 6
    assert all("$$" not in script for script in re.findall(r"docs_json.*", html))


def test_page_when_the_run_has_findings_then_they_come_first(run):
    finding = Finding(
        id="waits_for_data", severity="warning", what="rank 1 waits for data", evidence=("40 ms of 100 ms",),
        remedy="try --num-workers 2", gain_fraction=0.4,
    )  # fmt: skip
    text = own_text(page(run, [finding]))
    assert text.index("rank 1 waits for data") < text.index("Training loss")
    assert "try --num-workers 2 (would save about 40% of the time)" in text
    assert "40 ms of 100 ms" in text


def test_page_when_memory_is_on_record_then_has_a_row_for_each_rank():
    text = own_text(page(RunDir(RUN_FOLDERS / "compared"), []))
    assert ">Memory</h2>" in text
    assert text.count("cpu: 3") == 2


def test_page_when_the_use_of_the_machine_is_on_record_then_has_a_row_that_follows_it(run):
    process = ProcessUse(cores=1.5, resident_bytes=2**30, loaders=2, loader_cores=0.5, loader_bytes=2**30)
    gpu = GpuUse(
        device=0, busy=0.5, memory_bytes=1, watts=350.4, most_watts=None, megahertz=1980, most_megahertz=None
    )  # fmt: skip
    assert "Use of the machine" not in page(run, [])
    usage_path(run, 0).write_text(usage_line(1e9, process, (gpu,)))
    text = page(run, [])
    for value in ("1.5", "2.0", "0.5", "2.0 GiB", "busy 50%, 350 W, 1980 MHz"):
        assert f'<td class="number">{value}</td>' in text
    with usage_path(run, 0).open("a") as file:
        file.write(usage_line(1e9 + 10, replace(process, cores=2.5), ()))
    assert '<td class="number">2.0</td><td class="number">2.0</td>' in page(run, [])


def test_page_when_records_are_damaged_then_says_how_many_lines_were_left_out(run):
    with run.records_path(0).open("a") as file:
        file.write("{\n" + step_line(step_of(step=2**60)))
    assert "Damaged lines of its records were left out: 2." in page(run, [])


def test_page_when_a_rank_has_no_records_then_says_which(run):
    run.records_path(1).unlink()
    assert "Ranks without records of steps: 1." in page(run, [])


def test_page_when_there_are_no_records_then_says_so(tmp_path):
    (tmp_path / "spec.json").write_text("{}")
    assert "There are no records of steps." in page(RunDir(tmp_path), [])


def test_page_in_the_runs_folder_is_as_private_as_the_folder(run, capsys):
    run.path.chmod(0o700)
    assert main(["report", str(run.path), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["num_bytes"] == (run.path / "report.html").stat().st_size < 5e6
    assert stat.S_IMODE((run.path / "report.html").stat().st_mode) == 0o600


def test_page_when_it_cannot_be_written_then_nothing_is_left(run, tmp_path, capsys):
    assert main(["report", str(run.path), "--out", str(tmp_path / "nowhere" / "page.html")]) == 2
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err
    assert main(["report", str(run.path), "--out", str(tmp_path)]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
