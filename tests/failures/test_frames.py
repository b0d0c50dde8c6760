"""Files as the user's code, a library's or dure's own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dure
from dure.failures import frames
from dure.failures.frames import _engine_folders


def test_own_modules_when_python_finds_them_through_a_link_then_they_are_no_foreign_code(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(Path(dure.__file__).parents[1])
    code = (
        "from dure.failures import frames\n"
        "print(frames.is_foreign(frames.users_first.__code__.co_filename),"
        " frames.own_file('dure.failures.frames') == frames.users_first.__code__.co_filename)"
    )
    run = [sys.executable, "-c", code]
    said = subprocess.run(run, env={"PYTHONPATH": str(tmp_path / "link")}, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False", "True"]


def test_torch_when_debian_has_it_then_its_frames_are_no_foreign_code() -> None:
    own, packages = "/home/u/train.py", "/usr/local/lib/python3.12/dist-packages"
    files = [f"{packages}/torch/nn/functional.py", f"{packages}/timm/layers.py", own]
    assert [frames.is_foreign(file) for file in files] == [False, True, True]
    assert frames.users_first(files) == [2]


def test_torch_when_it_was_built_anywhere_then_its_frames_are_no_foreign_code(monkeypatch: pytest.MonkeyPatch) -> None:
    built = "/home/u/pytorch/torch"
    monkeypatch.setattr(frames, "_engine_folders", lambda: (f"{built}/",))
    assert frames.users_first([f"{built}/nn/functional.py", "/home/u/pytorch/torch_task.py"]) == [1]
    assert f"{Path(torch.__file__).parent}/" in _engine_folders()


def test_package_when_pip_put_it_into_a_folder_then_it_is_installed_and_its_neighbours_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timm-1.0.dist-info").mkdir()
    (tmp_path / "timm-1.0.dist-info/RECORD").write_text("timm/__init__.py,sha256=x,1\nsix.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    files = [f"{tmp_path}/{name}" for name in ("timm/layers/norm.py", "six.py", "task.py", "mine/timm.py")]
    assert [frames.is_installed(file) for file in files] == [True, True, False, False]


def test_code_when_its_file_has_no_end_then_its_traceback_does_not_read_it(tmp_path: Path) -> None:
    # a child: what reads such a file reads on until memory is exhausted
    code = """
import resource
from dure.failures.frames import format_error, is_raise, frames_of, traceback_in_user_code
from dure.failures.report import describe_failure

resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

def fail():
    exec(compile("def run():\\n  1 / 0\\nrun()", "/dev/zero", "exec"), {})

try:
    try:
        fail()
    except ZeroDivisionError as error:
        raise ExceptionGroup("many", [error]) from error
except ExceptionGroup as group:
    print(traceback_in_user_code(group.exceptions[0]), is_raise(frames_of(group.exceptions[0])[-1]))
    print(describe_failure(group, 0, None).traceback)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr[-1000:]
    assert "/dev/zero" in shown.stdout
    assert "ZeroDivisionError: division by zero False" in shown.stdout
