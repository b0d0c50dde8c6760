"""A task that is passed as an object: it is what trains, or the run's record says that it cannot be made again."""

import enum
import functools
import itertools
import json
import os
import threading
import time
from dataclasses import InitVar, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dure
from dure.cli import main
from dure.data import TensorData
from dure.errors import EnvironmentLacks, RunInvalid, SpecInvalid, TaskInvalid
from dure.records.run_dir import RunDir
from dure.training.task.given_task import giving, make_task

ROWS = TensorData(torch.arange(12.0).view(6, 2), torch.zeros(6))


class Small(dure.Task):
    """Task whose loss says what it was made with: `scale` times 1."""

    scale: float = 1.0

    def build_model(self):
        return nn.Linear(2, 1)

    def train_data(self):
        return ROWS

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(self, model, batch):
        return model(batch[0]).mean() * 0.0 + self.scale


class OwnInit(Small):
    def __init__(self, scale=1, *, shift=0.0):
        self.scale = scale + shift
        self.shift = shift


class InheritsInit(OwnInit):
    def describe(self, model):
        return f"scale {self.scale}"


class Twice(Small):
    """Task whose attribute is not what it was given."""

    def __post_init__(self):
        self.scale = 2 * self.scale


class WithRest(Small):
    factor: float = field(default=1.0, init=False)

    def loss(self, model, batch):
        return super().loss(model, batch) * self.factor


class Kind(enum.Enum):
    LOW = 1.0
    HIGH = 5.0


class Rich(Small):
    root: Path = Path()
    kind: Kind = Kind.LOW
    sizes: tuple[int, ...] = (1,)
    layers: list[int] = field(default_factory=list)

    def loss(self, model, batch):
        assert isinstance(self.root, Path)
        assert isinstance(self.sizes, tuple)
        return super().loss(model, batch) * self.kind.value + sum(self.sizes) + sum(self.layers)


class Unwritten(Small):
    dtype: torch.dtype = torch.float32
    function: Any = None

    def loss(self, model, batch):
        assert isinstance(self.dtype, torch.dtype)
        return super().loss(model, batch) + (self.function(1.0) if self.function else 0.0)


class FromInitVar(Small):
    base: InitVar[float] = 1.0

    def __post_init__(self, base):
        self.scale = base


class OfTheTime(Small):
    """Has attributes that no two of it have in common, or whose contents nobody sees."""

    def __post_init__(self):
        self.made_at = time.perf_counter_ns()
        self.lock = threading.Lock()
        self.words = itertools.count()


class Counts(Small):
    """Counts in itself how often it computed a loss."""

    def __post_init__(self):
        self.seen, self.log = 0, []

    def loss(self, model, batch):
        self.seen += 1
        self.log.append(self.seen)
        return super().loss(model, batch) * 0.0 + self.seen


class KeepsNet(Small):
    """Returns a model that it keeps, and changes it."""

    def __post_init__(self):
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)

    def build_model(self):
        return self.net

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()


def changed(task, **attributes):
    for name, value in attributes.items():
        setattr(task, name, value)
    return task


def grown(task, size):
    task.layers.append(size)
    return task


def local_task(scale):
    class Local(Small):
        def loss(self, model, batch):
            return super().loss(model, batch) * 0.0 + scale

    return Local()


MADE_AGAIN = {
    "option": (Small(scale=3), 3.0),
    "own __init__": (OwnInit(3), 3.0),
    "inherited __init__": (InheritsInit(3), 3.0),
    "rich options": (Rich(root=Path("/x"), kind=Kind.HIGH, sizes=(2, 3), scale=2), 15.0),
    "option changed in place": (grown(Rich(), 4), 6.0),
    "option set afterwards": (changed(Small(), scale=7.0), 7.0),
    "volatile attributes": (OfTheTime(scale=2), 2.0),
}
"""Objects that class and options make again, and what a run of them loses."""

ONLY_HERE = {
    "own __init__ that derives": (OwnInit(2, shift=1.0), 3.0, "the task's options do not make its attribute scale"),
    "__post_init__ that derives": (Twice(scale=2), 4.0, "the task's options do not make its attribute scale"),
    "attribute": (changed(Small(), data=torch.ones(2)), 1.0, "the task's options do not make its attribute data"),
    "field without init": (changed(WithRest(), factor=3.0), 3.0, "do not make its attribute factor"),
    "method": (changed(Small(), loss=lambda model, batch: model(batch[0]).mean() * 0 + 9), 9.0, "its attribute loss"),
    "dtype": (Unwritten(dtype=torch.float64), 1.0, "JSON cannot hold the task's option dtype"),
    "function": (Unwritten(function=lambda x: x + 1), 3.0, "JSON cannot hold the task's option function"),
    "partial": (Unwritten(function=functools.partial(max, 4.0)), 5.0, "JSON cannot hold the task's option function"),
    "InitVar": (FromInitVar(base=6.0), 6.0, "do not make its attribute scale"),
    "class of a function": (local_task(8.0), 8.0, r"class local_task\.<locals>\.Local is not at the top level"),
    "replaced class": (type("Small", (Small,), {})(scale=2.0), 2.0, "class Small is not at the top level of a file"),
}


