"""Charts of a run for its page, drawn with Bokeh.

They hold numbers and fixed words alone. Text from a run (names of metrics, messages) is put into the page around them,
escaped: Bokeh would typeset some of it as formulas.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dure.report.part_labels import PART_LABELS
from dure.report.run_series import RunSeries

if TYPE_CHECKING:
    from bokeh.plotting import figure

COLORS = {
    "data": "#e69f00",
    "forward_backward": "#0072b2",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "optimizer": "#009e73",
    "sync": "#d55e00",
    "other": "#8c8c8c",
}
"""Colours of the parts of a step, which people who see few colours can tell apart (Okabe and Ito)."""
KINDS = ("checkpoint", "evaluation", "restart", "failure", "hang", "other")
"""Kinds of events on the timeline, from the top."""
COLUMNS, SCALE = "columns", "scale"
"""Names of the model of a chart that holds its columns, and of the one that maps values to colours."""
_HEIGHT = 260
AROUND, ROW_HEIGHT = 70, 24
"""Height in pixels of what surrounds a chart with rows, and of each row."""
_MOST_EVALUATIONS = 1_000
_MOST_ROWS = 16
"""Maximum number of ranks that are labelled; further ones have narrower rows."""


@dataclass(frozen=True, kw_only=True)
class TimelineEvent:
    """Event of a run for its timeline."""

    seconds: float
    """Seconds since the first event."""
    kind: str
    """One of `KINDS`."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Chart of a run, apart from its numbers and with them: a live page draws it once and then replaces the numbers."""

    layout: tuple[object, ...]
    """Values that a drawn chart cannot follow: if they change, it is drawn again."""
    columns: Mapping[str, Any]
    """Numbers, as columns of equal length."""
    scale_end: float | None = None
    """Largest value that has a colour of its own; None for charts without such colours."""
    _draw: "Callable[[Chart], figure]" = field(repr=False)

    def draw(self) -> "figure":
        """Return the chart as a figure of Bokeh."""
        return self._draw(self)


def loss_chart(series: RunSeries) -> Chart:
    """Return the mean training loss over samples."""
    return _line("samples seen", "training loss", series.samples_seen, series.loss, COLORS["forward_backward"])


def throughput_chart(series: RunSeries) -> Chart:
    """Return samples per second over samples."""
    rate = series.samples_per_second
    return _line("samples seen", "samples/s", series.samples_seen, rate, COLORS["optimizer"], from_zero=True)


def metric_chart(samples_seen: Sequence[float], values: Sequence[float]) -> Chart:
    """Return a metric of the evaluations over samples; of very many, some at equal distances and the last one."""
    shown = np.linspace(0, len(values) - 1, min(len(values), _MOST_EVALUATIONS)).round().astype(int)
    x, y = np.array(samples_seen, float)[shown], np.array(values, float)[shown]
    return _line("samples seen", "value", x, y, COLORS["sync"], has_points=True)


def parts_chart(series: RunSeries) -> Chart:
    """Return what a mean step consists of, a bar for each rank."""
    milliseconds = {PART_LABELS[part]: 1e3 * seconds for part, seconds in series.part_seconds.items()}
    return Chart(
        layout=("parts", *series.ranks),
        columns={"rank": [*map(str, series.ranks)], "row": [*range(len(series.ranks))], **milliseconds},
        _draw=partial(_draw_parts, series.ranks, [*series.part_seconds]),
    )


def _draw_parts(ranks: Sequence[int], parts: Sequence[str], chart: Chart) -> "figure":
    plot = _figure_of_ranks(
        ranks,
        x_axis_label="milliseconds of a mean step",
        tooltips=[("rank", "@rank"), ("part", "$name"), ("ms", "@$name{0.000}")],
    )
    labels, colors = [PART_LABELS[part] for part in parts], [COLORS[part] for part in parts]
    plot.hbar_stack(labels, y="row", height=0.8, color=colors, source=_source(chart))
    plot.x_range.start = 0
    return plot


def lateness_chart(series: RunSeries) -> Chart:
    """Return how much longer each rank computes than the one that needs least, a cell for each span of steps."""
    milliseconds = 1e3 * series.late_seconds
    # one long pause must not make everything else look even
    most = float(np.nanquantile(milliseconds, 0.99))
    first, last = float(series.span_steps[0]), float(series.span_steps[-1])
    return Chart(
        layout=("lateness", *series.ranks),
        columns={"image": [milliseconds.astype(np.float32)], "x": [first], "dw": [max(1.0, last - first)]},
        scale_end=most if most > 0 else 1.0,
        _draw=partial(_draw_lateness, series.ranks),
    )


