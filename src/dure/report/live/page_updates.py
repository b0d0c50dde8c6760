"""Messages by which the pages in browsers follow a run. They are made once, however many pages there are."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dure.records.finding import Finding
from dure.report.charts import COLUMNS, SCALE, Chart
from dure.report.live.live_run import Moment
from dure.report.live.wording import facts, remarks
from dure.report.page import Section, contents, templates

_OF_PAGE = ("status", "head", "facts", "findings", "below")
_OF_SECTION = ("title", "about", "table", "count")
"""Parts of the page, and of each section, by the names of their templates."""


@dataclass(kw_only=True)
class _DrawnChart:
    """Chart as the pages have drawn it."""

    layout: tuple[object, ...]
    version: str
    item: Mapping[str, Any]
    """Document of Bokeh with the chart."""
    columns_id: str
    scale_id: str | None
    numbers: str = field(default="")
    """Last numbers, as encoded events of Bokeh."""


class PageUpdates:
    """State of the pages, and its messages: the whole state for a page that has just been opened, changes for others.

    Text from the run is in HTML of the page's templates, which escape it, and never in a chart.
    """

    def __init__(self) -> None:
        self._start = secrets.token_hex(4)
        self._num_drawn = 0
        self._order: list[str] = []
        self._parts: dict[str, str] = {}
        self._sections: dict[str, str] = {}
        self._charts: dict[str, _DrawnChart] = {}

    def update(self, moment: Moment, findings: Sequence[Finding] | None) -> str:
        """Take over the state of the run, and return the message with what has changed on the pages."""
        shown = page_contents(moment, findings)
        module: Any = templates().get_template("fragments.html.jinja").module
        parts = {name: str(getattr(module, name)(shown)) for name in _OF_PAGE}
        sections: Sequence[Section] = shown["sections"]
        drawn, numbers = [], {}
        for section in sections:
            for name in _OF_SECTION:
                parts[f"{name}-{section.id}"] = str(getattr(module, name)(shown, section))
            chart = self._charts.get(section.id)
            if chart is None or chart.layout != section.chart.layout:
                chart = self._charts[section.id] = self._draw(section.chart)
                self._sections[section.id] = str(module.section(shown, section, ""))
                drawn.append(section.id)
            encoded = _encoded(section.chart, chart)
            if encoded != chart.numbers:
                chart.numbers = numbers[section.id] = encoded
        changed = {name: html for name, html in parts.items() if self._parts.get(name) != html}
        self._parts, self._order = parts, [section.id for section in sections]
        return self._message(changed, drawn, numbers)

    def whole(self) -> str:
        """Return the message with the whole state."""
        numbers = {name: self._charts[name].numbers for name in self._order}
        return self._message(self._parts, self._order, numbers)

    def _draw(self, chart: Chart) -> _DrawnChart:
        from bokeh.embed import json_item

        plot = chart.draw()
        scale = plot.select_one({"name": SCALE})
        self._num_drawn += 1
        return _DrawnChart(
            layout=chart.layout,
            version=f"{self._start}-{self._num_drawn}",
            item=json_item(plot),
            columns_id=plot.select_one({"name": COLUMNS}).id,
            scale_id=None if scale is None else scale.id,
        )

    def _message(self, parts: Mapping[str, str], drawn: Sequence[str], numbers: Mapping[str, str]) -> str:
        from bokeh.core.json_encoder import serialize_json

        charts = {
            name: {
                "version": self._charts[name].version,
                "html": self._sections[name],
                "item": self._charts[name].item,
            }
            for name in drawn
        }
        head: str = serialize_json({"order": self._order, "parts": parts, "charts": charts})
        events = ",".join(f'"{name}":{encoded}' for name, encoded in numbers.items())
        return f'{head[:-1]},"numbers":{{{events}}}}}'


def page_contents(moment: Moment, findings: Sequence[Finding] | None) -> dict[str, Any]:
    """Return the values that the parts of the live page show."""
    shown = contents(moment.records, findings)
    return {
        **shown,
        "facts": [*facts(moment), *shown["facts"]],
        "remarks": [*remarks(moment), *shown["remarks"]],
    }


def _encoded(chart: Chart, drawn: _DrawnChart) -> str:
    """Return the numbers of a chart as events of Bokeh, which set them in a drawn one."""
    from bokeh.core.json_encoder import serialize_json
    from bokeh.core.serialization import Serializer

    values: dict[tuple[str, str], Any] = {(drawn.columns_id, "data"): dict(chart.columns)}
    if drawn.scale_id is not None:
        values[drawn.scale_id, "high"] = chart.scale_end
    serializer = Serializer(deferred=False)
    events = [
        {"kind": "ModelChanged", "model": {"id": model}, "attr": name, "new": serializer.encode(value)}
        for (model, name), value in values.items()
    ]
    encoded: str = serialize_json(events)
    return encoded
