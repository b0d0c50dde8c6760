"""The table at the end of a run, and the table of the runs."""

from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from dure.measure.records import EpochRow, Metric, RunSummary
from dure.rundir import RunOverview
from dure.units import format_seconds

MOST_ROWS = 24
"""More evaluations than this are thinned out evenly; the first, the best and the last always stay."""

NARROW_COLUMNS = 60
"""Below this width a table of runs has no room for its columns: each run gets lines of its own."""

BAR_COLUMNS = 20

STATUS_STYLES = {"completed": "green", "running": "cyan", "interrupted": "yellow"}

SECONDS_LABELS = {
    "data": "waiting for data",
    "forward_backward": "forward and backward",
    "sync": "synchronising",
    "optimizer": "optimiser",
}


def render(summary: RunSummary) -> RenderableType:
    """Show what a run came to: loss and metrics per evaluation, throughput, where the time and the records are."""
    parts: list[RenderableType] = [_headline(summary)]
    if summary.message:
        parts.append(Text(summary.message, style="yellow"))
    if summary.rows:
        parts.append(_epoch_table(summary))
    parts.append(_facts(summary))
    if sum(summary.seconds.values()) > 0:
        parts += [Text("\nwhere the time went", style="bold"), _time_table(summary.seconds)]
    if summary.not_preserved:
        parts.append(Text(f"\nwhat {summary.strategy} does not preserve of the one-device run", style="bold"))
        parts.append(_list(summary.not_preserved))
    return Group(*parts)


def metrics_table(metrics: Mapping[str, Metric]) -> Table:
    """Show the metrics of one evaluation, each with what it was counted over."""
    table = _table()
    table.add_column("metric", overflow="fold")
    table.add_column("value", justify="right")
    table.add_column("counted over", justify="right")
    for name, metric in metrics.items():
        add_row(table, name, _number(metric.value), f"{metric.count:,.0f}")
    return table


def runs_table(runs: Sequence[RunOverview]) -> RenderableType:
    """Show the runs of a folder, one line each; lines of their own where the terminal is narrow."""
    return _RunsTable(runs)


class _RunsTable:
    """Chooses between table and list when the width is known."""

    def __init__(self, runs: Sequence[RunOverview]) -> None:
        self.runs = runs

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < NARROW_COLUMNS:
            for run in self.runs:
                yield Text(run.name, style="bold", overflow="fold")
                yield Text(f"  {run.status}, {_spread(run)}, {_samples(run)} samples", overflow="fold")
                if run.best:
                    yield Text(f"  best {_best(run.best)}", overflow="fold")
            return
        table = _table()
        for name in ("run", "status", "strategy", "samples", "best"):
            justify = "right" if name == "samples" else "left"
            table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for run in self.runs:
            status = Text(run.status, style=STATUS_STYLES.get(run.status, "red"))
            add_row(table, run.name, status, _spread(run), _samples(run), _best(run.best) if run.best else "")
        yield table


def _headline(summary: RunSummary) -> Text:
    devices = "1 device" if summary.num_devices == 1 else f"{summary.num_devices} devices"
    status = Text(summary.status, style=f"bold {STATUS_STYLES.get(summary.status, 'red')}")
    return status.append(
        f": {summary.strategy} on {devices} ({summary.device}, {summary.precision}), {summary.epochs:.4g} epochs,"
        f" {summary.steps:,} steps, {summary.samples:,} samples in {format_seconds(summary.wall_seconds)}",
        style="not bold default",
    )


def _epoch_table(summary: RunSummary) -> Table:
    rows = _thinned(summary)
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    table = _table()
    for name in ("epoch", "train loss", *(f"val {name}" for name in names), "time"):
        table.add_column(name, justify="right")
    best_samples = summary.best.get("samples_seen") if summary.best else None
    for row in rows:
        values = (_number(row.metrics[name].value) if name in row.metrics else "" for name in names)
        loss = "" if row.train_loss is None else _number(row.train_loss)
        style = "bold" if row.samples_seen == best_samples else None
        add_row(table, f"{row.epoch:.4g}", loss, *values, format_seconds(row.seconds), style=style)
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
        add_row(facts, "best", _best(summary.best))
    add_row(facts, "speed", f"{summary.samples_per_second:,.0f} samples/s")
    add_row(facts, "records", summary.run)
    return facts


def _time_table(seconds: Mapping[str, float]) -> Table:
    total = sum(seconds.values())
    table = _table(show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, overflow="crop")
    for name, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        bar = "━" * round(BAR_COLUMNS * spent / total)
        add_row(table, SECONDS_LABELS.get(name, name), f"{spent / total:.1%}", Text(bar, style="cyan"))
    return table


def _list(lines: Sequence[str]) -> Table:
    table = _table(show_header=False)
    table.add_column(width=1)
    table.add_column(overflow="fold")
    for line in lines:
        add_row(table, "-", line)
    return table


def add_row(table: Table, *cells: str | Text, style: str | None = None) -> None:
    """Add a row whose text is shown as it is: names and paths may hold what rich takes for markup, `[x]`."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def _table(show_header: bool = True) -> Table:
    return Table(box=None, show_header=show_header, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)


def _spread(run: RunOverview) -> str:
    return f"{run.strategy or '?'} x {run.num_devices or '?'}"


def _samples(run: RunOverview) -> str:
    return "" if run.samples is None else f"{run.samples:,}"


def _best(best: Mapping[str, object]) -> str:
    value = best.get("value")
    said = _number(value) if isinstance(value, int | float) else str(value)
    samples = best.get("samples_seen")
    return f"{best.get('metric')} {said}" + (f" at {samples:,} samples" if isinstance(samples, int) else "")


def _number(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3e}"
