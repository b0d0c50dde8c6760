"""Comparing two things on a noisy machine: alternate them, pair what ran side by side, take medians."""

import json
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One candidate beside the baseline of the same rounds."""

    name: str
    median: float
    """In the unit of the measured values."""
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


def write_results(folder: Path, name: str, record: Mapping[str, Any], markdown: str) -> None:
    """Write a result as JSON and as a page, and print the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(markdown, encoding="utf-8")
    print(markdown)


def describe_surroundings(record: Mapping[str, Any]) -> str:
    """Return the lines that head a page of results."""
    return (
        f"`{record['command']}` at commit {record['commit']}; {record['machine']}; Python {record['python']}, "
        f"torch {record['torch']}."
    )
