"""`dure` commands as processes that tests can watch, signal and kill."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

SERVER = Path(__file__).with_name("prewarmed_server.py")
PATIENCE_SECONDS = 60.0


def wait_until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
    """Wait for a true value and return it."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(0.005)
    return value


class Prewarmed:
    """A process with torch imported, and the commands that it forks."""

    def __init__(self, *prefix: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._started: queue.Queue[int] = queue.Queue()
        self._codes: dict[int, int] = {}
        threading.Thread(target=self._listen, daemon=True).start()
        self._started.get(timeout=PATIENCE_SECONDS)

    def _listen(self) -> None:
        for line in self.process.stdout:
            answer = json.loads(line)
            if "code" in answer:
                self._codes[answer["pid"]] = answer["code"]
            else:
                self._codes.pop(answer["pid"], None)  # of an earlier command: the kernel gives numbers again
                self._started.put(answer["pid"])

    def start(self, folder: Path, *argv: object, script: Path | None = None, **environment: str) -> "Command":
        """Start `dure argv...`, or `python script argv...`, in `folder`."""
        output = folder / f"output-{time.time_ns()}"
        request = {"cwd": str(folder), "env": environment, "output": str(output), "argv": [str(word) for word in argv]}
        if script is not None:
            request["script"] = str(script)
        self.process.stdin.write(json.dumps(request) + "\n")
        return Command(pid=self._started.get(timeout=PATIENCE_SECONDS), output=output, codes=self._codes)

    def run(self, folder: Path, *argv: object, script: Path | None = None, **environment: str) -> "Command":
        """Start, wait for the end, and see that nothing of it is left."""
        command = self.start(folder, *argv, script=script, **environment)
        command.wait()
        return command

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=10)
        self.process.stdout.close()


@dataclass
class Command:
    """One command, leader of its own session."""

    pid: int
    output: Path
    codes: dict[int, int] = field(repr=False)

    @property
    def out(self) -> str:
        return self._read("out")

    @property
    def err(self) -> str:
        return self._read("err")

    def _read(self, name: str) -> str:
        path = Path(f"{self.output}.{name}")
        return path.read_text() if path.exists() else ""

    @property
    def code(self) -> int | None:
        return self.codes.get(self.pid)

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for the end and return the exit code; nothing of it may be left then."""
        try:
            wait_until(lambda: self.code is not None, f"the end of {self}: {self.err}", seconds)
            # a supervisor that was killed leaves its workers to the kernel, which takes some milliseconds
            wait_until(lambda: not self.processes(), f"the end of its processes {self.processes()}", 1.5)
        finally:
            self.kill_all()
        return self.code

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for a true value while the command runs."""

        def condition_while_running() -> Any:
            has_ended = self.code is not None
            value = condition()
            assert value or not has_ended, f"it ended with {self.code} before {what}: {self.err}"
            return value

        return wait_until(condition_while_running, what)

    def processes(self) -> list[psutil.Process]:
        """Return whatever runs in its session now, orphans too."""
        return list(_in_session(self.pid))

    def ranks_now(self) -> list[int]:
        """Return the pids of the ranks that are there, by rank."""
        try:
            return sorted(child.pid for child in psutil.Process(self.pid).children() if not is_pump(child))
        except psutil.NoSuchProcess:
            raise AssertionError(f"it ended before its ranks were seen: {self.err}") from None

    def ranks(self, count: int) -> list[int]:
        """Wait for the ranks to be there and return their pids by rank."""

        def all_of_them() -> list[int] | None:
            found = self.ranks_now()
            return found if len(found) == count else None

        return wait_until(all_of_them, f"{count} ranks")

    def send(self, number: int) -> None:
        """Signal the supervisor alone."""
        os.kill(self.pid, number)

    def send_to_all(self, number: int) -> None:
        """Signal the whole process group, as a terminal does."""
        os.killpg(self.pid, number)

    def kill_all(self) -> None:
        for process in self.processes():
            process.kill()


def is_pump(process: psutil.Process) -> bool:
    """Return whether it is no rank, but the process that takes the output of quiet ranks once there is some."""
    try:
        return any(word.endswith("log_pump.py") for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False  # it has just ended


def _has_ended(process: psutil.Process) -> bool:
    """Return whether all its threads have ended: until the last one has, its files and their locks are held."""
    return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1


def _in_session(leader: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and not _has_ended(process):
                yield process
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue


@dataclass
class RunFiles:
    """A run's folder as tests read it, while it runs too."""

    path: Path

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self._lines("events") if event["event"] == name]

    def records(self, rank: int) -> list[dict[str, Any]]:
        return self._lines(f"rank{rank}")

    def undone(self) -> list[dict[str, Any]]:
        """Return the records of steps that were done again."""
        return self._lines("undone")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        file = self.path / f"{name}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.path / "summary.json").read_text())

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.path / "checkpoints").glob("samples-*"))

    def wait_for(self, name: str, command: Command) -> None:
        command.wait_for(lambda: self.events(name), f"event {name}")


SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}
MORE_SIGNALS = {signal.SIGHUP: 129, signal.SIGUSR1: 75}
