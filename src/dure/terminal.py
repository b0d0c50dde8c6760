"""Output to the terminal: all of it is written here, or drawn by `dure.styled`, and escaped.

Text from a file, a task or another rank must not clear the terminal, set its title, change the direction of text or
look like a line of dure's own. A house test checks that no other module prints.
"""

import io
import json
import os
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO

_INDENT = "  "
"""Indentation of further lines of a message: only dure's own begin at the left margin."""
_MOST_LINES, _MOST_COLUMNS = 400, 2000
"""Maximum of a message's lines and of the characters of each: a terminal is no place for more, and records have it."""


def printable(text: str, *, kept: str = "\n\t") -> str:
    r"""Return a text with every control character escaped, such as `\x1b`; letters of any script are kept.

    Characters that invisibly reorder or join text (bidirectional controls, zero-width characters), line separators and
    lone surrogates are escaped too.

    Args:
        text: Text of any origin.
        kept: Control characters that are kept.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if _is_harmless(char) or char in kept else _written_out(char) for char in text)


def one_line(text: object) -> str:
    """Return a name, a path or a value for use within a line: line breaks are escaped too."""
    return printable(str(text), kept="")


def message(text: str) -> str:
    """Return a message, shortened if it is very long, with all lines except the first indented."""
    return indented(f"dure: {shortened(text, _MOST_LINES, _MOST_COLUMNS)}")


def shortened(text: str, most_lines: int, most_columns: int) -> str:
    """Return a text without the middle of its lines, and of each line, where there is more than the given maximum."""
    lines = text.split("\n")
    left_out = len(lines) - most_lines
    if left_out > 0:
        half = most_lines // 2
        lines = [*lines[:half], f"… {left_out:,} lines are left out …", *lines[half + left_out :]]
    return "\n".join(_shortened_line(line, most_columns) for line in lines)


def _shortened_line(line: str, most: int) -> str:
    left_out, half = len(line) - most, most // 2
    return (
        line if left_out <= 0 else f"{line[:half]} … {left_out:,} characters are left out … {line[half + left_out :]}"
    )


def indented(text: str) -> str:
    """Return a text with all lines after the first indented, because dure's own begin at the left margin."""
    first, *rest = printable(text).split("\n")
    return "\n".join([first, *(line if not line or line[0].isspace() else f"{_INDENT}{line}" for line in rest)])


def few(items: Sequence[object], most: int = 4) -> str:
    """Return the first items of an enumeration, and the number of further ones."""
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def shell_word(text: object) -> str:
    r"""Return a path or a value as one word of a command that can be pasted into a shell.

    Control characters are escaped in the syntax of shells, `$'a\nb'`: none of them ends the word.
    """
    word = str(text)
    if printable(word, kept="") == word:
        return shlex.quote(word)
    data = word.encode("utf-8", "surrogateescape" if _is_from_system(word) else "replace")
    return "$'" + "".join(chr(byte) if chr(byte).isalnum() and byte < 128 else f"\\x{byte:02x}" for byte in data) + "'"


def _is_from_system(word: str) -> bool:
    try:
        os.fsencode(word)
    except UnicodeEncodeError:
        return False
    return True


