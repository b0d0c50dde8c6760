"""Page of a run: one HTML file that opens without a network.

The page loads nothing: BokehJS and all data are in it, and its content security policy forbids requests. Text from the
run is escaped by Jinja2 and never reaches a script.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from dure.errors import DureError, EnvironmentLacks
from dure.own_files import open_own
from dure.records import events as kinds
from dure.records.events import CheckpointSaved, Evaluated, Event, UnknownEvent
from dure.records.finding import Finding
from dure.records.rank_profiles import TRACE
from dure.records.run_dir import RunDir, os_errors_as_sentences
from dure.records.run_list import RunOverview, overview
from dure.records.usage import GpuRecord, read_usage, usage_path
from dure.report.charts import (
    COLORS,
    Chart,
    TimelineEvent,
    lateness_chart,
    loss_chart,
    metric_chart,
    parts_chart,
    throughput_chart,
    timeline_chart,
)
from dure.report.part_labels import PART_LABELS
from dure.report.run_series import RunSeries, run_series
from dure.report.summary import declared_differences, effective_events
from dure.report.whole_file import written_whole
from dure.terminal import few, printable
from dure.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from jinja2 import Environment

_FOLDER = Path(__file__).parent
PAINT = _FOLDER / "paint.js"
"""Script of the page that colours the charts as the page."""
_MOST_METRICS = 12
_MOST_EVENTS, _MOST_DRAWN = 300, 5_000
"""Maximum number of events in the table and in the chart, the last ones of the run."""
_MOST_TEXT = 2_000
_MOST_SETTING = 300
_MOST_MISSING, _MOST_SEARCHED = 8, 1_000
_FAILURES = (kinds.Failed, kinds.RankLost, kinds.LossNotFinite, kinds.ReplicasDiverged, kinds.StepSkipped)
_RESTARTS = (kinds.Restarted, kinds.Resumed, kinds.MicrobatchHalved, kinds.NodesChanged, kinds.ReplicaHealed)


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """Records of a run that a page shows."""

    run: RunDir
    seen: RunOverview
    events: Sequence[Event]
    series: RunSeries
    remarks: tuple[str, ...] = ()
    """Sentences below the name of the run."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Section of a page: a heading, a sentence and a chart."""

    id: str
    """Name that no other section of the page has; it does not depend on text from the run."""
    title: str
    text: str
    chart: Chart
    table: str = ""
    """Name of the table below it: `parts`, `events`, or none."""


@dataclass(frozen=True, kw_only=True)
class _EventRow:
    time: str
    name: str
    text: str


def write_page(run: RunDir, findings: Sequence[Finding], path: Path) -> None:
    """Write the page of a run; an existing file is replaced.

    Args:
        run: Run of a task or a script, also one that still goes on.
        findings: Findings of its diagnosis, in the order in which they are shown.
        path: Path of the file.

    Raises:
        EnvironmentLacks: Bokeh is not installed.
        RunInvalid: The records cannot be read.
        Misuse: The file cannot be written.
    """
    check_library()
    is_in_run = path.parent.resolve() == run.path.resolve()
    text = page(run, findings, trace_link=TRACE if is_in_run else "")
    with (
        written_whole(path) as new,
        open(new, "x", encoding="utf-8", errors="backslashreplace", opener=open_own) as file,
    ):
        file.write(text)


def check_library() -> None:
    """Refuse to draw without Bokeh.

    Raises:
        EnvironmentLacks: It is not installed.
    """
    try:
        import bokeh  # noqa: F401
    except ModuleNotFoundError:
        raise EnvironmentLacks("bokeh is not installed, but draws the report: pip install 'dure[report]'") from None


