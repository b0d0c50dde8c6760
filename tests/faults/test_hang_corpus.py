"""Scripts and tasks that hang, and the same where they are only slow: verdicts are true, nobody slow is ended.

Each says in comments who is to blame for the hang (`# culprits:`), where each rank is then (`# at:`), and where the
slow ones are in the healthy twin (`# slow:`), unless it is the same line, and where the others then are (`# then:`).
Limits are a fifth of those that users have: whoever is slow for five seconds here is so for 25 there.
"""

import json
import re
from pathlib import Path

import pytest

from tests.commands import Command, Prewarmed, wait_until
from tests.faults.test_broken_scripts import told_lines

FOLDER = Path(__file__).parent / "hangs"
SCRIPTS = sorted(FOLDER.glob("*.py"))
TASKS = sorted(path for path in (FOLDER / "tasks").glob("*.py") if path.stem != "base")
SCALED = Path(__file__).with_name("scaled_dure.py")
REPRESENTATIVE = {
    "recv_ring",
    "broadcast_src",
    "all_gather_against_step",
    "order_of_groups",
    "native_sleep",
    "metrics_gather",
}
"""Cases that stand for all others if time is short."""
WITHOUT_LINE = {"stopped_rank"}

pytestmark = pytest.mark.alone


def cases() -> list[object]:
    marks = {
        path: pytest.mark.faults if path.stem in REPRESENTATIVE else pytest.mark.corpus for path in (*SCRIPTS, *TASKS)
    }
    return [
        pytest.param(path, is_slow, id=f"{path.stem}-{'slow' if is_slow else 'hangs'}", marks=marks[path])
        for path in marks
        for is_slow in (False, True)
    ]


def marked(path: Path, word: str) -> dict[int, set[int]]:
    """Return the lines of each rank that are marked with a word."""
    lines: dict[int, set[int]] = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        for rank in text.partition(f"# {word}: ")[2].partition("#")[0].split():
            lines.setdefault(int(rank), set()).add(number)
    return lines


def culprits(path: Path) -> list[int]:
    return [int(rank) for rank in re.search(r"^# culprits:(.*)$", path.read_text(), re.M)[1].split()]


def start(prewarmed: Prewarmed, path: Path, folder: Path, *words: object, is_slow: bool) -> Command:
    if path in TASKS:
        said = ("--nproc", 2, "--name", "run", "--epochs", 2, "--global-batch-size", 2)
        words = ("--strategy", "ddp", "--backend", "gloo", *words)
        slow = ["--task.is-slow"] if is_slow else []
        return prewarmed.start(folder, "train", f"{path}:Hangs", *said, *words, *slow, script=SCALED)
    slow = ["slow"] if is_slow else []
    said = ("--nproc", 3, "--name", "run", "--threads", 1)
    return prewarmed.start(folder, "run", *said, *words, path, *slow, script=SCALED)


@pytest.mark.parametrize(("path", "is_slow"), cases())
def test_corpus_when_run_then_verdicts_are_true_and_who_is_slow_goes_on(
    prewarmed: Prewarmed, path: Path, is_slow: bool, tmp_path: Path
) -> None:
    if is_slow:
        run = start(prewarmed, path, tmp_path, "--on-hang", "stop", is_slow=True)
        assert run.wait() == 0, run.err
    else:
        run = start(prewarmed, path, tmp_path, "--on-hang", "wait", is_slow=False)
        run.wait_for(lambda: verdicts(tmp_path), "the verdict")
        wait_until(lambda: "has finished for" in run.err, "its words")
        run.kill_all()
        assert verdicts(tmp_path)[0]["culprits"] == culprits(path), run.err
    for verdict in verdicts(tmp_path):
        check(verdict, path, is_slow=is_slow)


def verdicts(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("runs/run/logs/hang-*.json"))]


def check(verdict: dict[str, object], path: Path, *, is_slow: bool) -> None:
    """See that each rank is where the verdict says, and none is blamed that others do not wait for."""
    text = verdict["text"]
    told, at, slow = told_lines(text, path), marked(path, "at"), marked(path, "slow")
    lines = at
    if is_slow:
        then = marked(path, "then")
        lines = {rank: set().union(*(one.get(rank, set()) for one in (at, slow, then))) for rank in range(3)}
    if not is_slow and path.stem not in WITHOUT_LINE:
        assert at.keys() <= told.keys(), text
    if is_slow:
        assert set(verdict["culprits"]) <= set(slow or at), text
        assert not verdict["is_certain"], text
    assert all(numbers <= lines.get(rank, set()) for rank, numbers in told.items()), text
