"""Digests: equal for equal contents, in another process too, and different otherwise."""

import collections
import enum
import errno
import functools
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dure.training.task.digests import class_digest, code_digest, digest


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


class Point:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x, self.y = x, y


def nested(number):
    inner = {"a": [number, (1, 2.0)], "b": {number}}
    inner["self"] = inner
    return inner


def linear(seed, *, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 3, dtype=dtype), nn.BatchNorm1d(3, dtype=dtype))


def counting(start):
    def count(x, *, step=1):
        return x + start + step

    return count


DIFFERENT = {
    "int and float": (1, 1.0),
    "int and truth": (1, True),
    "text and bytes": ("a", b"a"),
    "list and tuple": ([1], (1,)),
    "order": ([1, 2], [2, 1]),
    "nesting": ([[1], 2], [[1, 2]]),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "type of numbers": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "bfloat16": (torch.ones(2, dtype=torch.bfloat16), torch.full((2,), 2, dtype=torch.bfloat16)),
    "complex": (torch.tensor([1j]), torch.tensor([2j])),
    "gradient": (torch.zeros(2), torch.zeros(2, requires_grad=True)),
    "array": (np.zeros(2), np.ones(2)),
    "objects in an array": (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
    "model": (linear(0), linear(1)),
    "enum": (Level.LOW, Level.HIGH),
    "path": (Path("a"), Path("b")),
    "slots": (Point(1, 2), Point(2, 1)),
    "closure": (counting(1), counting(2)),
    "closure over a tensor": (counting(torch.ones(2)), counting(torch.zeros(2))),
    "partial": (functools.partial(max, 1), functools.partial(max, 2)),
    "deque": (collections.deque([1]), collections.deque([2])),
    "generator": (np.random.default_rng(0), np.random.default_rng(1)),
    "dtype": (torch.float32, torch.float64),
    "class": (nn.Linear, nn.Conv2d),
    "recursion": (nested(1), nested(2)),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_values_when_they_differ_then_their_digests_do(case):
    one, other = DIFFERENT[case]
    assert None not in (digest(one), digest(other))
    assert digest(one) != digest(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nested(3),
        lambda: linear(2),
        lambda: counting(4),
        lambda: {"b", "a", "c"},
        lambda: torch.arange(6).view(2, 3).t(),
        lambda: np.arange(6.0)[::2],
        lambda: Point([1], {2}),
        lambda: collections.Counter("abca"),
        lambda: torch.Generator().manual_seed(3),
    ],
)
def test_values_when_they_are_made_twice_then_their_digests_are_equal(make):
    assert digest(make()) is not None
    assert digest(make()) == digest(make())


@pytest.mark.parametrize("value", [threading.Lock(), (i for i in ()), torch.zeros(2, device="meta")], ids=type)
def test_value_when_its_contents_cannot_be_seen_then_it_has_no_digest(value):
    assert digest(value) is None
    assert digest([1, {"a": value}]) is None
    assert digest(counting(value)) is None


CODE = """
class Base:
    shift = {shift}
    table = {{"a": [1, 2]}}
    def of_base(self):
        return {base}

def helper(x):
    return x + {helper}

RATE = {rate}

class Mine(Base):
    def __init__(self):
        self.x = [i for i in range({inner}) if i in {{1, 2, 3}}]
    @property
    def rate(self):
        return RATE
    @staticmethod
    def plus(x, y={default}):
        return helper(x) + y
"""
FIRST = {"shift": 1, "base": 2, "helper": 3, "rate": 0.5, "inner": 4, "default": 5}


def class_of(folder, **changes):
    path = folder / f"code{len(list(folder.iterdir()))}.py"
    path.write_text(CODE.format(**{**FIRST, **changes}))
    names: dict = {"__name__": path.stem}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names["Mine"], path


@pytest.mark.parametrize("what", FIRST)
def test_class_when_any_of_its_code_is_another_then_its_digest_is_too(what, tmp_path):
    same, other = class_of(tmp_path)[0], class_of(tmp_path)[0]
    changed = class_of(tmp_path, **{what: 77})[0]
    assert class_digest(same) == class_digest(other) != class_digest(changed)


@pytest.mark.slow
def test_class_when_a_method_is_replaced_then_its_digest_is_another_and_in_a_fresh_process_it_is_the_same(tmp_path):
    cls, path = class_of(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from dure.training.task.digests import class_digest\n"
    code += f"from {path.stem} import Mine; print(class_digest(Mine))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    before = class_digest(cls)
    assert done.stdout.strip() == before
    cls.of_base = lambda self: 2
    assert class_digest(cls) != before


def test_class_when_it_has_no_file_then_it_has_a_digest_nevertheless():
    assert code_digest(type("Typed", (), {"__module__": "__main__"})) != code_digest(Point)


def test_class_when_its_file_cannot_be_opened_now_then_it_has_no_other_digest(monkeypatch):
    def refuse(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(OSError, match="Too many open files"):  # else ranks would seem to run different code
        code_digest(Point)