def page(run: RunDir, findings: Sequence[Finding], *, trace_link: str = "") -> str:
    """Return the page of a run as HTML.

    Args:
        run: The run.
        findings: Findings of its diagnosis.
        trace_link: Address of its trace, from where the page is; empty for none.

    Raises:
        RunInvalid: The records cannot be read.
    """
    from bokeh.embed import components
    from bokeh.resources import Resources

    with os_errors_as_sentences(run.path, "read"), run.understood():
        records = RunRecords(run=run, seen=overview(run), events=[*run.events()], series=run_series(run))
    is_running = records.seen.status == "running"
    remarks = ("The run still goes on: this page shows it as it was then.",) if is_running else ()
    shown = contents(replace(records, remarks=remarks), findings) | {"trace_link": trace_link}
    charts = {section.id: section.chart.draw() for section in shown["sections"]}
    script, places = components(charts) if charts else ("", {})
    return rendered_page(
        run,
        shown,
        places=places,
        scripts=Resources(mode="inline", components=["bokeh"]).render() if charts else "",
        charts=script,
        paint=PAINT.read_text(encoding="utf-8"),
    )


def rendered_page(run: RunDir, shown: Mapping[str, Any], *, is_live: bool = False, **scripts: Any) -> str:
    """Return the HTML of a page.

    Args:
        run: The run.
        shown: Result of `contents`.
        is_live: Whether the charts are drawn and the contents replaced by a script of the page.
        scripts: HTML that the template inserts as it is; it holds no text from the run.
    """
    values = {"scripts": "", "charts": "", "paint": "", "places": {}, **scripts}
    return (
        templates()
        .get_template("page.html.jinja")
        .render(
            name=printable(run.name),
            path=printable(str(run.path)),
            written=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            shown=shown,
            is_live=is_live,
            **values,
        )
    )


