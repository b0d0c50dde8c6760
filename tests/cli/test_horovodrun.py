"""Flags of horovodrun: what they set, and which are refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dure.cli import horovodrun
from dure.errors import Misuse, SpecInvalid


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return what is run, instead of running it."""
    found: list[object] = []
    monkeypatch.setattr("dure.api.script.run_script", found.append)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return found


def _run(*words: str) -> None:
    _, command = horovodrun.read(["horovodrun", *words])
    command()


def test_flags_when_known_then_set_ranks_and_variables(asked: list[object]) -> None:
    flags = [
        "-np",
        "2",
        "-H",
        "localhost:4",
        "--fusion-threshold-mb=32",
        "--cycle-time-ms",
        "2.5",
        "--gloo",
        "--verbose",
    ]
    _run(*flags, "--timeline-filename", "t.json", "python", "-u", "train.py", "--lr", "0.1")
    (settings,) = asked
    assert (settings.script, settings.arguments) == ("train.py", ("--lr", "0.1"))  # type: ignore[attr-defined]
    assert (settings.nproc, settings.face) == ("2", "horovod")  # type: ignore[attr-defined]
    names = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_TIMELINE")
    assert [os.environ[name] for name in names] == [str(32 * 2**20), "2.5", "t.json"]


def test_ranks_when_not_given_then_are_the_slots_of_the_hostfile(asked: list[object], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# all\nlocalhost slots=3\n")
    _run("--hostfile", str(tmp_path / "hosts"), "--", "-m", "package.train")
    (settings,) = asked
    assert (settings.nproc, settings.is_module, settings.script) == ("3", True, "package.train")  # type: ignore[attr-defined]


@pytest.mark.parametrize("flag", [*horovodrun.REFUSED, "unheard-of"])
def test_flag_when_not_supported_then_is_refused_by_its_name(flag: str, asked: list[object]) -> None:
    with pytest.raises(SpecInvalid, match=f"--{flag} is"):
        _run("-np", "2", f"--{flag}", "python", "train.py")
    assert asked == []


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["-np", "2"], "no script"),
        (["-np", "0", "python", "t.py"], "-np is '0'"),
        (["python", "t.py"], "number of ranks"),
        (["-np", "3", "-H", "localhost:2", "python", "t.py"], "2 slots"),
        (["-np", "2", "-H", "far:2", "python", "t.py"], "other hosts"),
        (["-np", "2", "-H", "far:x", "python", "t.py"], "NAME:SLOTS"),
        (["-np", "2", "--min-np", "3", "python", "t.py"], "--min-np 3"),
        (["-np", "2", "--cycle-time-ms", "fast", "python", "t.py"], "--cycle-time-ms is 'fast'"),
        (["-np", "2", "--hostfile", "/nowhere", "python", "t.py"], "cannot be read"),
        (["-np", "2", "bash", "t.sh"], "Python script"),
        (["-np"], "no value"),
    ],
)
def test_command_when_wrong_then_a_sentence_says_so(words: list[str], what: str, asked: list[object]) -> None:
    with pytest.raises(Misuse, match=what):
        _run(*words)
    assert asked == []


def test_build_when_asked_for_then_lists_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    _run("--check-build")
    out = capsys.readouterr().out
    assert "[X] PyTorch" in out
    assert "[ ] MPI" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("run", "--as", "horovod", "--nproc", "2"), ("horovodrun", "-np", "2", "-H", "localhost:2", "python")]
)
def test_script_for_horovod_when_run_on_two_ranks_then_finds_it(tmp_path: Path, words: tuple[str, ...]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, horovod.torch as hvd\n"
        "hvd.init()\n"
        "total = hvd.allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum)\n"
        "print(int(total), os.environ['HOROVOD_RANK'])\n"
    )
    command = [sys.executable, "-m", "dure", *words, str(script)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert sorted(answer.stdout.splitlines()) == ["[rank 0] 3 0", "[rank 1] 3 1"]
    assert (answer.returncode, answer.stderr) == (0, "")
