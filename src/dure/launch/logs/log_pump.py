"""Process that relays the output of ranks: it adds prefixes, and escapes, truncates and rotates.

It runs between the ranks and the terminal. Neither the supervisor nor another rank ever waits for a rank with much
output, and no rank can write a line that looks like another's, because the prefix is added here.
`dure.launch.logs.rank_logs` starts it by this file's path: nothing of dure is imported here.
"""

import errno
import json
import os
import re
import select
import signal
import sys
import time
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

LINE_LIMIT_BYTES = 8192
ROTATE_BYTES = 64 * 2**20
"""Size from which a log file is renamed to `<name>.1`, replacing the one before."""

_READ_BYTES = 2**18
_PATIENCE_SECONDS = 2.0
"""Seconds after which an unfinished line is shown: a progress bar has no end."""
_BAR_SECONDS = 10.0
"""Seconds between two states of a continuously moving bar that cannot be overwritten."""
_END_SECONDS = 2.0
"""Seconds that ranks and their children, which hold the pipes, have for their last output once the supervisor is gone
or has released this process.
"""
_MOST_LEFT_BYTES = 2**21
"""Maximum bytes that are read of the rest in a pipe; a pipe holds less."""
_USUAL_COLUMNS = 80
_REDRAW_SECONDS = 0.5
"""Seconds between two states of a line if each is kept: a notebook saves all output of its cells."""

