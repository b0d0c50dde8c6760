"""Progress that rank 0 shows: live or plain lines, nothing when quiet, and no failure when nobody reads."""

import io
import os
import re
from pathlib import Path

import pytest

from dure.records.step_record import Metric, StepRecord
from dure.training.progress import Progress
from tests.conformance.cases import train_case
from tests.conformance.tasks import Regression


def record(step: int, *, time: float = 2e9) -> StepRecord:
    """Return a step of ten samples, a second long; by default so late that a line is due."""
    return StepRecord(
        time=time, step=step, epoch=0, samples_seen=10 * step, loss_sum=5.0, loss_count=10, data_seconds=0.25,
        forward_backward_seconds=0.5, sync_seconds=0.0, optimizer_seconds=0.25, wall_seconds=1.0, sent_bytes=0,
    )  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_when_no_terminal_then_writes_plain_lines():
    stream = io.StringIO()
    progress = Progress(100, 0, quiet=False, stream=stream)
    progress.step(record(1, time=0.0))
    assert stream.getvalue() == ""
    progress.step(record(2))
    progress.evaluated({"loss": Metric(value=0.5, count=3)}, 1.0, 0.25)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith(" 20%  epoch 1  step 2  10 samples/s  loss 0.5000  ETA ")
    assert "data wait 25%" in lines[0]
    assert lines[1] == "epoch 1  train loss 0.2500  val loss 0.5000"
    progress.step(record(9, time=3e9))
    line = stream.getvalue().splitlines()[2]
    assert re.search(r"ETA \d.*val loss 0.5000  data wait", line)  # a narrow screen has room for the ETA
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("has_color", [True, False])
def test_progress_when_a_terminal_then_one_line_is_written_over(has_color, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "" if has_color else "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    progress = Progress(100, 0, quiet=False, stream=stream)
    progress.step(record(1))
    progress.close()
    line = stream.getvalue().removeprefix("\r").removesuffix("\x1b[K\r\x1b[K")
    assert ("\x1b[36m" in line) == has_color
    assert len(line.replace("\x1b[36m", "").replace("\x1b[0m", "")) < 40
    assert "\n" not in stream.getvalue()


def test_progress_when_relayed_to_a_terminal_then_what_is_printed_next_takes_the_lines_place(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    progress = Progress(100, 0, quiet=False, stream=stream, is_relayed_live=True)
    progress.step(record(1))
    assert stream.getvalue().startswith("\r 10%  epoch 1  step 1 ")
    assert stream.getvalue().endswith("data wait 25%\r")


def test_progress_when_quiet_then_says_nothing():
    stream = io.StringIO()
    progress = Progress(100, 0, quiet=True, stream=stream)
    progress.step(record(1))
    progress.print_lines("anything")
    progress.close()
    assert stream.getvalue() == ""


def test_progress_when_its_reader_goes_away_then_training_goes_on_in_silence():
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    progress = Progress(100, 0, quiet=False, stream=stream)
    progress.print_lines("nobody reads this")
    progress.step(record(1))
    progress.close()
    with pytest.raises(OSError, match="Broken pipe"):
        stream.close()


def test_first_lines_when_the_folder_has_a_line_break_then_it_stays_in_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_case(tmp_path / "a\nb", Regression(), quiet=False, samples=7, global_batch_size=7, start="inline")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("run folder")]
    assert line.startswith(f"run folder {tmp_path}/a\\x0ab/")
