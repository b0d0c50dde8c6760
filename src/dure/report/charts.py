"""Charts of a run for its page, drawn with Bokeh.

They hold numbers and fixed words alone. Text from a run (names of metrics, messages) is put into the page around them,
escaped: Bokeh would typeset some of it as formulas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dure.report.part_labels import PART_LABELS
from dure.report.run_series import RunSeries

if TYPE_CHECKING:
    from bokeh.plotting import figure

COLORS = {
    "data": "#e69f00",
    "forward_backward": "#0072b2",
    "optimizer": "#009e73",
    "sync": "#d55e00",
    "other": "#8c8c8c",
}
"""Colours of the parts of a step, which people who see few colours can tell apart (Okabe and Ito)."""
KINDS = ("checkpoint", "evaluation", "restart", "failure", "hang", "other")
"""Kinds of events on the timeline, from the top."""
_HEIGHT = 260
_AROUND, _ROW_HEIGHT = 70, 24
"""Height in pixels of what surrounds a chart with rows, and of each row."""
_MOST_HEIGHT = 1_600
"""Maximum height in pixels of the rows of a chart: browsers limit the size of a canvas."""
_MOST_ROWS = 16
"""Maximum number of ranks that are labelled; further ones have narrower rows."""


@dataclass(frozen=True, kw_only=True)
class TimelineEvent:
    """Event of a run for its timeline."""

    seconds: float
    """Seconds since the first event."""
    kind: str
    """One of `KINDS`."""


def loss_chart(series: RunSeries) -> "figure":
    """Draw the mean training loss over samples."""
    return _line("samples seen", "training loss", series.samples_seen, series.loss, COLORS["forward_backward"])


def throughput_chart(series: RunSeries) -> "figure":
    """Draw samples per second over samples."""
    rate = series.samples_per_second
    plot = _line("samples seen", "samples/s", series.samples_seen, rate, COLORS["optimizer"])
    plot.y_range.start = 0
    return plot


def metric_chart(samples_seen: Sequence[float], values: Sequence[float]) -> "figure":
    """Draw a metric of the evaluations over samples."""
    plot = _line("samples seen", "value", np.array(samples_seen, float), np.array(values, float), COLORS["sync"])
    plot.scatter(x="x", y="y", size=7, color=COLORS["sync"], source=plot.renderers[0].data_source)
    return plot


def parts_chart(series: RunSeries) -> "figure":
    """Draw what a mean step consists of, a bar for each rank."""
    ranks = [str(rank) for rank in series.ranks]
    plot = _figure(
        y_range=ranks[::-1],
        height=_AROUND + min(_ROW_HEIGHT * len(ranks), _MOST_HEIGHT),
        x_axis_label="milliseconds of a mean step",
        y_axis_label="rank",
        tooltips=[("rank", "@rank"), ("part", "$name"), ("ms", "@$name{0.000}")],
    )
    milliseconds = {PART_LABELS[part]: 1e3 * seconds for part, seconds in series.part_seconds.items()}
    colors = [COLORS[part] for part in series.part_seconds]
    plot.hbar_stack([*milliseconds], y="rank", height=0.8, color=colors, source={"rank": ranks, **milliseconds})
    plot.x_range.start = 0
    return plot


def lateness_chart(series: RunSeries) -> "figure":
    """Draw how much longer each rank computes than the one that needs least, a cell for each span of steps."""
    from bokeh.models import ColorBar, LinearColorMapper

    num_ranks = len(series.ranks)
    milliseconds = 1e3 * series.late_seconds
    # one long pause must not make everything else look even
    most = float(np.nanquantile(milliseconds, 0.99))
    mapper = LinearColorMapper(palette="Cividis256", low=0, high=most if most > 0 else 1.0, nan_color="#8c8c8c")
    plot = _figure(
        y_range=(num_ranks - 0.5, -0.5),
        height=_AROUND + _ROW_HEIGHT * min(max(num_ranks, 3), _MOST_ROWS),
        x_axis_label="step",
        y_axis_label="rank",
        tooltips=[("step", "$x{0}"), ("rank", "$y{0}"), ("ms later", "@image{0.000}")],
    )
    first, last = float(series.span_steps[0]), float(series.span_steps[-1])
    plot.image(image=[milliseconds], x=first, y=-0.5, dw=max(1.0, last - first), dh=num_ranks, color_mapper=mapper)
    plot.x_range.range_padding = 0
    plot.yaxis.ticker = [*range(0, num_ranks, -(-num_ranks // _MOST_ROWS))]
    plot.yaxis.major_label_overrides = {row: str(rank) for row, rank in enumerate(series.ranks)}
    plot.add_layout(ColorBar(color_mapper=mapper, title="ms later", background_fill_alpha=0), "right")
    return plot


def timeline_chart(events: Sequence[TimelineEvent]) -> "figure":
    """Draw events over the time since the first one."""
    from bokeh.models import NumeralTickFormatter

    seconds: Mapping[str, list[Any]] = {
        "seconds": [event.seconds for event in events],
        "kind": [event.kind for event in events],
    }
    kinds = [kind for kind in KINDS if kind in seconds["kind"]]
    plot = _figure(
        y_range=kinds[::-1],
        height=_AROUND + _ROW_HEIGHT * len(kinds),
        x_axis_label="time since the start (h:mm:ss)",
        tooltips=[("kind", "@kind"), ("after", "@seconds{00:00:00}")],
    )
    plot.scatter(x="seconds", y="kind", size=9, color=COLORS["forward_backward"], alpha=0.7, source=seconds)
    plot.xaxis.formatter = NumeralTickFormatter(format="00:00:00")
    return plot


def _line(x_label: str, y_label: str, x: np.ndarray, y: np.ndarray, color: str) -> "figure":
    plot = _figure(
        x_axis_label=x_label,
        y_axis_label=y_label,
        tooltips=[(x_label, "@x{0,0}"), (y_label, "@y{0.0000}")],
    )
    plot.line(x="x", y="y", line_width=2, color=color, source={"x": x, "y": y})
    return plot


def _figure(*, tooltips: Sequence[tuple[str, str]], height: int = _HEIGHT, **settings: Any) -> "figure":
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
