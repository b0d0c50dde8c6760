"""The process through which ranks speak: prefixes, escapes, cuts and rotates what they print.

It stands between the ranks and the terminal so that neither the supervisor nor another rank ever waits for a rank that
talks much, and so that no rank can write a line that looks like another's: the prefix is put here.
"""

import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

LINE_LIMIT_BYTES = 8192
ROTATE_BYTES = 64 * 2**20
"""A log file that has grown so large becomes `<name>.1`, in place of the one before."""

_READ_BYTES = 2**18
_PIPE_BYTES = 2**20
"""That a rank may say before anybody reads it, where the system allows so much."""
_PATIENCE_SECONDS = 2.0
"""How long an unfinished line waits for its end: a progress bar has none."""
_ORPHAN_SECONDS = 2.0
"""What the ranks of a supervisor that was killed get to say their last words in."""
_END_SECONDS = 5.0
"""How long the ranks' own children may go on holding the pipes after the ranks are gone."""

# colours may pass; every other control character, and what breaks or turns lines in some viewers, is written out
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,32}m")
_CONTROL = re.compile(r"\x1b\[[0-9;]{0,32}m|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_PLAIN = re.compile(rb"[\t\n\x20-\x7e]*\Z")
_NO_COLOUR = "\x1b[0m"


def cleaned(line: bytes) -> str:
    """Return one line as it may be shown: no control characters, not too long, of a progress bar the last state."""
    cut = len(line) - LINE_LIMIT_BYTES
    if cut > 0:
        line = line[:LINE_LIMIT_BYTES]
    text = line.decode("utf-8", "backslashreplace").rstrip("\r").rpartition("\r")[2]
    text = _CONTROL.sub(_written_out, text)
    if _COLOUR.search(text):
        text += _NO_COLOUR
    return f"{text} … {cut:,} more bytes" if cut > 0 else text


def _written_out(match: re.Match[str]) -> str:
    found = match[0]
    if len(found) > 1:
        return found
    return f"\\x{ord(found):02x}" if ord(found) < 0x100 else f"\\u{ord(found):04x}"


@dataclass
class Stream:
    """One rank's stdout or stderr."""

    prefix: str
    console: int | None
    """The descriptor that it is shown on, if it is."""
    log: "LogFile"
    rest: bytearray = field(default_factory=bytearray)
    """An unfinished line, as far as it will be shown."""
    dropped: int = 0
    """Bytes of it that will not."""
    since: float = 0.0
    """When it began."""

    def take(self, data: bytes) -> None:
        """Show what has come, line by line."""
        if not self.rest and not self.dropped and data.endswith(b"\n") and _PLAIN.match(data):
            lines = data[:-1].decode("ascii").split("\n")
            if max(map(len, lines)) <= LINE_LIMIT_BYTES:  # nearly always, and ten times faster
                self._show(lines)
                return
        *whole, last = data.split(b"\n")
        shown = []
        for line in whole:
            self._add(line)
            shown.append(self._take_rest())
        self._show(shown)
        if last:
            self._add(last)

    def take_unfinished(self) -> None:
        """Show a line that has not ended."""
        if self.rest or self.dropped:
            self._show([self._take_rest()])

    def _add(self, data: bytes) -> None:
        if not self.rest:
            self.since = time.monotonic()
        if b"\r" in data:  # what a progress bar showed before is overwritten by what it shows now
            ended = data.rstrip(b"\r")
            if b"\r" in ended:
                data, self.dropped = ended.rpartition(b"\r")[2], 0
                self.rest.clear()
        room = max(0, LINE_LIMIT_BYTES - len(self.rest))
        self.rest += data[:room]
        self.dropped += max(0, len(data) - room)

    def _take_rest(self) -> str:
        text = cleaned(bytes(self.rest))
        if self.dropped:
            text += f" … {self.dropped:,} more bytes"
        self.rest.clear()
        self.dropped = 0
        return text

    def _show(self, lines: Sequence[str]) -> None:
        if not lines:
            return
        self.log.write("".join(f"{line}\n" for line in lines))
        if self.console is not None:
            _write(self.console, "".join(f"{self.prefix}{line}\n" for line in lines).encode())


class LogFile:
    """A rank's log, which may not fill the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def _open(self) -> None:
        self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
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
        except OSError:  # nobody reads, or the disk is full: the ranks go on
            return


class LogPump:
    """The supervisor's side of it."""

    def __init__(
        self, log_paths: Sequence[Path], *, with_prefix: bool = False, first_rank: int = 0, is_shown: bool = True
    ) -> None:
        """Make the pipes, and start the process.

        Args:
            log_paths: Of each rank.
            with_prefix: Whether shown lines begin with the rank.
            first_rank: Whose log is the first.
            is_shown: Whether what is said goes to the terminal too. If not, the process is only started when something
                is said: most ranks never say anything, and a start need not wait for it.
        """
        pipes = [_pipes(is_shown=is_shown) for _ in log_paths]
        self.descriptors = tuple((out[1], err[1]) for out, err in pipes)
        """Of each rank: where its stdout and its stderr go."""
        reading = [(out[0], err[0]) for out, err in pipes]
        self.waiting_for = sorted({descriptor for both in reading for descriptor in both})
        """Where there is something to read once a rank has said something; empty when the process is started."""
        self._told = {
            "logs": [str(path) for path in log_paths],
            "reading": reading,
            "prefixes": [f"[rank {first_rank + i}] " if with_prefix else "" for i in range(len(log_paths))],
            "is_shown": is_shown,
            "parent": os.getpid(),
        }
        self._process: subprocess.Popen[bytes] | None = None
        for path in log_paths:
            path.touch()
        if is_shown:
            self._start()

    def _start(self) -> None:
        # nothing of dure or of its environment is needed, and half of the time is saved without
        command = [sys.executable, "-I", "-S", __file__, json.dumps(self._told)]
        self._process = subprocess.Popen(command, pass_fds=self.waiting_for, stdin=subprocess.DEVNULL)
        _close(self.waiting_for)
        self.waiting_for = []

    def start_if_needed(self) -> None:
        """Start the process if something was said; to be called whenever there is something to read."""
        poll = select.poll()
        for descriptor in self.waiting_for:
            poll.register(descriptor, select.POLLIN)
        if self.waiting_for and poll.poll(0):
            self._start()

    def leave(self) -> None:
        """In a forked rank, let go of what belongs to the supervisor and to the other ranks."""
        _close({*self.waiting_for, *(descriptor for both in self.descriptors for descriptor in both)})

    def close(self) -> None:
        """Wait until everything that was said is shown; nobody may start a rank afterwards."""
        self.start_if_needed()
        _close({descriptor for both in self.descriptors for descriptor in both})
        if self._process is None:
            _close(self.waiting_for)
            return
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()


class QuietLogs:
    """The logs of ranks that are not shown, by rank: which ones a host has may change from round to round."""

    def __init__(self, log_path: Callable[[int], Path], ranks: Iterable[int]) -> None:
        """Make the pipes of some ranks, whose lines one process takes.

        Args:
            log_path: Returns the file of a rank.
            ranks: Of the first round.
        """
        first = list(ranks)
        self._log_path = log_path
        self._pumps = [LogPump([log_path(rank) for rank in first], is_shown=False)]
        self._descriptors = dict(zip(first, self._pumps[0].descriptors, strict=True))

    def descriptors_of(self, rank: int) -> tuple[int, int]:
        """Return where a rank's stdout and stderr go."""
        if rank not in self._descriptors:
            self._pumps.append(LogPump([self._log_path(rank)], is_shown=False))
            (self._descriptors[rank],) = self._pumps[-1].descriptors
        return self._descriptors[rank]

    @property
    def waiting_for(self) -> list[int]:
        """Where there is something to read once a rank has said something that nobody reads yet."""
        return [descriptor for pump in self._pumps for descriptor in pump.waiting_for]

    def start_if_needed(self) -> None:
        """See that what was said is read; to be called whenever there is something to read."""
        for pump in self._pumps:
            pump.start_if_needed()

    def leave(self) -> None:
        """In a forked rank, let go of what belongs to the supervisor and to the other ranks."""
        for pump in self._pumps:
            pump.leave()

    def close(self) -> None:
        """Wait until everything that was said is in the logs; nobody may start a rank afterwards."""
        for pump in self._pumps:
            pump.close()


def _pipes(*, is_shown: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Make one pipe for stdout and one for stderr; where both go to the log alone, one for both keeps their order."""
    out = os.pipe()
    with suppress(OSError, AttributeError):  # beyond what a user may have, or not Linux
        fcntl.fcntl(out[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return out, os.pipe() if is_shown else out


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def main() -> None:
    """Pump until all pipes are closed, or the supervisor is gone: what its ranks have started may hold them open."""
    told = json.loads(sys.argv[1])
    # a signal to all processes of the terminal is for the ranks: what they say at their end has to be shown
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    is_ending = False

    def end(*_: object) -> None:
        nonlocal is_ending
        is_ending = True

    signal.signal(signal.SIGTERM, end)
    streams: dict[int, Stream] = {}
    for (out, err), path, prefix in zip(told["reading"], told["logs"], told["prefixes"], strict=True):
        log = LogFile(Path(path))
        consoles = (1, 2) if told["is_shown"] else (None, None)
        streams[out], streams[err] = Stream(prefix, consoles[0], log), Stream(prefix, consoles[1], log)
    poll = select.poll()
    for descriptor in streams:
        poll.register(descriptor, select.POLLIN)
    last_seen = time.monotonic()
    while streams and not is_ending and time.monotonic() - last_seen < _ORPHAN_SECONDS:
        if os.getppid() == told["parent"]:
            last_seen = time.monotonic()
        for descriptor, _ in poll.poll(_PATIENCE_SECONDS * 500):
            data = os.read(descriptor, _READ_BYTES)
            if data:
                streams[descriptor].take(data)
            else:
                streams.pop(descriptor).take_unfinished()
                poll.unregister(descriptor)
        late = time.monotonic() - _PATIENCE_SECONDS
        for stream in streams.values():
            if stream.rest and stream.since < late:
                stream.take_unfinished()
    for stream in streams.values():
        stream.take_unfinished()


if __name__ == "__main__":
    main()
