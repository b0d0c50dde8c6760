"""State of a watched run in words, for the page and the terminal."""

import math
from collections.abc import Iterator

from dure.report.live.live_run import Moment
from dure.report.page import missing_ranks
from dure.units import format_count, format_seconds


def facts(moment: Moment) -> Iterator[tuple[str, str]]:
    """Yield what a run does at the moment, as pairs of name and value."""
    if moment.step is None:
        return
    if moment.status == "running" and not math.isnan(moment.samples_per_second):
        yield "samples/s now", format_count(moment.samples_per_second)
    if moment.status == "running" and moment.seconds_quiet is not None:
        yield "last record", ago(moment.seconds_quiet)


def ago(seconds: float) -> str:
    """Return a time in the past in whole seconds: `3 s ago`, `2:07 ago`."""
    return f"{seconds:.0f} s ago" if seconds < 60 else f"{format_seconds(seconds)} ago"


def remarks(moment: Moment) -> Iterator[str]:
    """Yield sentences on the state of a run."""
    if moment.unread_fraction:
        yield f"Its records are being read: {1 - moment.unread_fraction:.0%} so far."
    elif moment.is_over and moment.status != "unreadable":
        yield "The run has ended."
    elif moment.step is None and not moment.is_over:
        yield "No step is on record yet."


def gaps(moment: Moment) -> Iterator[str]:
    """Yield sentences on what the records lack; a page has them below its charts."""
    series = moment.records.series
    if series.num_left_out:
        yield f"Damaged lines of its records were left out: {series.num_left_out}."
    if missing := missing_ranks(series, moment.records.events):
        yield f"Ranks without records of steps: {missing}."
