"""Scripts that hang or fail as people's scripts do: the verdict names the rank and the line, and blames nobody else."""

import re
import time
from pathlib import Path

import pytest

from tests.commands import Prewarmed

SCRIPTS = sorted((Path(__file__).parent / "broken").glob("*.py"))
HANG_AFTER_SECONDS = 2
MOST_SECONDS_LATER = 5

pytestmark = [pytest.mark.faults, pytest.mark.alone]


def expected_lines(script: Path) -> dict[int, tuple[list[int], bool]]:
    """By rank: the lines that are marked as its own, and whether it is only one that waits."""
    marks: dict[int, tuple[list[int], bool]] = {}
    for number, text in enumerate(script.read_text().splitlines(), 1):
        if mark := re.search(r"# blamed: ([\d ]+?)( waits)?$", text):
            for rank in mark[1].split():
                lines, _ = marks.get(int(rank), ([], False))
                marks[int(rank)] = ([*lines, number], mark[2] is not None)
    return marks


def told(prewarmed: Prewarmed, script: Path, folder: Path) -> tuple[str, float]:
    """What `dure run` says about a script, and how long it took."""
    began = time.monotonic()
    run = prewarmed.run(folder, "run", "--nproc", "2", "--hang-after", HANG_AFTER_SECONDS, "--on-hang", "stop", script)
    assert run.code == 1, run.err
    lines = [line for line in run.err.splitlines() if not line.startswith("[rank ")]
    return "\n".join(lines), time.monotonic() - began


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_broken_script_when_run_then_the_verdict_names_rank_and_line(
    prewarmed: Prewarmed, script: Path, tmp_path: Path
) -> None:
    text, seconds = told(prewarmed, script, tmp_path)
    for rank, (lines, waits) in expected_lines(script).items():
        line = f"({'|'.join(map(str, lines))})"
        where = rf"rank {rank} [^;\n]*{script.name}:{line} in"
        beside = rf"rank {rank} (failed|was)[^\n]*\n\s*\S*{script.name}:{line} in"
        assert re.search(f"{where}|{beside}", text), text
        if waits:
            assert not re.search(rf"\A[^,\n]*rank {rank} (is|computes|was stopped|failed|has left)", text), text
    if silent := re.search(r"no step has finished for ([\d.]+) s", text):
        assert float(silent[1]) < HANG_AFTER_SECONDS + MOST_SECONDS_LATER
    # imports and processes take their time before the first step, and gloo before it gives up
    assert seconds < HANG_AFTER_SECONDS + MOST_SECONDS_LATER + 10, text
