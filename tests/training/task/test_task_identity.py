"""A resume with other code or data is refused, unless it is accepted; then the record says so."""

import json
import math
import re
import textwrap

import numpy as np
import pytest
import torch

from dure.training.task.identity import TaskIdentity

TASK = """
    import torch
    import dure
    from torch import nn

    class Data:
        def __len__(self):
            return 20

        def __getitem__(self, index):
            return torch.full((3,), float(index)), torch.zeros(1)

    class Task(dure.Task):
        def build_model(self):
            return nn.Linear(3, 1)

        def train_data(self):
            return Data()

        def build_optimizer(self, model):
            return torch.optim.SGD(model.parameters(), lr=1e-4)

        def loss(self, model, batch):
            x, y = batch
            return (model(x) - y).square().mean()
"""
CHANGES = {
    "a doubled loss": ("return (model(x)", "return 2 * (model(x)", r"the code of task\.py:Task\.loss changed"),
    "longer data": (
        "return 20",
        "return 20 + 5",
        r"the code of .*Data.__len__ and the training data \(20 samples then, 25",
    ),
    "other samples": (
        "float(index)",
        "float(index) + 1",
        r"Data.__getitem__ and what is in the training data \(sample 0",
    ),
}


@pytest.fixture
def begun(tmp_path, prewarmed):
    """Return a function that writes the task, and one that trains it."""

    def write(source=TASK):
        (tmp_path / "task.py").write_text(textwrap.dedent(source))

    def train(*argv):
        return prewarmed.run(tmp_path, "train", *argv, "--quiet", "--threads", "1")

    write()
    assert train("task.py:Task", "--samples", "10", "--global-batch-size", "5", "--name", "a").code == 0
    return write, train


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_resume_when_the_task_changed_then_is_refused_and_accepted_on_request(change, begun, tmp_path):
    write, train = begun
    old, new, sentence = CHANGES[change]
    write(TASK.replace(old, new))
    refused = train("--resume", "runs/a", "--samples", "20")
    assert refused.code == 2
    assert re.search(sentence, refused.err.replace("\n", " "))
    assert "Traceback" not in refused.err
    accepted = train("--resume", "runs/a", "--samples", "15", "--accept-changes")
    assert accepted.code == 0
    said = json.loads((tmp_path / "runs/a/summary.json").read_text())["not_preserved"]
    assert any(text.startswith("changed at 10 samples, and accepted:") for text in said)
    # what was accepted is what the run is from then on, and the next change is asked about again
    assert train("--resume", "runs/a", "--samples", "20").code == 0
    write()
    assert train("--resume", "runs/a", "--samples", "25").code == 2


def test_resume_when_comments_and_what_the_task_does_not_use_changed_then_goes_on(begun):
    write, train = begun
    write(
        "# a comment\n" + textwrap.dedent(TASK).replace("import dure\n", "import dure\n\n\ndef unused():\n    pass\n")
    )
    assert train("--resume", "runs/a", "--samples", "20").code == 0


def test_samples_that_are_never_twice_the_same_are_not_compared():
    identity = TaskIdentity.of(object(), 3, 0, lambda index: np.random.rand() if index else 1)
    assert list(identity.samples) == ["0"]


def views_of(value, **others):
    return TaskIdentity.of(object(), 1, 0, lambda index: {"x": torch.tensor(value, dtype=torch.float64), **others})


@pytest.mark.parametrize(
    ("before", "now", "is_changed"),
    [
        (views_of([0.1, 0.2]), views_of([0.1, 0.2 + 3e-17]), False),
        (views_of([0.1, math.nan]), views_of([0.1 + 2e-17, math.nan]), False),
        (views_of([0.1, 0.2]), views_of([0.1, 0.2001]), True),
        (views_of([0.1, 0.2]), views_of([0.1, math.nan]), True),
        (views_of([0.1, 0.2], label=1), views_of([0.1, 0.2 + 3e-17], label=2), True),
        (views_of([0.1, 0.2]), views_of([[0.1, 0.2 + 3e-17]]), True),
    ],
)
def test_data_that_are_rounded_differently_are_no_other_data(before, now, is_changed):
    saved = json.loads(json.dumps(before.to_json(), allow_nan=False))
    assert saved["samples"] != now.samples
    assert now.changes_since(saved) == ["what is in the training data (sample 0)"] * is_changed


@pytest.mark.parametrize("view", [None, 7, "a digest", [], ["a", "b"], ["a", "b", 3], ["a", "b", ["c", "d"]], {"a": 1}])
def test_damaged_views_of_samples_are_other_data(view):
    now = views_of([0.1, 0.2])
    assert now.changes_since({"train_samples": 1, "samples": {"0": view}}) == [
        "what is in the training data (sample 0)"
    ]
    assert now.changes_since({"train_samples": 1, "samples": {"0": now.samples["0"][0]}}) == []
