"""Tests of the table of trackers."""

import sys

import pytest

from dure.errors import SpecInvalid
from dure.spec import RunSpec
from dure.tracking.tracker import check_packages


def test_check_packages_when_one_is_missing_then_a_sentence_names_the_extra(monkeypatch):
    monkeypatch.setattr("dure.tracking.tracker.find_spec", lambda name: None)
    with pytest.raises(SpecInvalid, match=r"log is wandb, which needs its package: pip install 'dure\[wandb\]'"):
        check_packages(["wandb"])


def test_check_packages_when_a_folder_has_its_name_then_it_does_not_count(tmp_path, monkeypatch):
    (tmp_path / "wandb_of_nobody").mkdir()
    monkeypatch.setitem(sys.modules, "wandb_of_nobody", None)
    monkeypatch.delitem(sys.modules, "wandb_of_nobody")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("dure.tracking.tracker.PACKAGES", {"wandb": "wandb_of_nobody"})
    with pytest.raises(SpecInvalid, match="needs its package"):
        check_packages(["wandb"])


@pytest.mark.parametrize(
    ("log", "tensorboard", "names"),
    [
        (None, False, ()),
        ("mlflow", False, ("mlflow",)),
        ("mlflow, wandb,mlflow", False, ("mlflow", "wandb")),
        (["wandb", "tensorboard"], True, ("wandb", "tensorboard")),
        (None, True, ("tensorboard",)),
    ],
)
def test_trackers_when_named_in_any_way_then_each_is_there_once(log, tensorboard, names):
    assert RunSpec(task="-:-", log=log, tensorboard=tensorboard).trackers == names


@pytest.mark.parametrize("log", ["", "comet", "mlflow,", "mlflow wandb"])
def test_log_when_a_tracker_is_unknown_then_it_is_refused(log):
    with pytest.raises(ValueError, match="mlflow, wandb, tensorboard"):
        RunSpec(task="-:-", log=log)
