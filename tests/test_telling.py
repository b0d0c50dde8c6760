"""Names and messages that nobody chose with care, as they reach the terminal."""

import io
import json
import os
import subprocess
import unicodedata
from pathlib import Path

import pytest
from rich.table import Table

from dure.errors import Misuse, SpecInvalid
from dure.launch.logs.log_pump import cleaned
from dure.records.run_list import RunOverview
from dure.records.step_record import EpochRow, Metric, RunSummary
from dure.report.tables import metrics_table, render, runs_table
from dure.spec.arguments import as_arguments
from dure.styled import draw, joined, styled, styled_lines
from dure.terminal import LiveLine, indented, message, one_line, print_json, print_status, printable, shell_word

EVIL = (
    "a\x1b]0;owned\x07\x1b[2J\x9b1m\r\ndure: all is well\u202e\u2066\ud800\x7f\u200b[red]x[/red][link=http://e]y[/link]"
)
KOREAN = "정확도 두레 é ß 汉字 😀\u00a0\u3000"


def is_harmless(text: str) -> bool:
    return all(char.isprintable() or char == "\n" or unicodedata.category(char) == "Zs" for char in text)


def test_printable_when_text_would_steer_a_terminal_then_it_is_written_out() -> None:
    assert printable("a\x1b[2J\x07\x9b\u202e\ud800\U000e0001\tb\nc") == (
        "a\\x1b[2J\\x07\\x9b\\u202e\\ud800\\U000e0001\tb\nc"
    )


def test_printable_when_text_is_of_another_script_then_it_stays() -> None:
    assert printable(KOREAN) == KOREAN


def test_one_line_when_a_name_has_line_breaks_then_they_are_written_out() -> None:
    assert one_line(Path("runs/a\ndure: all is well\t")) == "runs/a\\x0adure: all is well\\x09"


def test_message_when_a_line_would_look_like_dures_then_it_is_indented() -> None:
    assert message("first\ndure: forged\n  kept\n\nlast") == "dure: first\n  dure: forged\n  kept\n\n  last"


def test_message_when_it_is_very_long_then_its_middle_is_left_out() -> None:
    text = "\n".join([f"{'x' * 3000}end", *map(str, range(1000)), "last"])
    first, *_, last = message(text).split("\n")
    assert first.endswith("xend")
    assert "… 1,003 characters are left out …" in first
    assert last == "  last"
    assert "\n  … 602 lines are left out …\n" in message(text)


def test_printable_when_a_rank_prints_the_same_then_the_pump_writes_it_out_alike() -> None:
    controls = [chr(code) for code in range(0x2100) if unicodedata.category(chr(code)) in ("Cc", "Zl", "Zp")]
    turning = [chr(code) for code in (0x61C, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070))]
    for char in {*controls, *turning, "\ufeff"} - {"\t", "\n", "\r", chr(0x2065)}:
        assert cleaned(f"a{char}b".encode()) == printable(f"a{char}b"), f"U+{ord(char):04X}"


def test_error_when_shown_then_its_message_is_escaped() -> None:
    for error in (Misuse(EVIL), SpecInvalid([EVIL])):
        assert is_harmless(str(error))
        assert is_harmless("".join(error._render_traceback_()))


def summary_of(text: str) -> RunSummary:
    row = EpochRow(epoch=1.0, samples_seen=4, train_loss=0.5, metrics={text: Metric(value=1.0, count=4)}, seconds=1.0)
    return RunSummary(
        run=text, status=text, strategy=text, world_size=1, num_devices=1, device=text, precision=text, steps=1,
        samples=4, epochs=1.0, final_loss=0.5, metrics=row.metrics, wall_seconds=1.0, samples_per_second=4.0,
        best={"metric": text, "value": text, "samples_seen": 4}, seconds={text: 1.0}, rows=[row],
        not_preserved=[text], message=text,
    )  # fmt: skip


@pytest.mark.parametrize(
    "shown",
    [
        render(summary_of(EVIL)),
        metrics_table({EVIL: Metric(value=1.0, count=4)}),
        runs_table([RunOverview(name=EVIL, path=EVIL, status=EVIL, strategy=EVIL, samples=1, best={"metric": EVIL})]),
        styled(EVIL),
        styled_lines(indented(EVIL)),
        joined((EVIL, "bold"), EVIL),
    ],
    ids=["end table", "metrics", "runs", "styled", "lines", "joined"],
)
@pytest.mark.parametrize("columns", ["40", "400"])
def test_table_when_names_are_hostile_then_all_is_written_out(
    shown: object, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    draw(shown)  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert is_harmless(out)
    assert "\\x1b]0;owned" in out.replace("\n", "").replace(" ", "")
    # a narrow terminal may break a line anywhere
    assert columns == "40" or not any(line.startswith("dure:") for line in out.splitlines())


def test_table_when_cells_and_headers_are_strings_then_markup_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("[red]head[/red]", title="[bold]title[/bold]")
    table.add_row("[link=http://e]cell[/link] :smile:")
    draw(table)
    out = capsys.readouterr().out
    assert "[red]head[/red]" in out
    assert "[link=http://e]cell[/link] :smile:" in out
    assert "[bold]title[/bold]" in out


def test_live_line_when_a_metric_is_hostile_then_it_is_written_out() -> None:
    stream = io.StringIO()
    line = LiveLine(stream)
    line.show(EVIL)
    line.print_lines(EVIL)
    assert is_harmless(stream.getvalue())


def test_json_when_names_are_hostile_then_it_is_printable_and_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({EVIL: EVIL})
    out = capsys.readouterr().out
    assert is_harmless(out)
    assert json.loads(out) == {EVIL: EVIL}


def test_tell_when_a_peers_message_is_hostile_then_stderr_has_it_written_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_status(EVIL)
    err = capsys.readouterr().err
    assert is_harmless(err)
    assert [line for line in err.splitlines() if line.startswith("dure: ")] == [
        "dure: a\\x1b]0;owned\\x07\\x1b[2J\\x9b1m\\x0d"
    ]


@pytest.mark.parametrize(
    "path", ["runs/x", "runs/my run; touch x", "a'b`c$(d)", "a\nb\x1b]0;x\x07", "a\udc80b", "두레\u202e"]
)
def test_shell_word_when_a_shell_reads_it_then_it_is_the_path_and_nothing_else(path: str) -> None:
    word = shell_word(path)
    assert one_line(word) == word
    read = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout
    assert os.fsdecode(read) == path


@pytest.mark.parametrize("path", ["runs/x", "runs/my run", "a'b"])
def test_cure_when_python_called_then_its_argument_is_the_path(path: str) -> None:
    assert as_arguments(f"`dure train --resume {shell_word(path)}`") == f"`dure.train(resume={path!r})`"