# Colours pass, and sequences that would erase a line are removed, because lines are overwritten here. All other control
# characters, and characters that break or reverse lines in some viewers, are escaped.
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,32}m")
_ERASE = re.compile(r"\x1b\[[0-2]?K")
_CONTROL = re.compile(
    rf"{_COLOUR.pattern}|{_ERASE.pattern}|[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)
_COLOUR_OR_CHARACTER = re.compile(rf"{_COLOUR.pattern}|.", re.DOTALL)
_PLAIN = re.compile(rb"[\t\n\x20-\x7e]*\Z")
_NO_COLOUR = "\x1b[0m"
_ERASE_TO_END = "\x1b[K"


def cleaned(line: bytes) -> str:
    """Return one line for display: without control characters, truncated, and of a progress bar the last state."""
    line = line.rstrip(b"\r").rpartition(b"\r")[2]
    text = _CONTROL.sub(_written_out, line[:LINE_LIMIT_BYTES].decode("utf-8", "backslashreplace"))
    if _COLOUR.search(text):
        text += _NO_COLOUR
    return text + _cut_note(len(line) - LINE_LIMIT_BYTES)


def _cut_note(num_bytes: int) -> str:
    return f" … {num_bytes:,} more bytes" if num_bytes > 0 else ""


def _all_cleaned(lines: Sequence[bytes]) -> list[str]:
    together = b"\n".join(lines)
    if lines and _PLAIN.match(together) and max(map(len, lines)) <= LINE_LIMIT_BYTES:  # nearly always, and much faster
        return together.decode("ascii").split("\n")
    return list(map(cleaned, lines))


def _written_out(match: re.Match[str]) -> str:
    found = match[0]
    if len(found) > 1:
        return "" if _ERASE.match(found) else found
    return f"\\x{ord(found):02x}" if ord(found) < 0x100 else f"\\u{ord(found):04x}"


def fitted(line: str, columns: int) -> str:
    """Truncate a cleaned line to one row of a terminal: a wrapped line cannot be overwritten."""
    pieces = _COLOUR_OR_CHARACTER.findall(line.expandtabs())
    room = columns - 1  # some terminals wrap in the last column
    if sum(map(_columns_of, pieces)) <= room:
        return "".join(pieces)
    room -= 1  # for the ellipsis
    kept = []
    for piece in pieces:
        room -= _columns_of(piece)
        if room >= 0 or len(piece) > 1:  # a colour must be reset
            kept.append(piece)
    return "".join(kept) + "…"


def _columns_of(piece: str) -> int:
    """Return the columns of a character, or of a colour sequence."""
    if len(piece) > 1 or unicodedata.category(piece) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(piece) in "WF" else 1


@dataclass
class Stream:
    """Stdout or stderr of one rank, or both."""

    prefix: str
    console: int | None
    """Descriptor on which it is shown; None if it is not shown."""
    log: "LogFile"
    has_live_line: bool = False
    """True if an unfinished line is shown at once, to be overwritten: the console is a terminal or a notebook."""
    can_erase: bool = True
    """True if the rest of a line can be erased; otherwise it is overwritten with blanks."""
    has_colours: bool = True
    """False if the console is a file or a pipe, which gets text without colours."""
    rest: bytearray = field(default_factory=bytearray)
    """Unfinished line, as far as it will be shown."""
    dropped: int = 0
    """Bytes of that line that will not be shown."""
    since: float = 0.0
    """Monotonic time at which the unfinished line began."""
    unseen_since: float = 0.0
    """Monotonic time at which the first state that was not shown began; 0 if all were shown."""
    drawn: str | None = None
    """Last visible state of the line."""
    drawn_at: float = 0.0

    def take(self, data: bytes) -> None:
        """Show new output, line by line."""
        *whole, last = data.split(b"\n")
        shown = []
        if whole and (self.rest or self.dropped):
            self._add(whole.pop(0))
            shown.append(self._take_rest())
        self._show(shown + _all_cleaned(whole))
        if last:
            self._add(last)
            self._draw()

    def take_unfinished(self) -> None:
        """Show an unfinished line, unless it is empty: so a progress bar clears its place."""
        if (self.rest or self.dropped) and (line := self._take_rest()).strip():
            self._show([line])

    def take_late(self, now: float) -> None:
        """Show a line that has been unfinished for long, unless it is shown already."""
        is_due = self.since < now - _PATIENCE_SECONDS or self.unseen_since < now - _BAR_SECONDS
        if is_due and not self.has_live_line:
            self.take_unfinished()

    def _add(self, data: bytes) -> None:
        # of a progress bar only the last state is kept: each is overwritten by the text after its "\r"
        state_at = data.rstrip(b"\r").rfind(b"\r") + 1
        if state_at or (self.rest.endswith(b"\r") and data.strip(b"\r")):
            data, self.dropped = data[state_at:], 0
            self.rest.clear()
        if not self.rest:
            self.since = time.monotonic()
            self.unseen_since = self.unseen_since or self.since
        room = max(0, LINE_LIMIT_BYTES - len(self.rest))
        self.rest += data[:room]
        self.dropped += max(0, len(data) - room)

    def _take_rest(self) -> str:
        text = cleaned(bytes(self.rest)) + _cut_note(self.dropped)
        self.rest.clear()
        self.dropped, self.unseen_since = 0, 0.0
        return text

    def _draw(self) -> None:
        if not self.has_live_line or self.console is None:
            return
        line = fitted(self.prefix + cleaned(bytes(self.rest)), _columns(self.console))
        if self.can_erase or not line or time.monotonic() >= self.drawn_at + _REDRAW_SECONDS:
            _write(self.console, f"{self._over()}{line}{_ERASE_TO_END if self.can_erase else ''}".encode())
            self.drawn, self.drawn_at = line, time.monotonic()

    def _over(self) -> str:
        """Return the characters before a line that overwrites the drawn one."""
        if self.can_erase or self.drawn is None:
            return "\r"
        columns = sum(map(_columns_of, _COLOUR_OR_CHARACTER.findall(self.drawn)))
        return f"\r{' ' * columns}\r"

    def _show(self, lines: Sequence[str]) -> None:
        if not lines:
            return
        self.log.write("".join(f"{line}\n" for line in lines))
        if self.console is not None:
            over = "" if self.drawn is None else f"\r{_ERASE_TO_END}" if self.can_erase else self._over()
            self.drawn = None
            text = "".join(f"{self.prefix}{line}\n" for line in lines)
            _write(self.console, (over + (text if self.has_colours else _COLOUR.sub("", text))).encode())


def _shows_colours(console: int) -> bool:
    """Return whether a console is a terminal, or the user wants colours elsewhere, such as in the log of a server."""
    return os.isatty(console) or bool(os.environ.get("FORCE_COLOR"))


def _columns(console: int) -> int:
    with suppress(OSError):  # the terminal is gone
        return os.get_terminal_size(console).columns or _USUAL_COLUMNS
    return _USUAL_COLUMNS


class LogFile:
    """Log file of a rank, limited in size."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._open()
        except OSError as error:  # the folder of the logs was removed, or the disk is full
            if error.errno == errno.ELOOP:  # a link is in its place
                raise
            self.descriptor, self.size = os.open(os.devnull, os.O_WRONLY), 0

    def _open(self) -> None:
        # as `dure.own_files.open_own`: with the permissions of its folder, and not through a link
        mode = os.stat(self.path.parent).st_mode & 0o666
        self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, mode)
        self.size = os.fstat(self.descriptor).st_size

    def write(self, text: str) -> None:
        """Append; if the disk is full the output is lost, but the run goes on."""
        data = text.encode()
        if self.size + len(data) > ROTATE_BYTES:
            self._rotate()
        _write(self.descriptor, data)
        self.size += len(data)

    def _rotate(self) -> None:
        full = self.descriptor
        with suppress(OSError):  # the folder was removed, or the disk is full: the old file is used further
            with suppress(FileNotFoundError):  # the log was removed to make room
                os.replace(self.path, self.path.with_suffix(f"{self.path.suffix}.1"))
            self._open()
            os.close(full)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # a process that shares the console has made it so
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
        except OSError:  # no reader, or a full disk: the ranks go on
            return


def main() -> None:
    """Relay output until all pipes are closed; after the supervisor has released this process, only briefly."""
    # a signal to all processes is meant for the ranks, and their last output must be shown
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    arguments = json.loads(sys.argv[1])
    supervisor, streams = arguments["supervisor"], dict[int, Stream]()
    for voice in arguments["voices"]:
        log = LogFile(Path(voice["log"]))
        for descriptor, console in zip(voice["reading"], voice["consoles"], strict=True):
            live = {name: voice[name] for name in ("has_live_line", "can_erase")}
            has_colours = console is not None and (voice["has_live_line"] or _shows_colours(console))
            streams[descriptor] = Stream(voice["prefix"], console, log, **live, has_colours=has_colours)
    poll = select.poll()
    for descriptor in (supervisor, *streams):
        poll.register(descriptor, select.POLLIN)
    is_asked, end = False, float("inf")
    while streams and time.monotonic() < end:
        ready = [descriptor for descriptor, _ in poll.poll(0 if is_asked else _PATIENCE_SECONDS * 500)]
        for descriptor in ready:
            if descriptor == supervisor:
                is_asked = _is_asked(supervisor)
                if not is_asked:
                    end = time.monotonic() + _END_SECONDS
                    poll.unregister(supervisor)
                continue
            _take_ready(descriptor, streams, poll)
        if is_asked and not set(ready) - {supervisor}:
            for stream in streams.values():
                stream.take_unfinished()
            is_asked = False
            _write(supervisor, b".")
        for stream in streams.values():
            stream.take_late(time.monotonic())
    for descriptor, stream in streams.items():
        _take_what_is_left(descriptor, stream)
    if streams and os.fork() == 0:
        consoles = {console for voice in arguments["voices"] for console in voice["consoles"] if console is not None}
        _read_on(streams, consoles)


def _take_ready(descriptor: int, streams: dict[int, Stream], poll: "select.poll") -> None:
    """Show what can be read from a pipe; forget the pipe if it is closed."""
    data = os.read(descriptor, _READ_BYTES)
    if data:
        streams[descriptor].take(data)
    else:
        streams.pop(descriptor).take_unfinished()
        poll.unregister(descriptor)


def _read_on(streams: dict[int, Stream], consoles: set[int]) -> None:
    """Write the later output of programs that ranks left running to the logs only.

    If no process read their pipe, the system would end them at their next line.
    """
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in {0, 1, 2} | consoles:  # who reads the run's own output must see its end
        os.dup2(nowhere, descriptor)
    poll = select.poll()
    for descriptor in streams:
        poll.register(descriptor, select.POLLIN)
    while streams:
        for descriptor, _ in poll.poll():
            _take_ready(descriptor, streams, poll)


def _is_asked(supervisor: int) -> bool:
    """Return whether the supervisor requests a reply when all is shown; otherwise it has released this process."""
    try:
        return bool(os.read(supervisor, 1))
    except ConnectionResetError:  # it did not wait for the reply
        return False


def _take_what_is_left(descriptor: int, stream: Stream) -> None:
    """Show output from while a paused terminal or a pager blocked this process, and no more: a child may write on."""
    os.set_blocking(descriptor, False)
    with suppress(BlockingIOError):
        for _ in range(_MOST_LEFT_BYTES // _READ_BYTES):
            if data := os.read(descriptor, _READ_BYTES):
                stream.take(data)
    stream.take_unfinished()


if __name__ == "__main__":
    main()
