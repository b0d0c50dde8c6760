"""Digests of a task's code: what it can reach counts, nothing else."""

import importlib.util
import sys
import textwrap

import pytest

from dure.training.task.code_digest import code_digests

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


def test_digest_when_a_module_of_a_folder_of_pip_changed_then_is_the_same(digests_of, tmp_path):
    (tmp_path / "other-1.0.dist-info").mkdir()
    (tmp_path / "other-1.0.dist-info/RECORD").write_text("digest_other.py,sha256=x,1\n")
    found = digests_of()
    assert found == digests_of(other=OTHER.replace("2 * x", "3 * x"))
    assert {name.partition(":")[0] for name in found} == {"digest_task.py"}


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


REACHED = {
    "import in a function": ("from digest_other import f; return f()", "def f(): return {}"),
    "import of a module in a function": ("import digest_other; return digest_other.f()", "def f(): return {}"),
    "import of everything": ("return starred()", "def starred(): return {}"),
    "import that may fail": ("return optional()", "def optional(): return {}"),
    "statement of another file": ("return C", "C = {{}}\nC.update(a={})"),
    "loop of another file": ("return C", "C = {{}}\nfor name in ['a']:\n    C[name] = {}"),
    "branch of another file": ("return C", "if True:\n    def C(): return {}"),
    "statements that begin alike": ("return C", "C = {{}}\nif True:\n    C['a'] = {}\nif True:\n    C['b'] = 2"),
    "name defined twice": ("return C", "C = [{}]\nC += [1]"),
    "side effect of an import": ("return 1", "import torch\ntorch.manual_seed({})"),
}


@pytest.mark.parametrize("case", REACHED)
def test_digest_when_code_changed_that_is_reached_by_detours_then_differs(case, digests_of):
    body, other = REACHED[case]
    task = f"""
    import dure
    from digest_other import *
    try:
        from digest_other import optional
    except ImportError:
        pass

    class Task(dure.Task):
        def build_model(self):
            {body}

        train_data = build_optimizer = build_model
    """
    assert digests_of(task, other.format(1)) == digests_of(task, other.format(1))
    assert digests_of(task, other.format(1)) != digests_of(task, other.format(3))


def test_digest_of_files_with_one_name_and_of_modules_not_imported_yet(tmp_path, digests_of):
    for folder, value in (("one", 1), ("two", 2)):
        (tmp_path / f"digest_{folder}").mkdir()
        (tmp_path / f"digest_{folder}/net.py").write_text(f"def f(): return {value}")
    task = """
    import dure

    class Task(dure.Task):
        def build_model(self):
            from digest_one.net import f
            import digest_two.net
            return f() + digest_two.net.f()

        train_data = build_optimizer = build_model
    """
    seen = [digests_of(task)]
    for folder in ("one", "two"):
        (tmp_path / f"digest_{folder}/net.py").write_text("def f(): return 3")
        seen.append(digests_of(task))
    assert len({tuple(each.items()) for each in seen}) == 3


def test_digest_when_modules_import_each_other_then_comes_to_an_end(tmp_path, digests_of):
    (tmp_path / "digest_ring.py").write_text("from digest_ring2 import *\nfrom digest_ring2 import f")
    (tmp_path / "digest_ring2.py").write_text("from digest_ring import *\nfrom digest_ring import f")
    task = """
    import dure

    class Task(dure.Task):
        def build_model(self):
            from digest_ring import f
            return f() + unknown()

        train_data = build_optimizer = build_model
    """
    assert list(digests_of(task))


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
