"""The end table and the table of runs, as text."""

import pytest
from rich.console import RenderableType

from dure.records.run_list import RunOverview
from dure.records.step_record import EpochRow, Metric, RunSummary
from dure.report.tables import MOST_ROWS, render, runs_table
from dure.styled import drawn


def text(renderable: RenderableType, width: int = 80) -> str:
    return drawn(renderable, width)


def summary(num_rows: int = 2, **changes: object) -> RunSummary:
    rows = [
        EpochRow(
            epoch=i + 1.0,
            samples_seen=64 * (i + 1),
            train_loss=1 / (i + 1),
            metrics={"loss": Metric(value=0.5, count=360), "accuracy": Metric(value=0.9725, count=360)},
            seconds=1.5,
        )
        for i in range(num_rows)
    ]
    values: dict[str, object] = {
        "run": "runs/2026-11-20_10-26-46_digits_ddp",
        "status": "completed",
        "strategy": "ddp",
        "world_size": 2,
        "num_devices": 2,
        "device": "cpu",
        "precision": "fp32",
        "steps": 1230,
        "samples": 14370,
        "epochs": 10.0,
        "final_loss": 0.01,
        "metrics": rows[-1].metrics if rows else {},
        "best": {"metric": "loss", "value": 0.5, "samples_seen": 128, "checkpoint": "samples-000000000128"},
        "wall_seconds": 12.3,
        "samples_per_second": 12345.6,
        "seconds": {"data": 1.0, "forward_backward": 6.0, "sync": 3.0, "other": 0.0},
        "rows": rows,
        "not_preserved": ["dropout: other draws than on one device"],
    }
    return RunSummary(**{**values, **changes})  # type: ignore[arg-type]


def test_table_when_a_run_ended_then_has_all_that_a_person_asks() -> None:
    shown = text(render(summary()))
    assert "completed: ddp on 2 devices (cpu, fp32), 10 epochs, 1,230 steps, 14,370 samples in 12 s" in " ".join(
        shown.split()
    )
    for words in (
        *(
            "train loss",
            "val loss",
            "val accuracy",
            "0.9725",
            "12,346 samples/s",
            "best     loss 0.5000 at 128 samples",
        ),
        *("runs/2026-11-20_10-26-46_digits_ddp", "forward and backward  60.0%", "what this run does not preserve"),
        "-  dropout: other draws than on one device",
    ):
        assert words in shown


def test_table_when_a_run_ended_early_then_says_why_and_needs_no_rows() -> None:
    shown = text(render(summary(0, status="interrupted", message="SIGTERM at step 3", best=None, seconds={})))
    assert "interrupted: " in shown
    assert "SIGTERM at step 3" in shown
    assert "where the time went" not in shown


@pytest.mark.parametrize("width", [40, 80])
def test_table_when_the_terminal_is_narrow_then_no_line_is_wider(width: int) -> None:
    assert max(map(len, text(render(summary()), width).splitlines())) <= width


def test_headline_when_the_terminal_is_too_narrow_then_further_lines_are_indented() -> None:
    first, second, *_ = text(render(summary()), 60).splitlines()
    assert first.startswith("completed: ddp on 2 devices")
    assert second.startswith("    ")
    assert " ".join([first, second.strip()]) == text(render(summary()), 200).splitlines()[0]


def test_table_when_there_are_many_epochs_then_the_first_the_best_and_the_last_stay() -> None:
    shown = text(render(summary(500, best={"metric": "loss", "value": 0.5, "samples_seen": 64 * 101})))
    epochs = [line.split()[0] for line in shown.splitlines() if "0.9725" in line]
    assert (epochs[0], epochs[-1], "101" in epochs) == ("1", "500", True)
    assert len(epochs) <= MOST_ROWS + 1


@pytest.mark.parametrize("width", [40, 80])
def test_runs_table_when_shown_then_has_a_run_with_all_its_facts(width: int) -> None:
    best = {"metric": "accuracy", "value": 0.9725, "samples_seen": 1024}
    name = "2026-11-20_10-26-46_digits_ddp"
    done = RunOverview(name=name, path="p", status="completed", strategy="ddp", num_devices=2, samples=14370, best=best)
    shown = text(runs_table([done, RunOverview(name="y", path="q", status="unreadable")]), width)
    assert all(words in " ".join(shown.split()) for words in ("completed", "ddp x 2", "14,370", "0.9725", "unreadable"))
    assert max(map(len, shown.splitlines())) <= width


def test_text_when_it_looks_like_markup_then_is_shown_as_it_is() -> None:
    assert "[bold]x[/bold]" in text(render(summary(not_preserved=["[bold]x[/bold]"])))
