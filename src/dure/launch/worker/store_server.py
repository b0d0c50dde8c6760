"""Key-value store of ranks that run a script, served by a separate process.

A script's rank 0 may end before the others, and with it a store that it serves. Also, with a separate store for each
round, the next ranks never read the addresses of dead ones, which is how restarts under torchrun hang.
"""

import os
import signal
import socket
import subprocess
import sys

from dure.process.parent_death import die_with_parent
from dure.process.stop_signals import STOP_SIGNALS, signals_held_back

_TIMEOUT_SECONDS = 1800.0


class StoreServer:
    """Process that serves a store on a bound socket, as long as this object is open."""

    def __init__(self, listener: socket.socket, *, by_fork: bool) -> None:
        """Start the process.

        Args:
            listener: Bound and listening; its address is the store's.
            by_fork: Whether this process may be forked; it has then imported torch.
        """
        self._process: subprocess.Popen[bytes] | None = None
        with signals_held_back():
            self.pid = _forked(listener) if by_fork else self._spawn(listener)

    def _spawn(self, listener: socket.socket) -> int:
        """Start the process with a new interpreter; return its process id."""
        command = [sys.executable, "-m", "dure.launch.worker.store_server", str(listener.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL)
        return self._process.pid

    def close(self) -> None:
        """End the process; its contents are of no use to the next round."""
        os.kill(self.pid, signal.SIGKILL)
        if self._process is None:
            os.waitpid(self.pid, 0)
        else:
            self._process.wait()


def _forked(listener: socket.socket) -> int:
    """Fork the process; return its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            serve(listener.detach(), parent)
        finally:
            os._exit(1)
    return pid


def serve(descriptor: int, parent_pid: int) -> None:
    """Serve until the parent is gone."""
    die_with_parent(parent_pid)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    from datetime import timedelta

    from dure.torchcompat.stores import store_on_socket

    store = store_on_socket(socket.socket(fileno=descriptor), timedelta(seconds=_TIMEOUT_SECONDS))
    while store is not None:
        signal.pause()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
