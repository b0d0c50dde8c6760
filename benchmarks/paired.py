"""Comparing two things on a noisy machine: alternate them, pair what ran side by side, take medians."""

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One candidate beside the baseline of the same rounds."""

    name: str
    median: float
    """Median in the unit of the measured values."""
    difference: float
    """Median of the paired differences to the baseline."""
    ratio: float
    """Median of the paired ratios to the baseline."""
    ratio_low: float
    """The middle half of the paired ratios begins here,"""
    ratio_high: float
    """and ends here."""


def random_rounds(names: Sequence[str], num_rounds: int, seed: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name): every round holds each name once, in an order of its own."""
    draw = random.Random(seed)
    for number in range(num_rounds):
        for name in draw.sample(list(names), len(names)):
            yield number, name


def _nothing() -> None:
    pass


class Turns:
    """Called by dure after every step: gives the others their turns, and takes everybody's time.

    dure leads, because its loop is not ours to call block by block: after a block of its steps the blocks of the others
    that come before its next turn are run here.
    """

    def __init__(
        self,
        others: Mapping[str, Callable[[int], None]],
        num_rounds: int,
        block: int,
        *,
        before: Callable[[], None] = _nothing,
        after: Callable[[], None] = _nothing,
    ) -> None:
        """Prepare the turns.

        Args:
            others: By name, what runs a number of steps.
            num_rounds: Each gives everybody one turn.
            block: Steps of a turn.
            before: Called when a turn is about to begin: ranks meet, a device becomes idle.
            after: Called when its last step was launched, before the time is taken.
        """
        self._others = others
        self._block = block
        self._before, self._after = before, after
        self._turns = random_rounds([*others, "dure"], num_rounds, seed=0)
        self._left = 0
        self._start: tuple[float, float] | None = None
        self.on_own_turn = _nothing
        """Callback when dure's turn begins."""
        self.seconds: dict[str, list[float]] = {name: [] for name in [*others, "dure"]}
        """Per step, one value per round."""
        self.cores: dict[str, list[float]] = {name: [] for name in [*others, "dure"]}
        """Seconds of the processor per second, in all threads of this process, one value per round."""

    def __call__(self, step: int) -> None:
        self._left -= 1
        if self._left > 0:
            return
        if self._start is not None:
            self._note("dure", self._start)
        for _, name in self._turns:
            self._before()
            if name == "dure":
                self.on_own_turn()
                self._left, self._start = self._block, _now()
                return
            start = _now()
            self._others[name](self._block)
            self._note(name, start)
        self._start, self._left = None, 1 << 60

    def _note(self, name: str, start: tuple[float, float]) -> None:
        self._after()
        seconds, processor_seconds = (end - begin for end, begin in zip(_now(), start, strict=True))
        self.seconds[name].append(seconds / self._block)
        self.cores[name].append(processor_seconds / seconds)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def compare(values: Mapping[str, Sequence[float]], baseline: str) -> list[Comparison]:
    """Compare each candidate's values, one per round, with the baseline's of the same round."""
    answer = []
    for name, mine in values.items():
        pairs = list(zip(mine, values[baseline], strict=True))
        ratios = [value / base for value, base in pairs]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        answer.append(
            Comparison(
                name=name,
                median=statistics.median(mine),
                difference=statistics.median(value - base for value, base in pairs),
                ratio=statistics.median(ratios),
                ratio_low=low,
                ratio_high=high,
            )
        )
    return answer


def surroundings() -> dict[str, Any]:
    """Say in words what was measured with: no names of hosts."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    accelerators = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": " ".join(["python", *(os.path.relpath(a) if a == sys.argv[0] else a for a in sys.argv)]),
        "commit": _commit(),
        "machine": f"{cores} cores, {platform.machine()}, {', '.join(accelerators) or 'no GPU'}",
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _commit() -> str:
    """Return the commit, with a mark when the sources differ from it."""
    git = ["git", "-C", str(HERE)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "../src", "."], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    is_changed = any(not line.endswith((".md", ".json")) for line in changed.stdout.splitlines())
    return commit.stdout.strip() + (" with changes" if is_changed else "")


def write_results(folder: Path, name: str, record: Mapping[str, Any], markdown: str, *, is_shown: bool = True) -> None:
    """Write a result as JSON and as a page, and print the page unless it will change."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(markdown, encoding="utf-8")
    if is_shown:
        print(markdown)


def describe_surroundings(record: Mapping[str, Any]) -> str:
    """Return the lines that head a page of results."""
    return (
        f"`{record['command']}` at commit {record['commit']}; {record['machine']}, load {record['load']} at the start; "
        f"Python {record['python']}, torch {record['torch']}."
    )
