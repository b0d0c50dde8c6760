"""Options of a task: which there are, how text and JSON become their values, and errors of making the task."""

import enum
import math
import typing
from dataclasses import InitVar, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch

import dure
from dure.cli import main
from dure.errors import TaskInvalid
from dure.training.task.options import build_task, options_of, task_options
from tests.training.session.test_session import Small

if TYPE_CHECKING:
    from decimal import Decimal


class Level(enum.Enum):
    LOW = "low"


class OwnInit(Small):
    depth: int = 2

    def __init__(self, width, *, rate: float = 0.1, size=1, deep=False, extra=None):
        self.width, self.rate, self.size, self.deep, self.extra = width, rate, size, deep, extra


class Child(OwnInit):
    """Has the `__init__` of its base, not one made of its fields."""

    more: int = 3


class HandsOn(Small):
    width: int = 3

    def __init__(self, **options: Any):
        self.seen = dict(options)
        self.width = options.get("width", 3)


class OverBase(Child):
    def __init__(self, own: int = 1, **options: Any):
        super().__init__(**options)
        self.own = own


class Everything(Small):
    kind: Literal["a", "b"] = "a"
    level: Level = Level.LOW
    path: Path = Path("x")
    pair: tuple[int, str] = (1, "a")
    table: dict[int, float] = field(default_factory=dict)
    limit: float | None = None
    base: InitVar[int] = 3
    rest: list[float] = field(default_factory=list)
    hidden: int = field(default=7, init=False)

    def __post_init__(self, base):
        self.twice = 2 * base


class Unresolved(Small):
    price: "Decimal | None" = None
    dtype: torch.dtype = torch.float32


class Adding(dure.Task):
    """A mix-in without an `__init__`, of which one would be made."""

    shown: int = 1


class Written:
    """A mix-in that is no task and writes an `__init__`."""

    def __init__(self, *, size: int = 2) -> None:
        self.size = size


@pytest.mark.parametrize(
    ("bases", "options", "name", "value"),
    [((Adding, OwnInit), {"width": 3}, "width", 3), ((Written, dure.Task), {"size": 5}, "size", 5)],
    ids=["task without before one with", "no task before the task"],
)
def test_init_that_a_base_wrote_is_not_hidden_by_one_that_would_be_made(bases, options, name, value):
    cls = type("Mixed", bases, {})
    cls.__abstractmethods__ = frozenset()
    assert getattr(cls(**options), name) == value
    assert cls._has_own_init


def test_options_when_a_class_has_its_own_init_then_are_its_keywords_with_their_types():
    options = task_options(OwnInit)
    assert list(options) == ["width", "rate", "size", "deep", "extra"]
    assert [options[name].is_required for name in options] == [True, False, False, False, False]
    made = build_task(OwnInit, {"width": "7", "rate": "2", "size": "3", "deep": "true", "extra": "x"})
    assert (made.width, made.rate, made.size, made.deep, made.extra) == ("7", 2.0, 3, True, "x")


def test_init_when_a_base_wrote_it_then_a_subclass_has_it_too():
    assert list(task_options(Child)) == list(task_options(OwnInit))
    assert build_task(Child, {"width": 1}).rate == 0.1
    assert list(task_options(OverBase)) == ["own", *task_options(OwnInit)]
    assert build_task(OverBase, {"own": "4", "width": 1}).own == 4


def test_options_when_json_holds_them_then_come_back_as_they_were():
    task = Everything(kind="b", path=Path("/y"), pair=(2, "b"), table={1: 0.5}, limit=math.inf, rest=[1, 2.5])
    options, others = options_of(task)
    assert others == ()
    assert set(options) >= {"kind", "level", "path", "pair", "table", "limit", "rest"}
    again = build_task(Everything, options)
    for name in ("kind", "level", "path", "pair", "table", "limit", "rest"):
        assert getattr(again, name) == getattr(task, name), name
    assert isinstance(again.path, Path)
    assert "hidden" not in options


@pytest.mark.parametrize("value", [object(), {1, "a"}, lambda: 1, torch.ones(2), [(1, 2)]], ids=type)
def test_option_when_json_would_make_something_else_of_it_then_it_is_left_out(value):
    class Holds(Small):
        value: typing.Any = None

    assert options_of(Holds(value=value)) == ({}, ("value",))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"dtype": "float16"},
            "dtype is 'float16' but its type dtype cannot be made from text or JSON: declare it as s",
        ),
        (
            {"price": "1"},
            r"price is '1' but its type .*Decimal.* cannot be resolved: import or define it where the class",
        ),
        ({"prize": "1"}, "unknown task option 'prize': did you mean price"),
    ],
)
def test_option_when_its_type_cannot_be_made_of_text_then_one_sentence_says_so(options, said):
    with pytest.raises(TaskInvalid, match=said) as caught:
        build_task(Unresolved, options)
    assert "\n" not in str(caught.value)
    assert build_task(Unresolved, {}).dtype == torch.float32


FAULTY = """
import dataclasses
from tests.training.session.test_session import Small

class Init(Small):
    def __init__(self):
        raise ValueError("of init")

class Post(Small):
    def __post_init__(self):
        raise ValueError("of post")

class Exits(Small):
    def __post_init__(self):
        raise SystemExit(3)

class Factory(Small):
    sizes: list = dataclasses.field(default_factory=lambda: [][3])

class Position(Small):
    def __init__(self, width, /):
        pass
"""


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("Init", ['    raise ValueError("of init")', "ValueError: of init"]),
        ("Post", ['    raise ValueError("of post")', "ValueError: of post"]),
        ("Exits", ["    raise SystemExit(3)", "SystemExit: 3"]),
        ("Factory", ["default_factory=lambda: [][3]", "IndexError"]),
        ("Position", ["let its __init__ take them so", "TypeError: Position.__init__() missing"]),
    ],
)
def test_init_when_it_fails_then_the_tasks_own_lines_are_shown_and_no_others(name, lines, tmp_path, capsys):
    (tmp_path / "faulty.py").write_text(FAULTY)
    assert main(["train", f"{tmp_path / 'faulty.py'}:{name}", "--runs-dir", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"dure: {name} cannot be made")
    for line in lines:
        assert line in said
    assert "src/dure" not in said
    assert "<string>" not in said
