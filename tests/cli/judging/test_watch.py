"""`dure watch` as a command."""

import os
import re
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from dure.cli.app import main
from tests.report.live.watched_runs import append, going_on, new_run, start

pytest.importorskip("bokeh", reason="draws and serves the page: pip install 'dure[report]'")


@pytest.fixture
def run(tmp_path):
    run = new_run(tmp_path / "run")
    run.append_event(start())
    append(run, 0, [1, 2, 3])
    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "70000"], "--port is 70000 but must be a number from 0 to 65535"),
        (["--terminal", "--port", "8000"], "--port and --open are of the page in the browser"),
        (["--terminal", "--open"], "--port and --open are of the page in the browser"),
        (["nowhere"], "nowhere does not exist"),
        (["--runs-dir", "."], "no runs in ."),
        (["--runs-dir", "nowhere"], "nowhere is no folder"),
        (["--address", "0.0.0.0"], "unknown flag '--address'"),
    ],
)
def test_wrong_words_are_refused_in_a_sentence(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *words]) == 2
    assert said in capsys.readouterr().err


def test_library_when_it_is_missing_then_the_extra_is_named_and_the_terminal_does_without(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert main(["watch", str(run.path)]) == 3
    assert "pip install 'dure[report]'" in capsys.readouterr().err
    assert main(["watch", str(run.path), "--terminal"]) == 0


def test_run_when_none_is_named_then_is_the_newest_one_that_goes_on(run, tmp_path, capsys, monkeypatch):
    newer = new_run(tmp_path / "newer")
    os.utime(run.path / "spec.json", (1, 1))
    chosen = []
    monkeypatch.setattr("dure.report.live.screen.show", lambda live, _: chosen.append(live.run.name))
    words = ["watch", "--terminal", "--runs-dir", str(tmp_path)]
    assert main(words) == 0
    with going_on(run):
        assert main(words) == 0
        with going_on(newer):
            assert main(words) == 0
    assert chosen == ["newer", "run", "newer"]


def test_run_when_it_has_ended_then_the_terminal_shows_it_once(run, capsys):
    assert main(["watch", str(run.path), "--terminal"]) == 0
    shown = capsys.readouterr().out
    assert "step 3, 24 samples" in shown
    assert shown.endswith("the run has ended: died\n")


def test_browser_when_it_is_opened_then_its_arguments_do_not_have_the_token(run, capsys, monkeypatch):
    found = []

    def opened(address):
        path = Path(urllib.request.url2pathname(address.removeprefix("file://")))
        found.append((path, path.read_text(), stat.S_IMODE(path.parent.stat().st_mode)))
        raise KeyboardInterrupt

    monkeypatch.setattr("webbrowser.open", opened)
    assert main(["watch", str(run.path), "--open"]) == 130
    ((path, text, mode),) = found
    assert capsys.readouterr().out.strip() in text
    assert mode == 0o700
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", [[], ["--terminal"]])
def test_command_when_it_is_stopped_then_ends_as_others_do(run, words, number):
    command = [sys.executable, "-m", "dure", "watch", str(run.path), *words]
    with going_on(run), subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        first = process.stdout.readline()
        if not words:
            address = re.fullmatch(r"(http://127\.0\.0\.1:\d+/\?token=\S+)\n", first)[1]
            with urllib.request.urlopen(address, timeout=30) as page:
                assert b"<h1>run " in page.read()
        else:
            assert first.startswith("run: running, step 3")
        time.sleep(0.2)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert said.splitlines()[-1] == "dure: stopped"
    assert "Traceback" not in said
