"""Live view of a run in the terminal."""

import io
import re

import pytest

from dure.errors import RunInvalid
from dure.records.events import UnknownEvent, Warned
from dure.records.finding import Finding
from dure.report.live import screen
from dure.report.live.examination import Examination
from dure.report.live.live_run import LiveRun
from dure.report.live.screen import line, show, view
from dure.styled import drawn
from dure.terminal import LiveScreen
from tests.report.live.watched_runs import append, going_on, new_run, start

HOSTILE = "x\x1b[2Jy\x1b]0;title\x07\r\u202e[red]z"
SLOW = Finding(id="straggler", severity="warning", what="the others wait for rank 1", remedy="look at rank 1")


class Terminal(io.StringIO):
    """Stream that is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def run(tmp_path):
    run = new_run(tmp_path / "run")
    run.append_event(start())
    for rank in range(12):
        append(run, rank, range(1, 31), wall_seconds=1.0, sync_seconds=0.1 if rank == 7 else 0.5)
    return run


def text(run, findings=(), columns=80, lines=24):
    with going_on(run):
        moment = LiveRun(run).refresh()
    return drawn(view(moment, findings, columns, lines), columns)


def test_view_has_the_state_the_curves_the_ranks_and_the_findings(run):
    shown = text(run, [SLOW])
    assert shown.startswith("run running\n")
    assert "step 30, 240 samples, 8 samples/s, loss 0.033333, last record" in " ".join(shown.split())
    assert re.search(r"^loss +[▁-█]{10,} 1 … 0\.03333$", shown, re.MULTILINE)
    assert re.search(r"^ +7 +1000\.0 400\.0 ", shown, re.MULTILINE)
    assert "warning: the others wait for rank 1\n  remedy: look at rank 1" in shown
    assert "Training: world_size=2" in shown


def test_view_when_ranks_have_no_space_then_those_that_are_late_most_are_shown(run):
    shown = text(run, lines=14)
    assert re.search(r"^ +7 ", shown, re.MULTILINE)
    assert "ranks less late" in shown
    assert len(shown.splitlines()) <= 13


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_view_when_the_terminal_is_narrow_then_no_line_is_wider(run, columns):
    assert max(map(len, text(run, [SLOW], columns).splitlines())) <= columns


def test_view_when_texts_are_hostile_then_none_moves_the_cursor(run):
    run.append_event(Warned(message=HOSTILE))
    run.append_event(UnknownEvent(name=HOSTILE, fields={HOSTILE: HOSTILE}))
    hostile = Finding(id="x", severity="error", what=HOSTILE, remedy=HOSTILE)
    shown = text(run, [hostile], columns=200)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown)
    assert shown.count(r"\x1b[2J") >= 4
    assert "[red]z" in shown


def test_view_when_nothing_is_on_record_then_says_so(tmp_path):
    assert "No step is on record yet." in text(new_run(tmp_path / "empty"))


def test_view_when_records_are_missing_or_damaged_then_says_so(run):
    run.append_event(start(world_size=14))
    with run.records_path(0).open("a") as file:
        file.write("{}\n")
    shown = text(run)
    assert "Damaged lines of its records were left out: 1.\n" in shown
    assert "Ranks without records of steps: 12, 13.\n" in shown


def test_line_has_the_state(run):
    assert line(LiveRun(run).refresh()) == "run: died, step 30, 240 samples, 8 samples/s, loss 0.033333"


def test_run_when_it_ends_then_the_last_state_with_its_diagnosis_stays(run, capsys, monkeypatch):
    monkeypatch.setattr(screen, "_INTERVAL_SECONDS", 0.01)
    held = going_on(run)
    held.__enter__()
    num_slept = 0

    def sleep(seconds):
        nonlocal num_slept
        num_slept += 1
        if num_slept == 3:
            held.__exit__(None, None, None)

    monkeypatch.setattr(screen.time, "sleep", sleep)
    with Examination(run, lambda _: [SLOW]) as examination:
        show(LiveRun(run), examination)
    shown = capsys.readouterr().out
    assert shown.startswith("run: running, step 30")
    assert "the others wait for rank 1" in shown
    assert shown.endswith("the run has ended: died\n")
    assert "\x1b" not in shown


def test_screen_on_a_terminal_is_drawn_in_place_and_what_was_there_comes_back(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("shutil.get_terminal_size", lambda: __import__("os").terminal_size((80, 3)))
    shown = LiveScreen()
    assert shown.is_live
    shown.show("one\ntwo\nthree\n")
    shown.show("four\n")
    shown.close()
    shown.close()
    assert terminal.getvalue() == (
        "\x1b[?1049h\x1b[?25l\x1b[Hone\x1b[K\ntwo\x1b[K\n\x1b[J\x1b[Hfour\x1b[K\n\x1b[J\x1b[?25h\x1b[?1049l"
    )


@pytest.mark.parametrize("name", ["dumb", "pipe"])
def test_screen_when_nothing_can_be_drawn_again_then_there_is_none(name, monkeypatch):
    monkeypatch.setattr("sys.stdout", Terminal() if name == "dumb" else io.StringIO())
    monkeypatch.setenv("TERM", "dumb" if name == "dumb" else "xterm")
    assert not LiveScreen().is_live


def test_diagnosis_when_it_fails_then_says_so_and_goes_on(run):
    faults = [RunInvalid("it is damaged"), ValueError("changed while it was read")]

    def diagnose(_):
        if faults:
            raise faults.pop(0)
        return [SLOW]

    with Examination(run, diagnose) as examination:
        seen = []
        while not seen or seen[-1] != SLOW.what:
            num_done = examination.num_done
            examination.hasten()
            while examination.num_done == num_done:
                pass
            seen += [finding.what for finding in examination.findings]
    assert "it is damaged" in seen or "the diagnosis failed and is repeated" in " ".join(seen)
