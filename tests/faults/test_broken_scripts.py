"""Scripts that hang or fail as people's scripts do: the verdict names the rank and the line, and blames nobody else."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.commands import Prewarmed

SCRIPTS = Path(__file__).parent / "broken"
HANG_AFTER_SECONDS = 2
MOST_SECONDS_LATER = 5

CULPRITS = {
    "absent": {3: [1]},
    "dead_loader": {2: [1]},
    "debugger": {2: [1]},
    "debugger_waits": {2: [1]},
    "early_break": {3: [1]},
    "endless_loop": {2: [1]},
    "lock": {3: [1]},
    "mismatched_dtypes": {2: [0, 1]},
    "mismatched_order": {2: [0, 1], 3: [0]},
    "mismatched_shapes": {2: [0, 1]},
    "native_code": {2: [1]},
    "rank_0_only_collective": {3: [0]},
    "save_with_barrier": {2: [0, 1]},
    "stopped": {3: [1]},
    "swallowed_exception": {3: [1]},
}
"""Ranks that are blamed, by script and number of ranks. Of two ranks that contradict each other, either may be right.
"""

WITHOUT_LINE = {
    # nothing runs in it that could tell its line; it has told its step, and is no collective behind the others there
    "stopped": r"in step 3, after collective #(\d+)\n.*\n  rank 1 was stopped from outside .*, in step 3, "
    r"after collective #\1$",
    # it has left, and has no line any more
    "swallowed_exception": r"^dure: rank 1 ended with exit code 0, and the others lost it",
}

pytestmark = [pytest.mark.faults, pytest.mark.alone]


def marked_lines(script: Path, num_ranks: int) -> dict[int, set[int]]:
    """Return the lines in which each rank is when the verdict is made, as marked in the script."""
    lines: dict[int, set[int]] = {}
    for number, text in enumerate(script.read_text().splitlines(), 1):
        for rank in text.partition("# at: ")[2].split():
            lines.setdefault(int(rank), set()).add(number)
    return {rank: numbers for rank, numbers in lines.items() if rank < num_ranks}


def told_lines(text: str, script: Path) -> dict[int, set[int]]:
    """Return the lines in which each rank is according to the verdict."""
    at = rf"[^\n]*?{script.name}:(\d+) in"
    told = re.findall(rf"^  ranks? ([\d, ]*\d) {at}", text, re.M)
    told += re.findall(rf"^dure: rank (\d+) (?:[^\n]*\n  (?!rank))?{at}", text, re.M)
    lines: dict[int, set[int]] = {}
    for ranks, number in told:
        for rank in ranks.split(", "):
            lines.setdefault(int(rank), set()).add(int(number))
    return lines


def blamed(text: str, run: Path) -> list[int]:
    hangs = sorted(run.glob("logs/hang-*.json"))
    if hangs:
        (hang,) = hangs
        return json.loads(hang.read_text())["culprits"]
    ranks = re.findall(r"^dure: rank (\d+) ", text, re.M)
    if "by an abort in native code" in text:  # gloo ends whom it wants: the verdict shows all, and blames nobody alone
        ranks += re.findall(r"^  rank (\d+) was in", text, re.M)
    return sorted(map(int, ranks))


def test_scripts_then_all_have_their_culprits() -> None:
    assert sorted(script.stem for script in SCRIPTS.glob("*.py")) == sorted(CULPRITS)


@pytest.mark.parametrize(
    ("name", "num_ranks"), [(name, num_ranks) for name, culprits in CULPRITS.items() for num_ranks in culprits]
)
def test_broken_script_when_run_then_the_verdict_names_rank_and_line_in_time(
    prewarmed: Prewarmed, name: str, num_ranks: int, tmp_path: Path
) -> None:
    script = SCRIPTS / f"{name}.py"
    words = ("--nproc", num_ranks, "--threads", 1, "--hang-after", HANG_AFTER_SECONDS, "--on-hang", "stop")
    began = time.monotonic()
    run = prewarmed.start(tmp_path, "run", "--name", "run", *words, script)
    run.wait_for(lambda: re.search(r"^dure: .*\n", run.err, re.M), "the verdict")
    # the last heartbeat came later than this clock began
    assert time.monotonic() - began < HANG_AFTER_SECONDS + MOST_SECONDS_LATER
    assert run.wait() == 1
    text = "\n".join(line for line in run.err.splitlines() if not line.startswith("[rank "))
    assert blamed(text, tmp_path / "runs" / "run") == CULPRITS[name][num_ranks], text
    marked, told = marked_lines(script, num_ranks), told_lines(text, script)
    assert told.keys() == marked.keys(), text
    assert all(told[rank] <= marked[rank] for rank in marked), text
    assert re.search(WITHOUT_LINE.get(name, ""), text, re.M), text
