"""The process through which ranks speak: prefixes, escapes, cuts and rotates what they print.

It stands between the ranks and the terminal so that neither the supervisor nor another rank ever waits for a rank that
talks much, and so that no rank can write a line that looks like another's: the prefix is put here.
`dure.launch.logs.rank_logs` starts it, by this file's path: nothing of dure is imported here.
"""

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
"""Size from which a log file becomes `<name>.1`, in place of the one before."""

_READ_BYTES = 2**18
_PATIENCE_SECONDS = 2.0
"""Seconds that an unfinished line may wait for its end before it is shown: a progress bar has no end."""
_BAR_SECONDS = 10.0
"""Seconds between two showings of a bar that never stands still, if it cannot be written over."""
_END_SECONDS = 2.0
"""Seconds that ranks and their children, which hold the pipes, have for their last output once the supervisor is gone
or has let go of this process."""
_MOST_LEFT_BYTES = 2**21
"""Most bytes that are read of what is left in a pipe: more than one holds."""
_USUAL_COLUMNS = 80
_REDRAW_SECONDS = 0.5
"""Time between two states of a line where each is kept: a notebook saves all that its cells were sent."""

# colours may pass and what would erase a line is left out, for a line is erased where it is written over; every other
# control character, and what breaks or turns lines in some viewers, is written out
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
    """Return one line as it may be shown: no control characters, not too long, of a progress bar the last state."""
    line = line.rstrip(b"\r").rpartition(b"\r")[2]
    text = _CONTROL.sub(_written_out, line[:LINE_LIMIT_BYTES].decode("utf-8", "backslashreplace"))
    if _COLOUR.search(text):
        text += _NO_COLOUR
    return text + _said_of_cut(len(line) - LINE_LIMIT_BYTES)


def _said_of_cut(num_bytes: int) -> str:
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
    """Cut a cleaned line so that it stays on one row of a terminal: what wraps cannot be written over."""
    pieces = _COLOUR_OR_CHARACTER.findall(line.expandtabs())
    room = columns - 1  # in the last column some terminals wrap already
    if sum(map(_columns_of, pieces)) <= room:
        return "".join(pieces)
    room -= 1  # of the ellipsis
    kept = []
    for piece in pieces:
        room -= _columns_of(piece)
        if room >= 0 or len(piece) > 1:  # a colour that began has to end
            kept.append(piece)
    return "".join(kept) + "…"


def _columns_of(piece: str) -> int:
    """Return how wide a character is, or a colour."""
    if len(piece) > 1 or unicodedata.category(piece) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(piece) in "WF" else 1


@dataclass
class Stream:
    """One rank's stdout or stderr, or both."""

    prefix: str
    console: int | None
    """Descriptor on which it is shown; None if it is not."""
    log: "LogFile"
    has_live_line: bool = False
    """True if an unfinished line is shown at once, to be written over: the console is a terminal or a notebook."""
    can_erase: bool = True
    """True if the rest of a line can be erased; otherwise blanks are written over it."""
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
        """Show what has come, line by line."""
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
        """Show a line that has not ended, unless there is nothing to see: so a progress bar clears its place."""
        if (self.rest or self.dropped) and (line := self._take_rest()).strip():
            self._show([line])

    def take_late(self, now: float) -> None:
        """Show a line that has not ended for long, unless it is shown already."""
        is_due = self.since < now - _PATIENCE_SECONDS or self.unseen_since < now - _BAR_SECONDS
        if is_due and not self.has_live_line:
            self.take_unfinished()

    def _add(self, data: bytes) -> None:
        # of a progress bar only the last state is kept: each is overwritten by what follows its "\r"
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
        text = cleaned(bytes(self.rest)) + _said_of_cut(self.dropped)
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
        """Return what stands before a line that is written over the drawn one."""
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
            _write(self.console, (over + "".join(f"{self.prefix}{line}\n" for line in lines)).encode())


def _columns(console: int) -> int:
    with suppress(OSError):  # the terminal is gone
        return os.get_terminal_size(console).columns or _USUAL_COLUMNS
    return _USUAL_COLUMNS


class LogFile:
    """A rank's log, which may not fill the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def _open(self) -> None:
        # as `dure.own_files.open_own`: as readable as its folder, and no link
        mode = os.stat(self.path.parent).st_mode & 0o666
        self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, mode)
        self.size = os.fstat(self.descriptor).st_size

    def write(self, text: str) -> None:
        """Append; a disk that is full loses what was said, not the run."""
        data = text.encode()
        if self.size + len(data) > ROTATE_BYTES:
            os.close(self.descriptor)
            os.replace(self.path, self.path.with_suffix(f"{self.path.suffix}.1"))
            self._open()
        _write(self.descriptor, data)
        self.size += len(data)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except OSError:  # there is no reader, or the disk is full: the ranks go on
            return


def main() -> None:
    """Pump until all pipes are closed; once the supervisor has let go, no longer than last words take."""
    # a signal to all processes is for the ranks: what they say at their end has to be shown
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    told = json.loads(sys.argv[1])
    supervisor, streams = told["supervisor"], dict[int, Stream]()
    for voice in told["voices"]:
        log = LogFile(Path(voice["log"]))
        for descriptor, console in zip(voice["reading"], voice["consoles"], strict=True):
            live = {name: voice[name] for name in ("has_live_line", "can_erase")}
            streams[descriptor] = Stream(voice["prefix"], console, log, **live)
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
            data = os.read(descriptor, _READ_BYTES)
            if data:
                streams[descriptor].take(data)
            else:
                streams.pop(descriptor).take_unfinished()
                poll.unregister(descriptor)
        if is_asked and not set(ready) - {supervisor}:
            for stream in streams.values():
                stream.take_unfinished()
            is_asked = False
            _write(supervisor, b".")
        for stream in streams.values():
            stream.take_late(time.monotonic())
    for descriptor, stream in streams.items():
        _take_what_is_left(descriptor, stream)


def _is_asked(supervisor: int) -> bool:
    """Return whether the supervisor asks to be told when all is shown; otherwise it has let go of this process."""
    try:
        return bool(os.read(supervisor, 1))
    except ConnectionResetError:  # it did not wait for the answer
        return False


def _take_what_is_left(descriptor: int, stream: Stream) -> None:
    """Show what was said while a paused terminal or a pager held this up, and no more: some child may talk on."""
    os.set_blocking(descriptor, False)
    with suppress(BlockingIOError):
        for _ in range(_MOST_LEFT_BYTES // _READ_BYTES):
            if data := os.read(descriptor, _READ_BYTES):
                stream.take(data)
    stream.take_unfinished()


if __name__ == "__main__":
    main()
