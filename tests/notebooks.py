"""A real notebook kernel for tests: cells are run as Jupyter does it, and what a person would see is kept."""

import os
import queue
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupyter_client
from jupyter_client.kernelspec import KernelSpec

CELL_SECONDS = 60.0


@dataclass
class Cell:
    """Output of one cell."""

    streams: dict[str, str] = field(default_factory=lambda: {"stdout": "", "stderr": ""})
    error: str = ""
    """Name and message of an exception that the cell did not catch."""
    traceback: str = ""

    @property
    def screen(self) -> list[str]:
        """Return the lines of stderr as a notebook shows them: what a carriage return has written over is gone."""
        lines = []
        for line in self.streams["stderr"].split("\n"):
            shown: list[str] = []
            for state in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).split("\r"):
                shown[: len(state)] = state
            lines.append("".join(shown).rstrip())
        return lines[:-1] if lines and not lines[-1] else lines


class Kernel:
    """One kernel, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manager = jupyter_client.KernelManager()
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._manager._kernel_spec = KernelSpec(argv=command, display_name="test", language="python")
        homes = {"IPYTHONDIR": str(folder / "ipython"), "JUPYTER_RUNTIME_DIR": str(folder / "jupyter")}
        self._manager.start_kernel(cwd=str(folder), env={**os.environ, **homes})
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=CELL_SECONDS)

    def run(self, code: str, *, interrupt_at: str | None = None) -> Cell:
        """Run a cell to its end; with `interrupt_at` the kernel is interrupted once stderr has that text."""
        cell, message = Cell(), self._client.execute(code)
        end = time.monotonic() + CELL_SECONDS
        while time.monotonic() < end:
            try:
                said: Any = self._client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if said["parent_header"].get("msg_id") != message:
                continue
            content = said["content"]
            if said["msg_type"] == "stream":
                cell.streams[content["name"]] += content["text"]
                if interrupt_at is not None and interrupt_at in cell.streams["stderr"]:
                    interrupt_at = None
                    self._manager.interrupt_kernel()
            elif said["msg_type"] == "error":
                cell.error = f"{content['ename']}: {content['evalue']}"
                cell.traceback = "\n".join(content["traceback"])
            elif said["msg_type"] == "status" and content["execution_state"] == "idle":
                return cell
        raise AssertionError(f"the cell did not end within {CELL_SECONDS:g} s: {cell}")

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.context.destroy(linger=0)