def _is_harmless(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"


def _written_out(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# --- writing


def replace_what_no_terminal_has() -> None:
    """Make a terminal that is not UTF-8 show '?' for characters that it lacks, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def print_status(text: str) -> None:
    """Write a message to stderr, if stderr still has a reader: the terminal may be closed."""
    status_writer()(text)


def status_writer() -> Callable[[str], None]:
    """Return a function that writes messages to what is stderr now, even while it is redirected."""
    stderr = sys.stderr

    def write(text: str) -> None:
        with suppress(OSError):
            print(message(text), file=stderr, flush=True)

    return write


def print_traceback(text: str) -> None:
    """Write a traceback, which may contain messages of a task's exceptions, to stderr."""
    with suppress(ValueError):  # the script has closed it
        print(printable(text).rstrip("\n"), file=sys.stderr or sys.__stderr__, flush=True)


def print_text(text: str) -> None:
    """Write lines of a result to stdout."""
    print(printable(text))


def print_at_once(text: str) -> None:
    """Write lines of a result to stdout that its reader gets now, although more will follow."""
    print(printable(text), flush=True)


def print_json(document: Any) -> None:
    """Write one JSON document to stdout. NaN and infinity, which JSON lacks, become null."""
    text = json.dumps(_finite(document), indent=2, default=str)  # ASCII, of which only DEL is not escaped
    print(text.replace("\x7f", "\\u007f"))


def pass_on(text: str, *, is_error: bool) -> None:
    """Write output of a rank on another host; each state of its progress bar is a line."""
    stream = sys.stderr if is_error else sys.stdout
    stream.write(printable(text.replace("\r\n", "\n").replace("\r", "\n")))
    stream.flush()


def print_drawn(drawn: str) -> None:
    """Write the output of `dure.styled.draw` to stdout."""
    sys.stdout.write(drawn)


def end_open_line() -> None:
    """Leave a terminal on a new line."""
    if sys.stderr.isatty():
        print(file=sys.stderr)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


# --- the live line


def has_live_line(stream: TextIO | None = None) -> bool:
    """Return whether a stream's (stderr's) last line can be overwritten: on a terminal, not a dumb one, or a cell."""
    stream = stream or sys.stderr
    return (stream.isatty() and os.environ.get("TERM") != "dumb") or is_notebook(stream)


def is_notebook(stream: TextIO | None = None) -> bool:
    """Return whether a stream (stderr) is shown in a notebook, which supports carriage returns but erases nothing."""
    return any(cls.__module__ == "ipykernel.iostream" for cls in type(stream or sys.stderr).__mro__)


def own_descriptor(stream: TextIO | None) -> int | None:
    """Return the descriptor of standard error; None if Python's stream is a notebook's, or a buffer."""
    if stream is None:
        return 2
    try:
        return 2 if stream.fileno() == 2 else None
    except (OSError, ValueError):
        return None


class LiveLine:
    """Line of a stream that is overwritten until it is closed, among permanent lines."""

    def __init__(self, stream: TextIO | None = None, *, is_relayed: bool = False) -> None:
        """Open no line yet.

        Args:
            stream: Stream of the line; stderr by default.
            is_relayed: Whether the stream is a pipe to a process that shows it in a terminal, truncated to its width.
        """
        self._stream = stream or sys.stderr
        self._is_relayed = is_relayed
        self.is_live = is_relayed or has_live_line(self._stream)
        """True if it can be overwritten; otherwise each state is a permanent line."""
        self.is_in_notebook = is_notebook(self._stream)
        self._has_color = self.is_live and not os.environ.get("NO_COLOR")
        self._erase = "" if self.is_in_notebook else "\x1b[K"
        self._drawn_columns = 0
        """Width of the open line; 0 if there is none."""

    def show(self, line: str, num_colored: int = 0) -> None:
        """Write a state of the line, with its first characters coloured.

        Raises:
            OSError: The stream has no reader.
        """
        line = one_line(line)
        if not self.is_live:
            self._write(f"{line}\n")
            return
        if not self._is_relayed:
            width = shutil.get_terminal_size().columns
            line = line if len(line) < width else line[: width - 2] + "…"
        colored = f"\x1b[36m{line[:num_colored]}\x1b[0m{line[num_colored:]}" if self._has_color else line
        # relayed: after a second "\r" the task's next output replaces the line instead of continuing it
        self._write(f"\r{colored}\r" if self._is_relayed else f"{self._over()}{colored}{self._erase}")
        self._drawn_columns = len(line)

    def print_lines(self, text: str) -> None:
        """Write permanent lines.

        Raises:
            OSError: The stream has no reader.
        """
        self.close()
        self._write(f"{printable(text)}\n")

    def close(self) -> None:
        """Leave the terminal on a new line.

        Raises:
            OSError: The stream has no reader.
        """
        if self._drawn_columns:
            self._write(f"{self._over()}{self._erase}")
            self._drawn_columns = 0

    def _over(self) -> str:
        """Return the characters that move to the start of the open line; in a notebook, also blanks to overwrite it."""
        return "\r" if self._erase else f"\r{' ' * self._drawn_columns}\r"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class LiveScreen:
    """Screen of the terminal on stdout that is drawn again and again; what it showed before comes back at the end."""

    def __init__(self) -> None:
        self._stream = sys.stdout
        self.is_live = has_live_line(self._stream) and not is_notebook(self._stream)
        """True if it can be drawn again; otherwise there is no screen, and lines are printed."""
        self._is_open = False

    def show(self, drawn: str) -> None:
        """Write a screen, as far as there are lines for it.

        Args:
            drawn: Output of `dure.styled.drawn`.

        Raises:
            OSError: The terminal is closed.
        """
        lines = drawn.splitlines()[: max(1, shutil.get_terminal_size().lines - 1)]
        begin = "" if self._is_open else "\x1b[?1049h\x1b[?25l"
        self._is_open = True
        self._stream.write(f"{begin}\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
        self._stream.flush()

    def close(self) -> None:
        """Let the terminal show what it showed before; one that is closed shows nothing."""
        if self._is_open:
            self._is_open = False
            with suppress(OSError):
                self._stream.write("\x1b[?25h\x1b[?1049l")
                self._stream.flush()