def train(task, folder, **settings):
    fixed = {"start": "fork", "threads": 1, "device": "cpu", "quiet": True, "global_batch_size": 6, "name": "run"}
    return dure.train(task, runs_dir=folder, **{**fixed, **settings})


def described(task):
    with giving(task) as given:
        return given


@pytest.mark.parametrize("case", MADE_AGAIN)
def test_object_when_its_options_make_it_then_the_record_makes_the_same_again(case):
    given = described(MADE_AGAIN[case][0])
    assert given.reasons == ()
    again = described(make_task(given.reference, given.options))
    assert (again.options, again.attributes) == (given.options, {})


@pytest.mark.parametrize("case", ONLY_HERE)
def test_object_when_nothing_else_makes_it_then_the_record_says_why(case):
    task, _, why = ONLY_HERE[case]
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(described(task).why)


@pytest.mark.parametrize("case", {**MADE_AGAIN, **ONLY_HERE})
def test_object_when_it_is_trained_here_then_it_is_what_trains(case, tmp_path):
    task, loss, *_ = {**MADE_AGAIN, **ONLY_HERE}[case]
    assert train(task, tmp_path, start="inline").final_loss == loss


@pytest.mark.parametrize("case", ["attribute", "function", "class of a function"])
def test_object_when_ranks_are_forked_then_it_is_what_trains(case, tmp_path):
    task, loss, why = ONLY_HERE[case]
    assert train(task, tmp_path, start="auto", nproc=2).final_loss == loss
    record = RunDir.open(tmp_path / "run").task_object()
    assert why.replace("\\", "") in record["because"]


def test_object_when_the_record_makes_it_then_nothing_more_is_recorded(tmp_path):
    train(Small(scale=3), tmp_path)
    assert "task_object" not in json.loads((tmp_path / "run/spec.json").read_text())


def test_object_when_ranks_would_make_it_anew_then_it_is_refused(tmp_path):
    said = (
        r"start is spawn, which makes the task again in each rank, but the task's options do not make its attribute d"
    )
    with pytest.raises(SpecInvalid, match=said):
        train(ONLY_HERE["attribute"][0], tmp_path, start="spawn")
    with pytest.raises(SpecInvalid, match="other hosts make the task again from the run's record, but"):
        train(ONLY_HERE["attribute"][0], tmp_path, nnodes=2, nproc=2, node_rank=0, rendezvous="127.0.0.1:29999")
    assert list(tmp_path.iterdir()) == []


def test_object_when_ranks_cannot_be_forked_then_one_trains_here_and_several_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dure.api.local.reason_fork_would_fail", lambda threads: "CUDA is in use in this process")
    task, loss, _ = ONLY_HERE["attribute"]
    assert train(task, tmp_path, start="auto").final_loss == loss
    with pytest.raises(EnvironmentLacks, match=r"ranks have to be forked from this process, because .* but CUDA is in"):
        train(task, tmp_path, start="auto", nproc=2, name="two")
    assert not (tmp_path / "two").exists()


def test_object_when_the_command_line_goes_on_then_it_is_refused_and_python_goes_on_with_the_object(tmp_path, capsys):
    task, loss, _ = ONLY_HERE["attribute"]
    train(task, tmp_path)
    for words in (["train", "--resume"], ["eval"]):
        assert main([*words, str(tmp_path / "run")]) == 2
        said = capsys.readouterr().err
        assert "only the Python program that began" in said
        assert said.count("\n") == 1
    with pytest.raises(RunInvalid, match=r"pass the task there again, as dure\.train\(task, resume="):
        dure.train(resume=tmp_path / "run", epochs=2)
    assert dure.train(task, resume=tmp_path / "run", epochs=2, quiet=True).final_loss == loss


@pytest.mark.parametrize(
    ("began", "goes_on", "said"),
    [
        (
            changed(Small(), data=torch.ones(2)),
            changed(Small(), data=torch.zeros(2)),
            "data of the task that is passed",
        ),
        (
            changed(Small(), data=torch.ones(2)),
            Small(),
            "data of the task that is passed is not what the run was begun",
        ),
        (
            Small(),
            changed(Small(), data=torch.ones(2)),
            "data of the task that is passed is not what the run was begun",
        ),
        (Unwritten(dtype=torch.float64), Unwritten(dtype=torch.float16), "dtype of the task that is passed is not"),
        (Small(scale=2), Small(scale=3), r"task option scale is 3\.0 but the run was begun with 2\.0"),
        (Small(), Twice(), "it is part of what the run is"),
    ],
    ids=["other contents", "attribute is gone", "attribute is new", "other option", "other JSON option", "other class"],
)
def test_resume_when_the_object_is_another_then_it_is_refused(began, goes_on, said, tmp_path):
    train(began, tmp_path)
    with pytest.raises(SpecInvalid, match=said):
        dure.train(goes_on, resume=tmp_path / "run", epochs=2, quiet=True)


