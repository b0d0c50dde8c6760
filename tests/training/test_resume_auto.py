"""`--resume auto`: one command that begins a run, and goes on with it when it is given again."""

from pathlib import Path

import pytest

import dure
from dure.errors import SpecInvalid

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"


def train(folder, **settings):
    return dure.train(
        TASK, resume="auto", runs_dir=folder, start="inline", threads=1, quiet=True, **settings
    )  # fmt: skip


def test_resume_auto_when_there_is_no_such_run_then_it_is_begun_and_later_gone_on_with(tmp_path):
    assert train(tmp_path, name="run", epochs=1, seed=3).samples == 97
    assert train(tmp_path, name="run", epochs=2, seed=3).samples == 2 * 97
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert len((tmp_path / "run/rank0.jsonl").read_text().splitlines()) == 4  # 97 samples are two steps of 64


def test_resume_auto_when_the_run_of_that_name_is_another_then_it_is_refused(tmp_path):
    train(tmp_path, name="run", epochs=1, seed=3)
    with pytest.raises(SpecInvalid, match="seed is 4 but the run was begun with 3"):
        train(tmp_path, name="run", epochs=1, seed=4)


def test_resume_auto_when_the_run_has_no_name_then_one_is_asked_for(tmp_path):
    with pytest.raises(SpecInvalid, match="resume is auto but the run has no name: add name="):
        train(tmp_path, epochs=1)
