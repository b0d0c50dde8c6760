"""Tables and coloured text, escaped: the only module that uses a console or texts of rich.

rich interprets `[red]` as markup and passes escape sequences on. Here strings are literal, and control characters are
escaped before a table is laid out, so that its columns stay aligned.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.text import Text

from dure.terminal import one_line, print_drawn, printable

PIPE_COLUMNS = 160
"""Columns if stdout is no terminal: wide enough that no run name is broken, so that `grep` finds it."""


def styled(text: object, style: str = "", *, overflow: Literal["fold", "crop"] | None = None) -> Text:
    """Return a name or a sentence in one style; line breaks in it are escaped."""
    return Text(one_line(text), style=style, overflow=overflow)


def styled_lines(text: str, style: str = "") -> Text:
    """Return a text of several lines."""
    return Text(printable(text), style=style, overflow="fold")


def joined(*parts: str | Text | tuple[str, str]) -> Text:
    """Return parts joined into one text, each a string, a string with its style, or a text."""
    pairs = ((part, "") if isinstance(part, str | Text) else part for part in parts)
    texts = (text if isinstance(text, Text) else styled(text, style) for text, style in pairs)
    return Text(overflow="fold").join(texts)


class Hanging:
    """Text that is indented from its second line on if the terminal is too narrow for one line."""

    def __init__(self, text: Text, columns: int = 4) -> None:
        """Lay out the text later, when the width is known.

        Args:
            text: Text of one line.
            columns: Columns of the indentation.
        """
        self._text = text
        self._columns = columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._text.cell_len <= options.max_width:
            yield self._text
            return
        first, *rest = self._text.wrap(console, max(1, options.max_width - self._columns), overflow="fold")
        yield first
        for line in rest:
            yield Padding(line, (0, 0, 0, self._columns))


def draw(result: RenderableType) -> None:
    """Print a result at the width of the terminal; without colours if there is none or `NO_COLOR` is set."""
    print_drawn(drawn(result, None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS))


def drawn(result: RenderableType, width: int | None) -> str:
    """Return the output of `draw` for a width in columns."""
    console = _Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(result)
    # tables pad their last column to its width; trailing spaces only make narrow terminals wrap
    return "".join(f"{line.rstrip()}\n" for line in capture.get().split("\n")[:-1])


class _Console(Console):
    """Console with literal, escaped strings, without any other control character."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(one_line(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        return _escaped(super().render(renderable, options))


def _escaped(segments: Iterable[Segment]) -> Iterator[Segment]:
    for segment in segments:
        yield segment if segment.control else Segment(printable(segment.text, kept="\n"), segment.style)
