"""Live view of a run in the terminal."""

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

from dure.records.events import Event, UnknownEvent
from dure.records.finding import Finding
from dure.records.step_record import PARTS
from dure.report.live.examination import Examination
from dure.report.live.live_run import LiveRun, Moment
from dure.report.live.wording import ago, gaps, remarks
from dure.report.part_labels import PART_LABELS
from dure.report.tables import STATUS_STYLES
from dure.styled import Hanging, draw, drawn, joined, styled
from dure.terminal import LiveScreen, print_at_once
from dure.units import format_count

_INTERVAL_SECONDS = 1.0
_LINE_SECONDS = 10.0
"""Time between two lines where there is no screen."""
_END_SECONDS = 10.0
"""Time for which the end of a run waits for its diagnosis."""
_NUM_EVENTS, _NUM_FINDINGS = 4, 4
_MOST_EVENT, _LEAST_RANKS = 300, 3
_WIDE_COLUMNS = 72
"""Columns from which the parts of a step are shown."""
_MOST_BARS = 60
_BARS = "▁▂▃▄▅▆▇█"
_SEVERITY_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold"}


def show(live: LiveRun, examination: Examination) -> None:
    """Show a run until it ends: on a terminal as a screen that is drawn again and again, elsewhere as lines.

    Args:
        live: Reader of the run.
        examination: Diagnosis of the run, open.
    """
    screen = LiveScreen()
    try:
        moment = _follow(live, examination, screen)
    finally:
        screen.close()
    draw(view(moment, examination.findings, *shutil.get_terminal_size()))
    is_known = moment.status != "unreadable"
    print_at_once(f"the run has ended: {moment.status}" if is_known else "whether the run goes on cannot be read")


def _follow(live: LiveRun, examination: Examination, screen: LiveScreen) -> Moment:
    """Show a run until it has ended and is diagnosed, and return its last state."""
    next_line = 0.0
    while not (moment := live.refresh()).is_over:
        if screen.is_live:
            columns, lines = shutil.get_terminal_size()
            screen.show(drawn(view(moment, examination.findings, columns, lines), columns))
        elif time.monotonic() >= next_line:
            print_at_once(line(moment))
            next_line = time.monotonic() + _LINE_SECONDS
        if not moment.unread_fraction:
            time.sleep(_INTERVAL_SECONDS)
    num_done, deadline = examination.num_done, time.monotonic() + _END_SECONDS
    examination.hasten()
    while examination.num_done == num_done and time.monotonic() < deadline:
        time.sleep(0.02)
    return moment


def line(moment: Moment) -> str:
    """Return the state of a run as one line."""
    return f"{moment.records.run.name}: {moment.status}{''.join(f', {fact}' for fact in _facts(moment))}"


def view(moment: Moment, findings: Sequence[Finding] | None, columns: int, lines: int) -> RenderableType:
    """Return the state of a run for a terminal.

    Args:
        moment: State of the run.
        findings: Findings of its diagnosis; None before the first.
        columns: Columns of the terminal.
        lines: Lines of the terminal, which decide how many ranks there is space for.
    """
    status = (moment.status, f"bold {STATUS_STYLES.get(moment.status, 'red')}")
    parts: list[RenderableType] = [joined((moment.records.run.name, "bold"), " ", status)]
    parts.append(Hanging(styled(", ".join(_facts(moment)), overflow="fold")))
    parts += [
        styled(text, "dim", overflow="fold") for text in (*remarks(moment), *gaps(moment), *moment.records.remarks)
    ]
    if moment.records.seen.fault:
        parts.append(styled(moment.records.seen.fault, "yellow", overflow="fold"))
    series = moment.records.series
    for label, values in (("loss", series.loss), ("samples/s", series.samples_per_second)):
        if values.size > 1:
            parts.append(_curve(label, values, columns))
    below = [*_findings(findings), *_events(moment.records.events)]
    if moment.part_seconds:
        most = max(_LEAST_RANKS, lines - len(parts) - len(below) - 7)
        parts += [styled(""), *_ranks(moment, columns, most)]
    return Group(*parts, *([styled("")] if below else []), *below)


def _facts(moment: Moment) -> Iterator[str]:
    if moment.step is None:
        return
    yield f"step {moment.step:,}"
    yield f"{moment.samples_seen:,} samples"
    if not math.isnan(moment.samples_per_second):
        yield f"{format_count(moment.samples_per_second)} samples/s"
    if not math.isnan(moment.loss):
        yield f"loss {moment.loss:.5g}"
    if moment.num_restarts:
        yield f"{moment.num_restarts} restart{'' if moment.num_restarts == 1 else 's'}"
    if moment.status == "running" and moment.seconds_quiet is not None:
        yield f"last record {ago(moment.seconds_quiet)}"


def _curve(label: str, values: np.ndarray, columns: int) -> RenderableType:
    """Return values as a row of bars, from the smallest to the largest."""
    known = values[np.isfinite(values)]
    if not known.size:
        return styled("")
    num = max(1, min(_MOST_BARS, columns - 36, known.size))
    means = np.array([span.mean() for span in np.array_split(known, num)])
    low, high = float(means.min()), float(means.max())
    heights = (means - low) / (high - low) if high > low else np.full(num, 0.5)
    bars = "".join(_BARS[round(height * (len(_BARS) - 1))] for height in heights)
    return joined((f"{label:<10}", "bold"), (bars, "cyan"), f" {known[0]:.4g} … {known[-1]:.4g}")


def _ranks(moment: Moment, columns: int, most: int) -> Iterator[RenderableType]:
    """Yield the times of the ranks; if there is no space for all, those of the ranks that are late most."""
    seconds = moment.part_seconds
    busy = {rank: parts["wall"] - parts["sync"] for rank, parts in seconds.items()}
    first = min(busy.values())
    shown = sorted(sorted(busy, key=lambda rank: -busy[rank])[:most])
    names = (*PARTS, "other") if columns >= _WIDE_COLUMNS else ()
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("rank", "ms/step", "late", *(PART_LABELS[name] for name in names)):
        table.add_column(title, justify="right", overflow="fold")
    for rank in shown:
        values = (seconds[rank]["wall"], busy[rank] - first, *(seconds[rank][name] for name in names))
        table.add_row(str(rank), *(f"{1e3 * value:.1f}" for value in values))
    yield table
    if len(shown) < len(seconds):
        left = len(seconds) - len(shown)
        yield styled(f"… and {left} rank{'' if left == 1 else 's'} less late", "dim")


def _findings(findings: Sequence[Finding] | None) -> Iterator[RenderableType]:
    for finding in (findings or ())[:_NUM_FINDINGS]:
        what = finding.what.partition("\n")[0]
        style = _SEVERITY_STYLES.get(finding.severity, "")
        yield Hanging(joined((f"{finding.severity}: ", style), what))
        if finding.remedy:
            yield Hanging(styled(f"  remedy: {finding.remedy}", overflow="fold"))


def _events(events: Sequence[Event]) -> Iterator[RenderableType]:
    for event in events[-_NUM_EVENTS:]:
        name, fields = type(event).__name__, asdict(event)
        if isinstance(event, UnknownEvent):
            name, fields = event.name, dict(event.fields)
        texts = [f"{key}={value}" for key, value in fields.items() if key != "time" and value not in (None, (), {}, [])]
        text = f"{name}: {', '.join(texts)}"[:_MOST_EVENT]
        row = styled(text, "dim", overflow="crop")
        row.no_wrap = True
        yield row
