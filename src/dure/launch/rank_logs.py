"""What ranks speak through, as their supervisor has it: pipes to a process that shows their lines and keeps them."""

import fcntl
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dure.launch import log_pump

_PIPE_BYTES = 2**20
"""That a rank may say before anybody reads it, where the system allows so much."""
_CATCH_UP_SECONDS = 1.0
"""How long the supervisor holds its own words back for those of ranks: one that floods its pipe has no last word."""


@dataclass(frozen=True, kw_only=True)
class Voice:
    """Where goes what a rank says."""

    log: Path
    consoles: tuple[int | None, int | None] = (None, None)
    """The descriptors on which its stdout and its stderr are shown, if they are. Where both go to one place, the lines
    keep their order."""
    prefix: str = ""
    """Of shown lines."""
    has_live_line: bool = False
    """Whether an unfinished line is shown at once, to be written over: the consoles are a terminal."""


class RankLogs:
    """The logs of a host's ranks; which ranks it has may change from round to round."""

    def __init__(self, voice_of: Callable[[int], Voice], ranks: Iterable[int]) -> None:
        """Make the pipes of the first round's ranks, whose lines one process takes.

        Args:
            voice_of: Returns where goes what a rank says.
            ranks: Of the first round.
        """
        first = list(ranks)
        self._voice_of = voice_of
        self._pumps = [_Pump([voice_of(rank) for rank in first])]
        self._descriptors = dict(zip(first, self._pumps[0].descriptors, strict=True))

    def descriptors_of(self, rank: int) -> tuple[int, int]:
        """Return where a rank's stdout and stderr go."""
        if rank not in self._descriptors:
            self._pumps.append(_Pump([self._voice_of(rank)]))
            (self._descriptors[rank],) = self._pumps[-1].descriptors
        return self._descriptors[rank]

    @property
    def waiting_for(self) -> list[int]:
        """Where there is something to read once a rank has said something that nobody reads yet."""
        return [descriptor for pump in self._pumps for descriptor in pump.waiting_for]

    def start(self) -> None:
        """Begin to read before anything is said: then it is not lost should the supervisor be killed."""
        for pump in self._pumps:
            pump.start()

    def start_if_needed(self) -> None:
        """See that what was said is read; to be called whenever there is something to read."""
        for pump in self._pumps:
            pump.start_if_needed()

    def catch_up(self) -> None:
        """Wait a moment until all that was said is shown, unfinished lines too: what is told next comes below."""
        for pump in self._pumps:
            pump.catch_up()

    def leave(self) -> None:
        """In a forked rank, let go of what belongs to the supervisor and to the other ranks."""
        for pump in self._pumps:
            pump.leave()

    def close(self) -> None:
        """Wait until all that was said is shown and in the logs; nobody may start a rank afterwards."""
        for pump in self._pumps:
            pump.close()


class _Pump:
    """The pipes of some ranks, and the process that reads them.

    It is mostly started when something is said: most ranks never say anything, and a start need not wait for it.
    """

    def __init__(self, voices: Sequence[Voice]) -> None:
        pipes = [_pipes(is_one=voice.consoles[0] == voice.consoles[1]) for voice in voices]
        self.descriptors = tuple((out[1], err[1]) for out, err in pipes)
        """Of each rank: where its stdout and its stderr go."""
        self.waiting_for = sorted({end for out, err in pipes for end in (out[0], err[0])})
        """Empty when the process is started."""
        self._told = [
            {
                "log": str(voice.log),
                "reading": (out[0], err[0]),
                "consoles": voice.consoles,
                "prefix": voice.prefix,
                "has_live_line": voice.has_live_line,
            }
            for voice, (out, err) in zip(voices, pipes, strict=True)
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._questions: socket.socket | None = None
        for voice in voices:
            voice.log.touch()

    def start_if_needed(self) -> None:
        poll = select.poll()
        for descriptor in self.waiting_for:
            poll.register(descriptor, select.POLLIN)
        if self.waiting_for and poll.poll(0):
            self.start()

    def start(self) -> None:
        self._questions, theirs = socket.socketpair()
        told = {"supervisor": theirs.fileno(), "voices": self._told}
        # nothing of dure or of its environment is needed, and half of the time is saved without
        command = [sys.executable, "-I", "-S", log_pump.__file__, json.dumps(told)]
        inherited = [*self.waiting_for, theirs.fileno()]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL)
        _close(self.waiting_for)
        self.waiting_for = []

    def catch_up(self) -> None:
        self.start_if_needed()
        if self._questions is None:
            return
        with suppress(OSError):  # it was killed, or did not answer in time
            self._questions.settimeout(_CATCH_UP_SECONDS)
            self._questions.send(b"?")
            self._questions.recv(1)

    def leave(self) -> None:
        if self._questions is not None:
            self._questions.close()
        _close({*self.waiting_for, *(end for both in self.descriptors for end in both)})

    def close(self) -> None:
        self.start_if_needed()
        self.leave()
        if self._process is not None:
            # it ends by itself, though not before a paused terminal or a pager has taken what there is to show
            self._process.wait()


def _pipes(*, is_one: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Make a pipe for stdout and one for stderr, or one for both."""
    out = os.pipe()
    with suppress(OSError, AttributeError):  # beyond what a user may have, or not Linux
        fcntl.fcntl(out[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return out, out if is_one else os.pipe()


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
