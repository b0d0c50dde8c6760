"""Ray actor that runs one rank in a separate process."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

READ_LIMIT_BYTES = 2**20
"""Maximum bytes of output that are read at once."""

_TIED = """
import sys
from dure.process.parent_death import die_with_parent
die_with_parent(int(sys.argv[1]))
from dure.cli import main
sys.exit(main(sys.argv[2:]))
"""
"""Program that runs `dure` and ends with its actor: Ray kills actors, but not their child processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Status of a rank."""

    exit_code: int | None
    """Exit code, negative for a signal; None while the rank runs, or while there is more output to read."""
    out: bytes
    err: bytes
    """Bytes written to stderr since the last look."""


class RayRank:
    """Actor that starts a rank and reports its status; no call waits for the rank, so that signals can be delivered.

    The rank is a separate process, because Ray's worker has threads, and data loaders fork.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._outputs: list[IO[bytes]] = []

    def find_meeting_point(self, *, is_one_host: bool) -> tuple[str, int]:
        """Return an address of this host that the other ranks can reach, and a port that is currently free."""
        address = "127.0.0.1"
        if not is_one_host:
            import ray

            address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as listener:
            return address, int(listener.getsockname()[1])

    def start(self, words: Sequence[str], environment: Mapping[str, str], folder: str) -> str | None:
        """Start the rank; return the reason if that fails, or None.

        Args:
            words: Arguments after `dure`. The interpreter is this actor's.
            environment: Variables added to the actor's.
            folder: Working directory.
        """
        writers = [self._new_output(), self._new_output()]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _TIED, str(os.getpid()), *words],
                env={**os.environ, **environment},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=writers[0],
                stderr=writers[1],
            )
        except OSError as error:
            return f"{error.filename or sys.executable}: {error.strerror}"
        finally:
            for writer in writers:
                os.close(writer)
        return None

    def _new_output(self) -> int:
        """Create an unnamed file that is read while it is written; return the descriptor for writing."""
        writer, path = tempfile.mkstemp(prefix="dure-")
        self._outputs.append(open(path, "rb"))  # noqa: SIM115 - read as long as the actor lives
        os.unlink(path)
        return writer

    def look(self) -> Look:
        """Return the status of the rank, and its new output."""
        assert self._process is not None
        exit_code = self._process.poll()
        out, err = (output.read(READ_LIMIT_BYTES) for output in self._outputs)
        has_more = max(len(out), len(err)) == READ_LIMIT_BYTES
        return Look(exit_code=None if has_more else exit_code, out=out, err=err)

    def send(self, number: int) -> None:
        """Send a signal to the rank."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the rank at once."""
        self.send(signal.SIGKILL)
