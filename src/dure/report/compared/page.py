"""Page of a comparison: one HTML file that opens without a network, as the page of a run."""

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.errors import Misuse
from dure.own_files import open_own
from dure.report.charts import COLORS
from dure.report.compared.charts import (
    kind_color,
    kind_dash,
    loss_chart,
    memory_chart,
    parts_chart,
    rates_chart,
    scaling_chart,
)
from dure.report.comparison import MeasuredRun, Result, Row
from dure.report.page import PAINT, check_library, templates
from dure.report.part_labels import PART_LABELS
from dure.report.whole_file import written_whole
from dure.terminal import printable
from dure.units import format_bytes, format_count

if TYPE_CHECKING:
    from bokeh.plotting import figure


def check_page(path: Path) -> None:
    """Refuse, before anything is measured, a page that could not be written.

    Raises:
        EnvironmentLacks: Bokeh is not installed.
        Misuse: The file cannot be written.
    """
    check_library()
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise Misuse(f"{path} cannot be written: give a file in a folder that is there and can be written")


def write_comparison(
    rows: Sequence[Row],
    runs: Mapping[tuple[str, int], Sequence[MeasuredRun]],
    path: Path,
    *,
    title: str,
    where_to_stop: str | None = None,
) -> None:
    """Write the page of a comparison; an existing file is replaced.

    Args:
        rows: Result of `comparison.compare`.
        runs: What it was made from.
        path: Path of the file.
        title: Heading, with the name of the task.
        where_to_stop: Sentence of a comparison of numbers of processes; None for one of strategies.
    """
    from bokeh.embed import components
    from bokeh.resources import Resources

    results = {label(row): row.result for row in rows if row.result is not None}
    firsts = {label(row): runs[row.name, row.num_devices][0] for row in rows if runs.get((row.name, row.num_devices))}
    charts = dict(_charts(results, firsts, rows, is_scaling=where_to_stop is not None))
    script, places = components(charts) if charts else ("", {})
    text = (
        templates()
        .get_template("compared/page.html.jinja")
        .render(
            title=printable(title),
            written=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            num_rounds=max((len(each) for each in runs.values()), default=0),
            where_to_stop=where_to_stop,
            rows=[_cells(row) for row in rows],
            faults=[(label(row), printable(row.fault)) for row in rows if row.fault],
            preserved=[(name, [printable(text) for text in each.not_preserved]) for name, each in results.items()],
            memory=[(name, _memory(each)) for name, each in results.items() if each.rank_peak_bytes],
            parts=[(PART_LABELS[part], color) for part, color in COLORS.items() if part in PART_LABELS],
            lines=[(name, kind_color(index), kind_dash(index)) for index, name in enumerate(firsts)],
            places=places,
            scripts=Resources(mode="inline", components=["bokeh"]).render() if charts else "",
            charts=script,
            paint=PAINT.read_text(encoding="utf-8"),
        )
    )
    with (
        written_whole(path) as new,
        open(new, "x", encoding="utf-8", errors="backslashreplace", opener=open_own) as file,
    ):
        file.write(text)


def label(row: Row) -> str:
    """Return the name of a kind of run, and the number of its devices."""
    return f"{row.name} x {row.num_devices}"


def _charts(
    results: Mapping[str, Result], runs: Mapping[str, MeasuredRun], rows: Sequence[Row], *, is_scaling: bool
) -> "Iterator[tuple[str, figure]]":
    if not results:
        return
    known = [(row.num_devices, row.result) for row in rows if row.result is not None]
    if is_scaling and len(known) > 1:
        counts, each = zip(*known, strict=True)
        yield "scaling", scaling_chart(counts, each)
    yield "rates", rates_chart(results)
    yield "parts", parts_chart(results)
    if any(each.rank_peak_bytes for each in results.values()):
        yield "memory", memory_chart(results)
    yield "loss", loss_chart(runs, over_time=False)
    yield "time", loss_chart(runs, over_time=True)


def _memory(result: Result) -> str:
    return ", ".join(f"rank {rank}: {format_bytes(peak)}" for rank, peak in result.rank_peak_bytes.items())


def _cells(row: Row) -> dict[str, Any]:
    """Return the texts of a row of the table."""
    found = row.result
    if found is None:
        return {"name": label(row), "values": None}
    spread = (found.fastest - found.slowest) / 2 / found.samples_per_second
    losses = ["" if math.isnan(loss) else f"{loss:.4g}" for loss in (found.loss, found.loss_at_equal_time)]
    return {
        "name": label(row),
        "values": [
            f"{format_count(found.samples_per_second)} ± {spread:.0%}",
            f"{found.speedup:.2f}",
            f"{found.efficiency:.0%}",
            f"{found.exposed_fraction:.0%}",
            format_bytes(found.sent_bytes),
            "" if found.peak_bytes is None else format_bytes(found.peak_bytes),
            *losses,
        ],
    }
