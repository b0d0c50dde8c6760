"""Tasks from references and back, and the errors where there is none."""

import math
import re
import sys
from typing import Literal

import pytest
import torch

import dure
from dure.errors import TaskInvalid
from dure.training.task.given_task import giving, task_class
from dure.training.task.hooks import check_task_class
from dure.training.task.load_task import load_task_class
from dure.training.task.options import build_task, task_options
from tests.training.session.test_fetch import SmallTask

GOOD = """
import dure, torch
from neighbour import WIDTH

class Good(dure.Task):
    width: int = WIDTH
    def build_model(self): return torch.nn.Linear(1, self.width)
    def train_data(self): return [1.0]
    def build_optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)
    def loss(self, model, batch): return model(batch).mean()

class Lacking(dure.Task):
    def build_model(self): return torch.nn.Linear(1, 1)

class Plain: pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder of task files whose imports are forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "neighbour.py").write_text("WIDTH = 7\n")
    (tmp_path / "tasks_of_this_test.py").write_text(GOOD)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_file_is_loaded_once_with_its_folder_importable(folder):
    reference = f"{folder}/tasks_of_this_test.py:Good"
    cls = load_task_class(reference)
    assert build_task(cls, {}).width == 7
    assert load_task_class(reference) is cls


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("nothing", "'nothing' names no task: write file.py:Class or package.module:Class"),
        ("file.py:", "'file.py:' names no task"),
        (
            "{0}/tasks_of_this_test.py",
            r"is a file, and a task is a class in it: it has Good, Lacking; write {0}/tasks_of_this_test\.py:Class",
        ),
        ("{}/absent.py:Good", r"absent\.py does not exist: give the path of the file that defines the task"),
        ("{}/tasks_of_this_test.py:Goood", "has no class Goood: it has Good, Lacking"),
        ("{}/tasks_of_this_test.py:Plain", "Plain in .* is not a task: derive it from dure.Task"),
        (
            "{}/tasks_of_this_test.py:Lacking",
            r"Lacking lacks build_optimizer\(self, model.*loss\(self.*train_data\(self\).*: add what is missing",
        ),
        ("no_such_package.module:Good", "there is no module no_such_package to import Good from: write file.py:Good"),
        (".module:Good", r"'\.module:Good' names no task: write file\.py:Class or package\.module:Class"),
        ("dure.no_such_module:Good", r"there is no module dure\.no_such_module to import Good from"),
    ],
)
def test_a_reference_that_leads_nowhere_is_said_in_one_sentence(folder, reference, said):
    with pytest.raises(TaskInvalid, match=said.format(folder)):
        load_task_class(reference.format(folder))


def test_load_when_a_file_with_one_task_is_named_without_class_then_the_reference_to_write_is_shown(folder):
    file = folder / "one_task.py"
    file.write_text("import dure\nclass Only(dure.Task): pass\n")
    with pytest.raises(TaskInvalid, match=re.escape(f"it has Only; write {file}:Only")):
        load_task_class(f"{file}")


def test_load_when_the_file_trains_during_its_import_then_it_is_refused_before_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trains.py").write_text("import dure\ndure.train('other.py:Other')\n")
    refused = "dure.train is called while trains.py is imported: put that call under `if __name__ == '__main__':`"
    with pytest.raises(TaskInvalid, match=f"^{re.escape(refused)}"):
        load_task_class("trains.py:Good")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import not_installed_here", "ModuleNotFoundError: No module named 'not_installed_here'"),
        ("x = (1,\n", "SyntaxError"),
        ("raise SystemExit(3)", "start the script itself with `dure run"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def f():\n    return 1 / 0\nf()", "in f\n      return 1 / 0\n.*\n  ZeroDivisionError"),
    ],
)
def test_a_file_that_does_not_import_shows_the_users_own_traceback(folder, text, said):
    (folder / "broken.py").write_text(text)
    with pytest.raises(TaskInvalid, match=r"broken\.py does not import") as caught:
        load_task_class(f"{folder}/broken.py:Good")
    message = str(caught.value)
    assert re.search(said, message, re.DOTALL)
    assert "load_task.py" not in message
    assert "importlib" not in message


def test_a_class_at_the_top_of_a_file_has_a_reference_and_one_in_a_function_only_this_process():
    class Local(SmallTask):
        pass

    with giving(SmallTask) as given:
        assert given.reference.endswith("tests/training/session/test_fetch.py:SmallTask")
        assert not given.is_only_here
    assert load_task_class(given.reference) is SmallTask
    with giving(Local) as given:
        assert given.is_only_here
        assert task_class(given.reference) is Local


class Optioned(SmallTask):
    width: int
    rate: float = 0.1
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    limit: float | None = None


def test_options_are_the_annotated_fields_and_are_converted_to_their_types():
    assert list(task_options(Optioned)) == ["width", "rate", "kind", "flag", "limit"]
    task = build_task(Optioned, {"width": "3", "rate": "Infinity", "flag": "false", "limit": "2"})
    assert (task.width, task.rate, task.kind, task.flag, task.limit) == (3, math.inf, "a", False, 2.0)


def test_all_faults_of_options_are_said_at_once():
    with pytest.raises(TaskInvalid, match="unknown task option 'depth'") as caught:
        build_task(Optioned, {"depth": 2, "rate": "fast", "kind": "c"})
    message = str(caught.value)
    assert "task option width has no value: give --task.width" in message
    assert "task option rate is 'fast'" in message
    assert "task option kind is 'c' but should be 'a' or 'b'" in message
    assert "known: width, rate, kind, flag, limit" in message


def test_a_task_gives_its_options_by_keyword():
    assert Optioned(width=2, flag=True).flag
    with pytest.raises(TypeError, match="width"):
        Optioned()


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
def test_an_option_that_is_no_finite_number_survives_the_record(value, tmp_path):
    summary = dure.train(
        Limited(limit=value), samples=2, global_batch_size=1, runs_dir=tmp_path, start="fork", threads=1, quiet=True
    )
    assert summary.final_loss == pytest.approx(0.0)


class Limited(SmallTask):
    """Task whose loss is zero if its option came through as it was."""

    limit: float = 1.0

    def train_data(self):
        return [[0.0], [0.0]]

    def collate(self, samples):
        return torch.tensor(samples)

    def loss(self, model, batch):
        return model(batch).mean() * 0.0 + (1.0 if math.isfinite(self.limit) else 0.0)


class TakesTooLittle(SmallTask):
    def build_schedule(self, samples):
        return None


def test_a_method_with_other_parameters_is_refused_with_the_right_ones():
    said = (
        r"TakesTooLittle has build_schedule\(self, samples\), but dure calls build_schedule\(self, optimizer, total_sam"
    )
    with pytest.raises(TaskInvalid, match=said):
        check_task_class(TakesTooLittle)


class TakesWhatItGets(SmallTask):
    @staticmethod
    def loss(*args):
        return None

    def metrics(self, model, batch, threshold=0.5):
        return {}


def test_a_method_that_can_be_called_as_dure_calls_it_is_taken_whatever_its_form():
    check_task_class(TakesWhatItGets)