def _draw_lateness(ranks: Sequence[int], chart: Chart) -> "figure":
    from bokeh.models import ColorBar, LinearColorMapper

    mapper = LinearColorMapper(palette="Cividis256", low=0, high=chart.scale_end, nan_color="#8c8c8c", name=SCALE)
    plot = _figure_of_ranks(
        ranks,
        x_axis_label="step",
        tooltips=[("step", "$x{0}"), ("rank", "$y{0}"), ("ms later", "@image{0.000}")],
    )
    plot.image(image="image", x="x", y=-0.5, dw="dw", dh=len(ranks), color_mapper=mapper, source=_source(chart))
    plot.x_range.range_padding = 0
    plot.add_layout(ColorBar(color_mapper=mapper, title="ms later", background_fill_alpha=0), "right")
    return plot


def timeline_chart(events: Sequence[TimelineEvent]) -> Chart:
    """Return events over the time since the first one."""
    columns: Mapping[str, list[Any]] = {
        "seconds": [event.seconds for event in events],
        "kind": [event.kind for event in events],
    }
    kinds = [kind for kind in KINDS if kind in columns["kind"]]
    return Chart(layout=("timeline", *kinds), columns=columns, _draw=partial(_draw_timeline, kinds))


def _draw_timeline(kinds: Sequence[str], chart: Chart) -> "figure":
    from bokeh.models import NumeralTickFormatter

    plot = figure_of(
        y_range=[*kinds][::-1],
        height=AROUND + ROW_HEIGHT * len(kinds),
        x_axis_label="time since the start (h:mm:ss)",
        tooltips=[("kind", "@kind"), ("after", "@seconds{00:00:00}")],
    )
    color = COLORS["forward_backward"]
    plot.scatter(x="seconds", y="kind", size=9, color=color, alpha=0.7, source=_source(chart))
    plot.xaxis.formatter = NumeralTickFormatter(format="00:00:00")
    return plot


def _line(
    x_label: str,
    y_label: str,
    x: np.ndarray,
    y: np.ndarray,
    color: str,
    *,
    from_zero: bool = False,
    has_points: bool = False,
) -> Chart:
    def draw(chart: Chart) -> "figure":
        from bokeh.models import NumeralTickFormatter

        source = _source(chart)
        plot = figure_of(
            x_axis_label=x_label,
            y_axis_label=y_label,
            tooltips=[(x_label, "@x{0,0}"), (y_label, "@y{0.0000}")],
        )
        plot.line(x="x", y="y", line_width=2, color=color, source=source)
        plot.xaxis.formatter = NumeralTickFormatter(format="0.[00]a")  # 1.25m samples: few places for many digits
        if has_points:
            plot.scatter(x="x", y="y", size=7, color=color, source=source)
        if from_zero:
            plot.y_range.start = 0
        return plot

    return Chart(layout=("line", x_label, y_label), columns={"x": x, "y": y}, _draw=draw)


def _source(chart: Chart) -> Any:
    from bokeh.models import ColumnDataSource

    return ColumnDataSource(data=dict(chart.columns), name=COLUMNS)


def _figure_of_ranks(ranks: Sequence[int], **settings: Any) -> "figure":
    """Return a figure with a row for each rank, the first one at the top."""
    num_ranks = len(ranks)
    plot = figure_of(
        y_range=(num_ranks - 0.5, -0.5),
        height=AROUND + ROW_HEIGHT * min(max(num_ranks, 3), _MOST_ROWS),
        y_axis_label="rank",
        **settings,
    )
    plot.yaxis.ticker = [*range(0, num_ranks, -(-num_ranks // _MOST_ROWS))]
    plot.yaxis.major_label_overrides = {row: str(rank) for row, rank in enumerate(ranks)}
    return plot


def figure_of(*, tooltips: Sequence[tuple[str, str]], height: int = _HEIGHT, **settings: Any) -> "figure":
    """Return an empty figure that is as wide as the page and has no colours of its own."""
    from bokeh.models import HoverTool
    from bokeh.plotting import figure

    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        tools="xpan,box_zoom,reset",
        toolbar_location="right",
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_alpha=0,
        **settings,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.add_tools(HoverTool(tooltips=[*tooltips]))
    return plot
