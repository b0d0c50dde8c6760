"""Charts of a comparison, drawn with Bokeh; they hold numbers, names of strategies and fixed words."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dure.report.charts import AROUND, COLORS, ROW_HEIGHT, figure_of
from dure.report.comparison import MeasuredRun, Result
from dure.report.part_labels import PART_LABELS

if TYPE_CHECKING:
    from bokeh.plotting import figure

_PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c8c8c", "#e69f00", "#56b4e9")
"""Colours that people who see few colours can tell apart (Okabe and Ito), on white and on black."""
_DASHES = ("solid", "dashed", "dotted", "dotdash")
"""Lines are told apart without colours too."""
_MOST_POINTS = 200


def rates_chart(results: Mapping[str, Result]) -> "figure":
    """Return the samples per second of each kind, with the range over its rounds."""
    rates = [each.samples_per_second for each in results.values()]
    rows = [*range(len(results))]
    plot = _figure_of_kinds([*results], x_axis_label="samples/s", tooltips=[("samples/s", "@right{0,0.0}")])
    plot.hbar(y=rows, right=rates, height=0.7, color=COLORS["forward_backward"])
    slowest, fastest = [each.slowest for each in results.values()], [each.fastest for each in results.values()]
    for size, color in ((6, "#ffffff"), (2, "#1b1f24")):  # seen on the bar, and on any background
        plot.segment(x0=slowest, x1=fastest, y0=rows, y1=rows, line_width=size, color=color)
    plot.x_range.start = 0
    return plot


def parts_chart(results: Mapping[str, Result]) -> "figure":
    """Return what a mean step of each kind consists of."""
    from bokeh.models import ColumnDataSource

    parts = [*next(iter(results.values())).part_seconds]
    labels = [PART_LABELS[part] for part in parts]
    columns: dict[str, list[object]] = {"row": [*range(len(results))], "kind": [*results]}
    for part, label in zip(parts, labels, strict=True):
        columns[label] = [1e3 * each.part_seconds[part] for each in results.values()]
    plot = _figure_of_kinds(
        [*results],
        x_axis_label="milliseconds of a mean step",
        tooltips=[("", "@kind"), ("part", "$name"), ("ms", "@$name{0.000}")],
    )
    colors = [COLORS[part] for part in parts]
    plot.hbar_stack(labels, y="row", height=0.7, color=colors, source=ColumnDataSource(data=columns))
    plot.x_range.start = 0
    return plot


def memory_chart(results: Mapping[str, Result]) -> "figure":
    """Return the peak memory of each rank of each kind, a bar for each rank within the row of its kind."""
    rows, peaks, heights, ranks = [], [], [], []
    for row, result in enumerate(results.values()):
        height = 0.8 / max(1, len(result.rank_peak_bytes))
        for index, (rank, peak) in enumerate(result.rank_peak_bytes.items()):
            rows.append(row - 0.4 + height * (index + 0.5))
            peaks.append(peak / 2**20)
            heights.append(0.9 * height)
            ranks.append(rank)
    from bokeh.models import ColumnDataSource

    columns = {"row": rows, "peak": peaks, "height": heights, "rank": ranks}
    plot = _figure_of_kinds([*results], x_axis_label="peak, MiB", tooltips=[("rank", "@rank"), ("MiB", "@peak{0,0.0}")])
    color = COLORS["optimizer"]
    plot.hbar(y="row", right="peak", height="height", color=color, source=ColumnDataSource(data=columns))
    plot.x_range.start = 0
    return plot


def loss_chart(runs: Mapping[str, MeasuredRun], *, over_time: bool) -> "figure":
    """Return the training loss of one run of each kind, over samples or over the time of training."""
    from bokeh.models import NumeralTickFormatter

    label = "seconds of training" if over_time else "samples seen"
    plot = figure_of(
        x_axis_label=label,
        y_axis_label="training loss",
        tooltips=[("", "$name"), (label, "$x{0,0.00}"), ("loss", "$y{0.0000}")],
    )
    for index, (name, run) in enumerate(runs.items()):
        seconds, losses = np.array(run.losses, float).T
        x, y = _thinned(seconds if over_time else np.array(run.samples, float)), _thinned(losses)
        style = {"color": kind_color(index), "line_dash": kind_dash(index), "line_width": 2}
        plot.line(x=x, y=y, name=name, **style)
    if not over_time:
        plot.xaxis.formatter = NumeralTickFormatter(format="0.[00]a")
    return plot


def scaling_chart(counts: Sequence[int], results: Sequence[Result]) -> "figure":
    """Return the speedup over the number of devices, and the ideal one."""
    plot = figure_of(
        x_axis_label="processes", y_axis_label="speedup", tooltips=[("processes", "$x{0}"), ("speedup", "$y{0.00}")]
    )
    ideal = [1, max(counts)]
    plot.line(x=ideal, y=ideal, color=COLORS["other"], line_dash="dashed", line_width=2)
    speedups = [each.speedup for each in results]
    base = results[0].samples_per_second
    plot.line(x=counts, y=speedups, color=COLORS["forward_backward"], line_width=2)
    plot.scatter(x=counts, y=speedups, color=COLORS["forward_backward"], size=8)
    low, high = [each.slowest / base for each in results], [each.fastest / base for each in results]
    plot.segment(x0=counts, x1=counts, y0=low, y1=high, color=COLORS["forward_backward"], line_width=2)
    plot.xaxis.ticker = [*counts]
    plot.y_range.start = 0
    return plot


def kind_color(index: int) -> str:
    """Return the colour of the line of a kind."""
    return _PALETTE[index % len(_PALETTE)]


def kind_dash(index: int) -> str:
    """Return the dashes of the line of a kind."""
    return _DASHES[index % len(_DASHES)]


def _figure_of_kinds(kinds: Sequence[str], **settings: Any) -> "figure":
    """Return a figure with a row for each kind, the first one at the top."""
    height = AROUND + ROW_HEIGHT * max(3, len(kinds)) * 3 // 2
    plot = figure_of(y_range=(len(kinds) - 0.5, -0.5), height=height, **settings)
    plot.yaxis.ticker = [*range(len(kinds))]
    plot.yaxis.major_label_overrides = dict(enumerate(kinds))
    plot.ygrid.visible = False
    plot.xaxis.ticker.desired_num_ticks = 5  # on a phone, more labels run into each other
    return plot


def _thinned(values: np.ndarray) -> np.ndarray:
    """Return values, or the means of at most `_MOST_POINTS` stretches of them."""
    if values.size <= _MOST_POINTS:
        return values
    return np.array([part.mean() for part in np.array_split(values, _MOST_POINTS)])
