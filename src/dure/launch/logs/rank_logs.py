"""Supervisor's side of the ranks' output: pipes to a process that shows and saves their lines."""

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from dure.launch.logs import log_pump
from dure.own_files import touch
from dure.process.stop_signals import signals_held_back
from dure.terminal import own_descriptor

_PIPE_BYTES = 2**20
"""Capacity requested for each pipe, in bytes: the output of a rank that may wait to be read."""
_RELAY_BYTES = 2**16
_POLL_SECONDS = 0.02
_CATCH_UP_SECONDS = 1.0
"""Seconds that the supervisor holds back its own output for that of ranks: a flooded pipe is never empty."""


@dataclass(frozen=True, kw_only=True)
class Voice:
    """Output destination of one rank."""

    log: Path
    consoles: tuple[int | None, int | None] = (None, None)
    """Descriptors on which its stdout and its stderr are shown, or None. If both are one descriptor, the lines keep
    their order.
    """
    prefix: str = ""
    """Prefix of the lines that are shown."""
    has_live_line: bool = False
    """True if an unfinished line is shown at once, to be overwritten: the consoles are a terminal or a notebook."""
    can_erase: bool = True
    """True if the rest of a line can be erased there; in a notebook it is overwritten with blanks."""


class Relay:
    """Pipe from the process that shows ranks' lines to a Python stream that has no descriptor of its own.

    A notebook's `sys.stderr` is such a stream. The calling process writes to it, between two polls of the ranks.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        self._decoder = getincrementaldecoder("utf-8")("replace")

    @classmethod
    def of_stderr(cls) -> "Relay | None":
        """Return a relay to Python's stderr; None if that is the process's own."""
        return cls(sys.stderr) if own_descriptor(sys.stderr) is None else None

    def pass_on(self) -> None:
        """Write new output to the stream."""
        with suppress(BlockingIOError):
            while data := os.read(self.reading, _RELAY_BYTES):
                with suppress(OSError, ValueError):  # closed meanwhile: the ranks go on
                    self._stream.write(self._decoder.decode(data))
                    self._stream.flush()

    def close(self) -> None:
        """Close the pipe."""
        _close((self.reading, self.writing))


class RankLogs:
    """Logs of a host's ranks; the set of ranks may change from round to round."""

    def __init__(self, voice_of: Callable[[int], Voice], ranks: Iterable[int], relay: Relay | None = None) -> None:
        """Create the pipes of the first round's ranks, which one process reads.

        Args:
            voice_of: Function from a rank to its output destination.
            ranks: Ranks of the first round.
            relay: Console of the destinations with its descriptor; closed with this object.
        """
        first = list(ranks)
        self._voice_of = voice_of
        self._relay = relay
        self._pumps = [_Pump([voice_of(rank) for rank in first])]
        self._descriptors = dict(zip(first, self._pumps[0].descriptors, strict=True))

    def descriptors_of(self, rank: int) -> tuple[int, int]:
        """Return the descriptors for a rank's stdout and stderr."""
        if rank not in self._descriptors:
            self._pumps.append(_Pump([self._voice_of(rank)]))
            (self._descriptors[rank],) = self._pumps[-1].descriptors
        return self._descriptors[rank]

    @property
    def waiting_for(self) -> list[int]:
        """Descriptors on which there may be work: a rank has written something that is not yet shown."""
        relay = [] if self._relay is None else [self._relay.reading]
        return [descriptor for pump in self._pumps for descriptor in pump.waiting_for] + relay

    def start(self) -> None:
        """Start to read before there is output, so that none is lost if the supervisor is killed."""
        for pump in self._pumps:
            pump.start()

    def go_on(self) -> None:
        """Have new output shown; call this whenever there is something to read."""
        for pump in self._pumps:
            pump.start_if_needed()
        self._pass_on()

    def catch_up(self) -> None:
        """Wait briefly until all output is shown, including unfinished lines, so that the next message is below it."""
        for pump in self._pumps:
            pump.ask()
        deadline = time.monotonic() + _CATCH_UP_SECONDS
        patience = _CATCH_UP_SECONDS if self._relay is None else _POLL_SECONDS
        while not all(pump.has_answered(patience) for pump in self._pumps) and time.monotonic() < deadline:
            self._pass_on()
        self._pass_on()

    def leave(self) -> None:
        """Close, in a forked rank, the descriptors of the supervisor and of the other ranks."""
        for pump in self._pumps:
            pump.leave()
        if self._relay is not None:
            self._relay.close()

    def close(self) -> None:
        """Wait until all output is shown and in the logs; no rank may be started afterwards."""
        for pump in self._pumps:
            pump.let_go()
        patience = None if self._relay is None else _POLL_SECONDS
        while not all(pump.has_ended(patience) for pump in self._pumps):
            self._pass_on()
        self._pass_on()
        if self._relay is not None:
            self._relay.close()

    def _pass_on(self) -> None:
        if self._relay is not None:
            self._relay.pass_on()


