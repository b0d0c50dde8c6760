"""Profile of a few steps of one rank by torch.profiler, for a trace of all ranks."""

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dure.own_files import make_folder, open_own
from dure.records.rank_profiles import PROFILES, facts_path, operators_path
from dure.terminal import printable
from dure.torchcompat.profilers import initialise_profiler, is_profiling, observe_profilers

_WARM_UP = 3
"""Steps before the first one of the profile: they allocate, choose algorithms and build buckets."""
_MOST_SECONDS = 60.0
"""Seconds after which a profile ends with the step, because every operation takes memory until then."""
_MOST_BYTES = 64 * 2**20
"""Bytes of the compressed operations of a rank above which they are left out."""
_FOREIGN = "torch.profiler was used by the program itself, so the trace has steps and no operators"


class StepProfile:
    """Profile of `num_steps` steps after the first few; it computes nothing, and reads nothing of the model."""

    def __init__(self, folder: Path, rank: int, num_steps: int, say: Callable[[str], None]) -> None:
        """Prepare the profile; `begin_step` starts and ends it.

        Args:
            folder: Folder of the run.
            rank: This rank.
            num_steps: Number of steps.
            say: Called once with a sentence if there are no operators.
        """
        self._folder, self._rank, self._num_steps, self._say = folder, rank, num_steps, say
        self._count = 0
        self._profiler: torch.profiler.profile | None = None
        self._step: contextlib.AbstractContextManager[Any] | None = None
        self._steps: list[int] = []
        self._begun_at = 0.0
        self._is_own = False
        self._is_done = False
        with contextlib.suppress(Exception):  # if it cannot begin, the first step of the profile says why
            initialise_profiler()
        observe_profilers(self._yield_to_other)

    def begin_step(self, number: int) -> None:
        """Note that a step begins, before it computes anything."""
        if self._is_done:
            return
        self._count += 1
        if self._count <= _WARM_UP:
            return
        self._end_slice()
        is_long = self._profiler is not None and time.monotonic() - self._begun_at > _MOST_SECONDS
        if len(self._steps) == self._num_steps or is_long:
            self.close()
            return
        if self._profiler is None:
            self._start()
        if self._profiler is not None:
            self._steps.append(number)
            self._step = torch.profiler.record_function(f"step {number}")
            self._step.__enter__()

    def _start(self) -> None:
        if is_profiling():
            self._yield_to_other()
            return
        self._is_own = True
        try:
            profiler = torch.profiler.profile(activities=torch.profiler.supported_activities(), acc_events=True)
            profiler.start()
            self._profiler, self._begun_at = profiler, time.monotonic()
        except Exception as error:  # a driver without a profiler, or one that is in use
            self._give_up(f"torch.profiler did not start ({printable(str(error)):.200}), so the trace has no operators")
        finally:
            self._is_own = False

    def _yield_to_other(self) -> None:
        """Leave torch's profiler to the program, before one of its own begins."""
        if self._is_own or self._is_done:
            return
        if self._profiler is not None:
            self._end_slice()
            with contextlib.suppress(Exception):
                self._profiler.stop()
            self._profiler = None
        self._give_up(_FOREIGN)

    def _give_up(self, fault: str) -> None:
        self._is_done = True
        self._write_facts(fault)
        self._say(fault)

    def _end_slice(self) -> None:
        if self._step is not None:
            step, self._step = self._step, None
            step.__exit__(None, None, None)

    def close(self) -> None:
        """End the profile if it is under way, and write it."""
        profiler, self._profiler = self._profiler, None
        if profiler is None or self._is_done:
            return
        self._is_done = self._is_own = True
        fault = None
        try:
            self._end_slice()
            profiler.stop()
            self._write_operators(profiler)
        except Exception as error:  # a full disk, say: the run is worth more than its trace
            fault = f"the operators could not be written ({printable(str(error)):.200})"
        finally:
            self._is_own = False
        self._write_facts(fault)
        if fault is not None:
            self._say(fault)

    def _write_operators(self, profiler: "torch.profiler.profile") -> None:
        path = operators_path(self._folder, self._rank)
        make_folder(path.parent, exist_ok=True)
        new = path.with_name(f"writing-{path.name}")
        try:
            new.unlink(missing_ok=True)
            os.close(open_own(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            profiler.export_chrome_trace(str(new))
            if new.stat().st_size > _MOST_BYTES:
                raise OSError(f"they are {new.stat().st_size:,} bytes: ask for fewer steps")
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)

    def _write_facts(self, fault: str | None) -> None:
        facts = {
            "rank": self._rank,
            "host": platform.node(),
            "process": os.getpid(),
            "steps": self._steps,
            "fault": fault,
        }
        with contextlib.suppress(OSError):
            make_folder(self._folder / PROFILES, exist_ok=True)
            with open(facts_path(self._folder, self._rank), "w", encoding="utf-8", opener=open_own) as file:
                json.dump(facts, file)
