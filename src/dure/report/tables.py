"""Tables for the end of a run, and for the runs of a folder."""

from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table

from dure.records.run_list import RunOverview
from dure.records.step_record import EpochRow, Metric, RunSummary
from dure.report.part_labels import PART_LABELS
from dure.styled import Hanging, joined, styled, styled_lines
from dure.terminal import indented
from dure.units import format_seconds

MOST_ROWS = 24
"""Maximum evaluations shown; more are thinned out evenly, while the first, the best and the last always stay."""

FAR = 1000
"""Columns of an unlimited terminal, to measure the natural width of a table."""

BAR_COLUMNS = 20

STATUS_STYLES = {"completed": "green", "running": "cyan", "interrupted": "yellow"}


def render(summary: RunSummary) -> RenderableType:
    """Render the result of a run: loss and metrics per evaluation, throughput, time spent, and path of the records."""
    parts: list[RenderableType] = [_headline(summary)]
    if summary.message:
        parts.append(styled_lines(indented(summary.message), "yellow"))
    if summary.rows:
        parts.append(_epoch_table(summary))
    parts.append(_facts(summary))
    if sum(summary.seconds.values()) > 0:
        parts += [styled_lines("\nwhere the time went", "bold"), _time_table(summary.seconds)]
    if summary.not_preserved:
        parts.append(styled_lines("\nwhat this run does not preserve of the one-device run", "bold"))
        parts.append(_list(summary.not_preserved))
    return Group(*parts)


def metrics_table(metrics: Mapping[str, Metric]) -> Table:
    """Render the metrics of an evaluation, each with its count."""
    table = _table()
    table.add_column("metric", overflow="fold")
    table.add_column("value", justify="right")
    table.add_column("counted over", justify="right")
    for name, metric in metrics.items():
        table.add_row(name, _number(metric.value), f"{metric.count:,.0f}")
    return table


def runs_table(runs: Sequence[RunOverview]) -> RenderableType:
    """Render the runs of a folder, one per line; as a list if the terminal is too narrow for that."""
    return _RunsTable(runs)


class _RunsTable:
    """Table or list of runs, chosen when the width is known."""

    def __init__(self, runs: Sequence[RunOverview]) -> None:
        self.runs = runs

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = _table()
        for name in ("run", "status", "strategy", "samples", "best"):
            table.add_column(name, justify="right" if name == "samples" else "left", no_wrap=True)
        for run in self.runs:
            status = styled(run.status, _status_style(run.status))
            table.add_row(run.name, status, _spread(run), _samples(run), _best(run.best, with_samples=False))
        if console.measure(table, options=options.update(max_width=FAR)).maximum <= options.max_width:
            yield table
        else:
            yield from self._lines()
        for run in self.runs:
            if run.fault is not None:
                yield styled(f"{run.name}: {run.fault}", "yellow", overflow="fold")

    def _lines(self) -> RenderResult:
        for run in self.runs:
            yield styled(run.name, "bold", overflow="fold")
            yield styled(f"  {run.status}, {_spread(run)}, {_samples(run) or '?'} samples", overflow="fold")
            if run.best:
                yield styled(f"  best {_best(run.best)}", overflow="fold")


def _status_style(status: str) -> str:
    return STATUS_STYLES.get(status, "red")


def _headline(summary: RunSummary) -> RenderableType:
    devices = "1 device" if summary.num_devices == 1 else f"{summary.num_devices} devices"
    epochs = f"{summary.epochs:.4g} epoch{'' if summary.epochs == 1 else 's'}"
    status = (summary.status, f"bold {_status_style(summary.status)}")
    facts = (
        f": {summary.strategy} on {devices} ({summary.device}, {summary.precision}), {epochs},"
        f" {summary.steps:,} steps, {summary.samples:,} samples in {format_seconds(summary.wall_seconds)}"
    )
    return Hanging(joined(status, facts))


def _epoch_table(summary: RunSummary) -> Table:
    rows = _thinned(summary)
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    table = _table()
    for name in ("epoch", "train loss", *(f"val {name}" for name in names), "time"):
        table.add_column(name, justify="right", overflow="fold")
    best_samples = summary.best.get("samples_seen") if summary.best else None
    for row in rows:
        values = (_number(row.metrics[name].value) if name in row.metrics else "" for name in names)
        loss = "" if row.train_loss is None else _number(row.train_loss)
        style = "bold" if row.samples_seen == best_samples else None
        table.add_row(f"{row.epoch:.4g}", loss, *values, format_seconds(row.seconds), style=style)
    return table


def _thinned(summary: RunSummary) -> list[EpochRow]:
    rows = summary.rows
    if len(rows) <= MOST_ROWS:
        return rows
    best = summary.best.get("samples_seen") if summary.best else None
    kept = {round(i * (len(rows) - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)}
    return [row for i, row in enumerate(rows) if i in kept or row.samples_seen == best]


def _facts(summary: RunSummary) -> Table:
    facts = _table(show_header=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    if summary.best:
        facts.add_row("best", _best(summary.best))
    facts.add_row("speed", f"{summary.samples_per_second:,.0f} samples/s")
    if summary.restarts:
        facts.add_row("restarts", f"{summary.restarts}, after a rank had failed: see events.jsonl")
    if summary.microbatch_size:
        size = f"{summary.microbatch_size} samples at once on each device: memory ran out with more"
        facts.add_row("microbatch", f"{size} (--microbatch-size {summary.microbatch_size})")
    facts.add_row("records", summary.run)
    return facts


def _time_table(seconds: Mapping[str, float]) -> Table:
    total = sum(seconds.values())
    table = _table(show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, overflow="crop")
    for name, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        bar = "━" * round(BAR_COLUMNS * spent / total)
        table.add_row(PART_LABELS.get(name, name), f"{spent / total:.1%}", styled(bar, "cyan"))
    return table


def _list(lines: Sequence[str]) -> Table:
    table = _table(show_header=False)
    table.add_column(width=1)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row("-", line)
    return table


def _table(show_header: bool = True) -> Table:
    return Table(box=None, show_header=show_header, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)


def _spread(run: RunOverview) -> str:
    return f"{run.strategy or '?'} x {run.num_devices or '?'}"


def _samples(run: RunOverview) -> str:
    return "" if run.samples is None else f"{run.samples:,}"


def _best(best: Mapping[str, object] | None, *, with_samples: bool = True) -> str:
    if not best:
        return ""
    value, samples = best.get("value"), best.get("samples_seen")
    shown = _number(value) if isinstance(value, int | float) else str(value)
    where = f" at {samples:,} samples" if with_samples and isinstance(samples, int) and samples else ""
    return f"{best.get('metric')} {shown}{where}"


def _number(value: float) -> str:
    if abs(value) >= 2**1023:  # an integer may be too large for a float
        return "inf"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3e}"