@cache
def templates() -> "Environment":
    """Return the templates of the page and of its parts, which escape all text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )


def contents(records: RunRecords, findings: Sequence[Finding] | None) -> dict[str, Any]:
    """Return the values that the parts of a page show.

    Args:
        records: Records of the run.
        findings: Findings of its diagnosis, in the order in which they are shown; None before the first diagnosis.
    """
    series, events = records.series, records.events
    nothing = "Nothing is wrong with it, as far as its records tell."
    return {
        "status": records.seen.status,
        "fault": printable(records.seen.fault or ""),
        "remarks": [printable(text) for text in records.remarks],
        "facts": [*_facts(records)],
        "findings": [_cleaned(finding) for finding in findings or ()],
        "without_findings": "It is being examined." if findings is None else nothing,
        "sections": [*_sections(series, events)],
        "part_rows": [*_part_rows(series)],
        "parts": [(PART_LABELS[part], COLORS[part]) for part in series.part_seconds],
        "memory_rows": [*_memory_rows(events)],
        "usage_rows": [*_usage_rows(records.run, series.ranks)],
        "event_rows": [*_event_rows(events[-_MOST_EVENTS:])],
        "num_events": len(events),
        "num_left_out": series.num_left_out,
        "missing": missing_ranks(series, events),
        "differences": [printable(text) for text in declared_differences(events)],
        "trace": printable(str(trace)) if (trace := records.run.path / TRACE).is_file() else "",
        "settings": [*_settings(records.run)],
    }


def missing_ranks(series: RunSeries, events: Sequence[Event]) -> str:
    """Return the ranks of the last attempt that have no records of steps while others have; empty if there are none."""
    start = last_start(events)
    recorded = {*series.ranks}
    if start is None or not recorded:
        return ""
    missing = islice((rank for rank in range(start.world_size) if rank not in recorded), _MOST_SEARCHED)
    return few([*missing], _MOST_MISSING)


def last_start(events: Sequence[Event]) -> kinds.Training | None:
    """Return the last start of training; None before the first."""
    return next((event for event in reversed(events) if isinstance(event, kinds.Training)), None)


def _facts(records: RunRecords) -> Iterator[tuple[str, str]]:
    """Yield the facts of a run, as pairs of name and value."""
    run, seen, series, events = records.run, records.seen, records.series, records.events
    if seen.task is not None:
        yield ("script" if run.is_script else "task"), printable(seen.task)
    start = last_start(events)
    if seen.strategy is not None and not run.is_script:
        yield "strategy", printable(seen.strategy)
    if start is not None:
        transport = f" through {printable(start.transport)}" if start.transport else ""
        yield "devices", f"{start.num_devices} x {printable(start.device)}{transport}"
        yield "epochs", f"{(series.samples_seen[-1] if series.steps.size else 0) / start.epoch_samples:.2f}"
    elif seen.num_devices is not None:
        yield "ranks", str(seen.num_devices)
    if series.steps.size:
        yield "steps", f"{int(series.steps[-1]):,}"
        yield "samples", f"{int(series.samples_seen[-1]):,}"
        if not np.isnan(series.samples_per_second).all():
            yield "median samples/s", format_count(float(np.nanmedian(series.samples_per_second)))
        yield "last training loss", f"{series.loss[-1]:.6g}"
        if series.sent_bytes.size and series.sent_bytes.max() > 0:
            yield "sent for a step", f"{format_bytes(float(series.sent_bytes.max()))} by a rank"
    if seen.best is not None:
        value = seen.best.get("value")
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        yield f"best {printable(str(seen.best.get('metric')))}", printable(shown)
    if series.times is not None:
        yield "first to last step", format_seconds(series.times[1] - series.times[0])
    restarts = sum(isinstance(event, kinds.Restarted) for event in events)
    if restarts:
        yield "restarts", str(restarts)


def _sections(series: RunSeries, events: Sequence[Event]) -> Iterator[Section]:
    """Yield the sections with charts."""
    if series.steps.size:
        most = series.steps_per_point
        points = "Each point is a step." if most == 1 else f"Each point is the mean of up to {most:,} steps."
        yield Section(id="loss", title="Training loss", text=points, chart=loss_chart(series))
    evaluated = [event for event in effective_events(events) if isinstance(event, Evaluated)]
    names = [*dict.fromkeys(name for event in evaluated for name in event.metrics)]
    for number, name in enumerate(names[:_MOST_METRICS]):
        of_name = [(event, event.metrics[name].value) for event in evaluated if name in event.metrics]
        seen = [event.samples_seen for event, _ in of_name]
        count = f"{len(of_name)} evaluation{'' if len(of_name) == 1 else 's'}; the last one: {of_name[-1][1]:.6g}."
        chart = metric_chart(seen, [value for _, value in of_name])
        yield Section(id=f"metric{number}", title=f"Evaluation: {printable(name)}", text=count, chart=chart)
    if series.steps.size:
        without = "Without evaluations and checkpoints."
        yield Section(id="throughput", title="Throughput", text=without, chart=throughput_chart(series))
        spent = "What each rank spends it on."
        yield Section(id="parts", title="A mean step", text=spent, chart=parts_chart(series), table="parts")
    if len(series.ranks) > 1:
        longer = (
            "How much longer a rank computes and waits for data, in a step, than the one that needs least: the others "
            "wait for it."
        )
        yield Section(id="lateness", title="Lateness", text=longer, chart=lateness_chart(series))
    if events:
        begin = events[0].time
        drawn = events[-_MOST_DRAWN:]
        shown = [TimelineEvent(seconds=event.time - begin, kind=_kind(event)) for event in drawn]
        yield Section(id="events", title="Events", text="", chart=timeline_chart(shown), table="events")


def _part_rows(series: RunSeries) -> Iterator[tuple[int, list[str]]]:
    """Yield each rank with the milliseconds of each part."""
    for row, rank in enumerate(series.ranks):
        yield rank, [f"{1e3 * seconds[row]:.3f}" for seconds in series.part_seconds.values()]


def _memory_rows(events: Sequence[Event]) -> Iterator[tuple[int, list[str]]]:
    """Yield each rank with what it held, and the peak of each of its devices, as they were recorded last."""
    used = next((event for event in reversed(events) if isinstance(event, kinds.MemoryUsed)), None)
    for rank in () if used is None else used.ranks:
        held = (rank.parameters, rank.gradients, rank.optimizer, rank.buffers)
        peaks = [
            f"{printable(each.device)}: {format_bytes(each.peak)} of {format_bytes(each.total)}"
            for each in rank.devices
        ]
        yield rank.rank, [*map(format_bytes, held), ", ".join(peaks)]


def _usage_rows(run: RunDir, ranks: Sequence[int]) -> Iterator[tuple[int, list[str]]]:
    """Yield each rank with its mean use of cores, memory, loaders and GPUs, if it is on record."""
    for rank in ranks:
        path = usage_path(run, rank)
        if path.is_file() and (row := _usage_row(run, rank, path.stat().st_size)):
            yield rank, row


@lru_cache(maxsize=1024)
def _usage_row(run: RunDir, rank: int, num_bytes: int) -> list[str]:
    """Return the means of a rank, read again only when its file has grown: a live page asks every second."""
    found = [*read_usage(run, rank)]
    return (
        []
        if not found
        else [
            f"{mean(each.cores for each in found):.1f}",
            f"{mean(each.loaders for each in found):.1f}",
            f"{mean(each.loader_cores for each in found):.1f}",
            format_bytes(max(each.resident_bytes + each.loader_bytes for each in found)),
            _gpu_text([gpu for each in found for gpu in each.gpus]),
        ]
    )


def _gpu_text(samples: Sequence[GpuRecord]) -> str:
    """Return the mean of what is known of GPUs."""
    busy = [gpu.busy for gpu in samples if gpu.busy is not None]
    watts = [gpu.watts for gpu in samples if gpu.watts is not None]
    clocks = [gpu.megahertz for gpu in samples if gpu.megahertz is not None]
    texts = (
        f"busy {mean(busy):.0%}" if busy else "",
        f"{mean(watts):.0f} W" if watts else "",
        f"{mean(clocks):.0f} MHz" if clocks else "",
    )
    return ", ".join(filter(None, texts))


def _kind(event: Event) -> str:
    if isinstance(event, CheckpointSaved):
        return "checkpoint"
    if isinstance(event, Evaluated):
        return "evaluation"
    if isinstance(event, kinds.Hang):
        return "hang"
    if isinstance(event, _FAILURES):
        return "failure"
    return "restart" if isinstance(event, _RESTARTS) else "other"


def _event_rows(events: Sequence[Event]) -> Iterator[_EventRow]:
    for event in events:
        name, fields = type(event).__name__, asdict(event)
        if isinstance(event, UnknownEvent):
            name, fields = event.name, dict(event.fields)
        texts = [f"{key}={value}" for key, value in fields.items() if key != "time" and value not in (None, (), {}, [])]
        yield _EventRow(
            time=_shown_time(event.time),
            name=_limited(name, _MOST_SETTING),
            text=_limited(", ".join(texts), _MOST_TEXT),
        )


def _shown_time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "?"


def _limited(text: str, most: int) -> str:
    return printable(text if len(text) <= most else f"{text[:most]}…")


def _cleaned(finding: Finding) -> dict[str, Any]:
    """Return a finding with its text without control characters."""
    gain = finding.gain_fraction
    return {
        "severity": finding.severity,
        "what": printable(finding.what),
        "evidence": [printable(line) for line in finding.evidence],
        "files": printable(few(finding.files, 8)),
        "cause": printable(finding.cause or ""),
        "remedy": printable(finding.remedy or ""),
        "gain": None if gain is None or not math.isfinite(gain) else f"{gain:.0%}",
    }


def _settings(run: RunDir) -> Iterator[tuple[str, str]]:
    """Yield the settings of a run of a task by their names in a file of settings."""
    if run.is_script:
        return
    try:
        spec = run.read_spec().model_dump(mode="json")
    except DureError:
        return
    for name, value in _flat(spec):
        yield printable(name), _limited(str(value), _MOST_SETTING)


def _flat(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif value not in (None, {}, []):
            yield f"{prefix}{name}", value
