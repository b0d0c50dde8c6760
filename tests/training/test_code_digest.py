"""Digests of a task's code: what it can reach counts, nothing else."""

import importlib.util
import sys
import textwrap

import pytest

from dure.training.code_digest import code_digests

TASK = """
    '''A module.'''

    import dure
    import digest_other as other
    from digest_other import scaled

    RATE = 0.1
    dict(a=1)

    def helper(x):
        '''Help.'''
        return x + RATE

    def unused():
        return 1

    class Base(dure.Task):
        def loss(self, model, batch):
            return scaled(helper(model(batch)))

    class Task(Base):
        '''A task.'''
        width: int = 3

        def build_model(self):
            return other.Model(self.width)

        def train_data(self):
            return [1]

        def build_optimizer(self, model):
            return None

    if __name__ == "__main__":
        dure.train(Task(), epochs=3)
"""
OTHER = """
    def scaled(x):
        return 2 * x

    class Model:
        def __init__(self, width):
            self.width = width
"""


@pytest.fixture
def digests_of(tmp_path, monkeypatch):
    """Return a function from the sources of two modules to the digests of the task."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def digests(task=TASK, other=OTHER):
        for name, source in (("digest_other", other), ("digest_task", task)):
            file = tmp_path / f"{name}.py"
            file.write_text(textwrap.dedent(source))
            spec = importlib.util.spec_from_file_location(name, file)
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
        return code_digests(sys.modules["digest_task"].Task)

    return digests


CHANGES = {
    "return scaled(": ("return 2 * scaled(", "digest_task.py:Base.loss"),
    "RATE = 0.1": ("RATE = 0.2", "digest_task.py:RATE"),
    "x + RATE": ("x - RATE", "digest_task.py:helper"),
    "width: int = 3": ("width: int = 4", "digest_task.py:Task"),
}


@pytest.mark.parametrize("old", CHANGES)
def test_digest_when_code_that_the_task_reaches_changed_then_differs_and_names_it(old, digests_of):
    new, name = CHANGES[old]
    before, after = digests_of(), digests_of(TASK.replace(old, new))
    assert [key for key in before if before[key] != after.get(key)] == [name]
    assert before.keys() == after.keys()


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [("2 * x", "3 * x", "digest_other.py:scaled"), ("= width", "= width + 1", "digest_other.py:Model.__init__")],
)
def test_digest_when_code_of_another_file_of_the_users_changed_then_differs(old, new, name, digests_of):
    before, after = digests_of(), digests_of(other=OTHER.replace(old, new))
    assert [key for key in before if before[key] != after[key]] == [name]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("epochs=3", "epochs=30"),
        ("return 1", "return 2"),
        ("'''Help.'''", "'''Do something else.'''"),
        ("'''A task.'''", ""),
        ("x + RATE", "x  +  RATE  # the sum"),
        ("'''A module.'''", ""),
    ],
)
def test_digest_when_something_else_changed_then_is_the_same(old, new, digests_of):
    before, after = digests_of(), digests_of(TASK.replace(old, new))
    assert before == after


def test_digest_when_a_statement_that_defines_nothing_changed_then_differs(digests_of):
    before, after = digests_of(), digests_of(TASK.replace("dict(a=1)", "dict(a=2)"))
    assert before.keys() ^ after.keys() == {f"digest_task.py:`dict(a={number})`" for number in (1, 2)}


def test_digest_of_a_class_without_a_file_is_of_its_code():
    def classes(body):
        names: dict = {"__name__": "__nowhere__"}
        exec(compile(f"class Cell:\n    def loss(self):\n        {body}", "cell 1", "exec"), names)
        names["Cell"].__module__ = "__nowhere__"
        return code_digests(names["Cell"])

    assert classes("return 1") == classes("return 1")
    assert classes("return 1") != classes("return 2")
    assert list(classes("return 1")) == ["Cell"]
