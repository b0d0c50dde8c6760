"""Files as the user's code, a library's or dure's own."""

import subprocess
import sys
from pathlib import Path

import dure


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