def test_evaluation_when_the_record_does_not_suffice_then_takes_the_task(tmp_path):
    class Evaluated(Small):
        def eval_data(self):
            return ROWS

    task = Evaluated(scale=4.0)
    train(task, tmp_path)
    with pytest.raises(RunInvalid, match=r"pass the task there again, as dure\.evaluate\(.*, task=task\)"):
        dure.evaluate(tmp_path / "run", start="fork")
    for given in (task, Evaluated):
        assert dure.evaluate(tmp_path / "run", task=given, start="fork")["metrics"]["loss"]["value"] == 4.0
    with pytest.raises(SpecInvalid, match=r"task option scale is 5\.0 but the run was begun with 4\.0"):
        dure.evaluate(tmp_path / "run", task=Evaluated(scale=5.0), start="fork")


@pytest.mark.parametrize("start", ["inline", "fork"])
def test_object_when_it_trains_twice_then_nothing_of_the_first_run_is_in_the_second(start, tmp_path):
    task, net = Counts(), KeepsNet()
    for name in ("a", "b"):
        assert train(task, tmp_path, name=name, start=start).final_loss == 1.0
        train(net, tmp_path, name=f"net-{name}", start=start)
    assert task.log == []
    losses = [json.loads((tmp_path / f"net-{name}/rank0.jsonl").read_text())["loss_sum"] for name in ("a", "b")]
    assert losses[0] == losses[1]


class ScaledInPlace(Small):
    """Task that changes the data it was given, and reads how many ranks there are."""

    def __init__(self, rows):
        self.rows = rows

    def train_data(self):
        os.environ.get("WORLD_SIZE")
        return TensorData(self.rows.div_(2.0), torch.zeros(len(self.rows)))

    def loss(self, model, batch):
        return model(batch[0]).mean() * 0.0 + batch[0].mean()


def test_object_when_it_changes_its_data_and_reads_the_number_of_ranks_then_its_data_are_built_once(tmp_path):
    summary = train(ScaledInPlace(torch.ones(6, 2)), tmp_path, nproc=2, global_batch_size=2, samples=6)
    assert summary.final_loss == 0.5
    assert not [text for text in summary.not_preserved if "number of ranks" in text]


def test_object_when_ranks_start_again_then_it_is_as_it_was_given(tmp_path):
    task = changed(Small(), calls=[])

    def loss(model, batch):
        task.calls.append(len(batch[0]))
        # on the rank that does not try the loss before training
        if len(task.calls) == 3 and os.environ["RANK"] == "1" and not (tmp_path / "tried").exists():
            (tmp_path / "tried").touch()
            raise OSError("a flaky disk")
        return Small.loss(task, model, batch) * len(task.calls)

    task.loss = loss
    summary = train(task, tmp_path, nproc=2, global_batch_size=2, samples=6)
    assert (summary.restarts, task.calls) == (1, [])


def test_class_when_its_options_are_objects_then_they_arrive_or_are_refused(tmp_path):
    options = {"root": Path("/x"), "kind": Kind.HIGH, "sizes": (2, 3)}
    assert train(Rich, tmp_path, task_options=options).final_loss == 10.0
    said = "task option dtype is torch.float64, which a run's record cannot hold: pass the task itself, as Unwritten"
    with pytest.raises(SpecInvalid, match=said):
        train(Unwritten, tmp_path, task_options={"dtype": torch.float64}, name="other")


def test_options_when_an_object_is_passed_too_then_they_are_refused(tmp_path):
    with pytest.raises(SpecInvalid, match=r"task_options are for a class, .* give it them, as Small\(\.\.\.\)"):
        train(Small(), tmp_path, task_options={"scale": 3.0})


def test_object_when_it_is_no_task_then_it_is_refused():
    with pytest.raises(TaskInvalid, match=r"is no task: pass an object or a class derived from dure.Task"):
        dure.train(nn.Linear(2, 1))


@pytest.mark.slow
def test_class_when_it_was_changed_after_the_import_then_spawned_ranks_refuse_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import dure\nfrom tests.training.task.test_given_task import Small\n"
        "class Mine(Small):\n    shift = 0.0\n    def loss(self, model, batch):\n"
        "        return super().loss(model, batch) + self.shift\n"
    )
    from dure.training.task.load_task import load_task_class

    cls = load_task_class(f"{script}:Mine")
    cls.shift = 1.0
    assert train(cls, tmp_path, name="forked").final_loss == 2.0
    with pytest.raises(dure.WorkerFailed, match=r"Mine is not the same in the process that starts .*: use start=.fork"):
        train(cls, tmp_path, start="spawn", name="spawned")