class _Pump:
    """Pipes of some ranks, and the process that reads them.

    The process is usually started at the first output: most ranks have none, and their start need not wait for it. If
    it is killed, the next output starts another.
    """

    def __init__(self, voices: Sequence[Voice]) -> None:
        pipes = [_pipes(is_one=voice.consoles[0] == voice.consoles[1]) for voice in voices]
        self.descriptors = tuple((out[1], err[1]) for out, err in pipes)
        """Descriptors for each rank's stdout and stderr."""
        self._reading = sorted({end for out, err in pipes for end in (out[0], err[0])})
        self._voices = [
            {
                "log": str(voice.log),
                "reading": (out[0], err[0]),
                "consoles": voice.consoles,
                "prefix": voice.prefix,
                "has_live_line": voice.has_live_line,
                "can_erase": voice.can_erase,
            }
            for voice, (out, err) in zip(voices, pipes, strict=True)
        ]
        self._consoles = {console for voice in voices for console in voice.consoles if console is not None}
        self._process: subprocess.Popen[bytes] | None = None
        self._questions: socket.socket | None = None
        self._is_asked = False
        for voice in voices:
            touch(voice.log)

    @property
    def waiting_for(self) -> list[int]:
        """Read ends of the pipes if no process reads them."""
        return [] if self._process is not None and self._process.poll() is None else self._reading

    def start_if_needed(self) -> None:
        poll = select.poll()
        waiting_for = self.waiting_for
        for descriptor in waiting_for:
            poll.register(descriptor, select.POLLIN)
        if waiting_for and poll.poll(0):
            self.start()

    def start(self) -> None:
        if self._questions is not None:  # those of a process that was killed
            self._questions.close()
        self._questions, theirs = socket.socketpair()
        arguments = {"supervisor": theirs.fileno(), "voices": self._voices}
        # nothing of dure or of its environment is needed, and the start takes half of the time without
        command = [sys.executable, "-I", "-S", log_pump.__file__, json.dumps(arguments)]
        inherited = [*self._reading, theirs.fileno(), *self._consoles]
        with theirs, signals_held_back():
            self._process = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL)

    def ask(self) -> None:
        """Request a reply when all is shown."""
        self.start_if_needed()
        self._is_asked = self._questions is not None
        if self._questions is not None:
            with suppress(OSError):  # it was killed
                self._questions.send(b"?")

    def has_answered(self, seconds: float) -> bool:
        """Wait for the reply, at most `seconds`; return whether there is nothing more to wait for."""
        if self._is_asked and self._questions is not None:
            try:
                self._questions.settimeout(seconds)
                self._questions.recv(1)
            except TimeoutError:
                return False
            except OSError:  # it was killed
                pass
        self._is_asked = False
        return True

    def leave(self) -> None:
        if self._questions is not None:
            self._questions.close()
        _close({*self._reading, *(end for both in self.descriptors for end in both)})

    def let_go(self) -> None:
        """Let the process end once it has shown all.

        Programs that ranks left running hold the pipes: the process reads on for them.
        """
        writing = {end for both in self.descriptors for end in both}
        _close(writing)
        poll = select.poll()
        waiting_for = self.waiting_for
        for descriptor in waiting_for:
            poll.register(descriptor, select.POLLIN)
        events = dict(poll.poll(0))
        if any(events.get(descriptor) != select.POLLHUP for descriptor in waiting_for):  # else all have ended
            self.start()
        self.descriptors = ()
        self.leave()
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)  # if a user has stopped it alone, it would never end

    def has_ended(self, seconds: float | None) -> bool:
        """Wait for the end of the process, at most `seconds`, and return whether it has ended.

        It ends by itself, but not before a paused terminal or a pager has taken all output.
        """
        if self._process is None:
            return True
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None


def _pipes(*, is_one: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Create a pipe for stdout and one for stderr, or one for both."""
    out = os.pipe()
    with suppress(OSError, AttributeError):  # above the user's limit, or not Linux
        fcntl.fcntl(out[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return out, out if is_one else os.pipe()


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
