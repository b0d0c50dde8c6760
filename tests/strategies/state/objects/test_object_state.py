"""State of plain objects: seen when it changes, and put back."""

import argparse
import functools
import importlib
import itertools
import logging
import multiprocessing
import os
import queue
import random
import sys
import threading
import types
from array import array
from collections import defaultdict, deque
from contextvars import ContextVar

import numpy as np
import pytest
import torch
from torch import nn

from dure.strategies.state.objects.namespaces import is_users
from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.objects.state_places import comparable
from dure.strategies.state.objects.used_globals import used_globals


class Inner:
    def __init__(self):
        self.count = 1
        self.last = deque([1, 2], maxlen=3)


def test_what_the_compiler_keeps_is_no_state():
    weights = torch.ones(2)
    compiled = torch.compile(lambda x: x * weights, backend="eager")
    model = torch.compile(nn.Linear(2, 2), backend="eager")
    state = ObjectState({"function": compiled, "model": model})
    model(compiled(torch.ones(2)))
    assert state.changed() == {}
    assert state.hidden == []
    weights += 1
    assert list(state.changed()) == ["function().weights"]


class Slotted:
    __slots__ = ("__dict__", "__hidden", "count")

    def __init__(self):
        self.count = self.__hidden = self.other = 0

    def hide(self):
        self.__hidden += 1

    def __getattr__(self, name):
        raise RuntimeError(name)


class Holder:
    """One attribute of each kind that state is kept in."""

    def __init__(self):
        self.count = 0
        self.inner = Inner()
        self.items = [1, {"x": 2}]
        self.tensor = torch.zeros(3)
        self.array = np.arange(3)
        self.table = defaultdict(list)
        self.names = {"a"}
        self.not_a_number = float("nan")
        self.slotted = Slotted()
        self.queue = queue.Queue()
        self.arguments = argparse.Namespace(step=0)
        self.bytes = bytearray(b"abc")
        self.numbers = array("d", [1.0])
        self.variable = ContextVar("variable", default=0)
        self.phase = self.first
        self.expanded = torch.zeros(1).expand(4)
        self.conj = torch.zeros(2, dtype=torch.complex64).conj()
        self.long = [0] * 2000

    def first(self): ...

    def second(self): ...


CHANGES = {
    "count": lambda h: setattr(h, "count", 5),
    "inner.count": lambda h: setattr(h.inner, "count", 2),
    "inner.last": lambda h: h.inner.last.append(9),
    "items": lambda h: h.items.append(3),
    "items[1]": lambda h: h.items[1].update(x=7),
    "tensor": lambda h: h.tensor.data.add_(1),
    "array": lambda h: h.array.__setitem__(0, 9),
    "table": lambda h: h.table["z"].append(1),
    "names": lambda h: h.names.add("b"),
    "new": lambda h: setattr(h, "new", 1),
    "slotted.count": lambda h: setattr(h.slotted, "count", 1),
    "slotted.other": lambda h: setattr(h.slotted, "other", 1),
    "slotted._Slotted__hidden": lambda h: h.slotted.hide(),
    "arguments.step": lambda h: setattr(h.arguments, "step", 1),
    "bytes": lambda h: h.bytes.append(1),
    "numbers": lambda h: h.numbers.append(1),
    "variable": lambda h: h.variable.set(1),
    "phase": lambda h: setattr(h, "phase", h.second),
    "expanded": lambda h: h.expanded[:1].add_(1),
    "conj": lambda h: h.conj.add_(1),
    "long": lambda h: h.long.__setitem__(1234, 1),
}


@pytest.mark.parametrize("path", CHANGES)
def test_state_when_something_changed_then_it_is_named_and_put_back(path):
    holder = Holder()
    state = ObjectState({"task": holder})
    assert state.changed() == {}
    CHANGES[path](holder)
    assert list(state.changed()) == [f"task.{path}"]
    state.put_back()
    assert state.changed() == {}
    assert ObjectState({"task": holder}).changed() == {}


GENERATORS = {
    "torch": (torch.Generator, lambda g: torch.rand(1, generator=g).item()),
    "numpy": (np.random.default_rng, lambda g: g.random()),
    "numpy, old": (lambda: np.random.RandomState(1), lambda g: g.rand()),
    "python": (random.Random, lambda g: g.random()),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_generator_of_an_object_when_drawn_from_then_is_named_and_draws_the_same_again(kind):
    make, draw = GENERATORS[kind]
    holder = Holder()
    holder.generator = make()
    state = ObjectState({"task": holder})
    first = draw(holder.generator)
    assert state.drawn() == ["task.generator"]
    assert state.changed() == {}
    state.put_back()
    assert state.drawn() == []
    assert draw(holder.generator) == first


@pytest.mark.parametrize(
    "stream", [iter([1, 2]), itertools.count(), (i for i in [1])], ids=["iterator", "count", "generator"]
)
def test_iterator_is_opaque(stream):
    holder = Holder()
    holder.stream = stream
    assert ObjectState({"task": holder}).opaque == ["task.stream"]


def test_attribute_of_a_module_when_changed_then_is_named_by_the_modules_path_and_torchs_own_are_left_out():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[1].calls = 0
    state = ObjectState({"model": model})
    model[1].calls += 1
    model.train(False)
    model[0].register_forward_hook(lambda *_: None)
    assert list(state.changed()) == ["model.1.calls"]


def test_values_of_changes_are_equal_for_equal_changes_alone():
    def change_by(amount):
        holder = Holder()
        state = ObjectState({"task": holder})
        holder.count += amount
        holder.tensor += amount
        return state.changed()

    assert change_by(1) == change_by(1)
    assert change_by(1) != change_by(2)


LARGE = {
    "tensor": lambda: torch.zeros(3 << 19),
    "transposed": lambda: torch.zeros(3, 1 << 19).T,
    "array": lambda: np.zeros(3 << 19),
    "objects": lambda: np.array([None] * 10),
    "list": lambda: [0] * 200_000,
    "deque": lambda: deque([0] * 200_000),
    "dict": lambda: dict.fromkeys(range(200_000), 0),
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_value_when_changed_then_is_named_though_it_cannot_be_put_back(kind):
    holder = Holder()
    holder.value = LARGE[kind]()
    state = ObjectState({"task": holder})
    assert state.changed() == {}
    if isinstance(holder.value, torch.Tensor):
        holder.value.data[0] = 1
    else:
        holder.value[0] = 1
    assert list(state.changed()) == ["task.value"]
    assert state.put_back() == ["task.value"]


def test_buffer_when_large_then_it_is_seen_and_cannot_be_put_back():
    holder = Holder()
    holder.value = bytearray(3 << 19)
    state = ObjectState({"task": holder})
    holder.value[0] = 1
    assert (list(state.changed()), state.put_back()) == (["task.value"], ["task.value"])
    holder.value.append(1)  # nothing holds on to its memory


def test_queue_when_changed_then_it_is_named_and_left_to_the_thread_that_fills_it():
    holder = Holder()
    state = ObjectState({"task": holder})
    holder.queue.put(1)
    assert (list(state.changed()), state.put_back(), holder.queue.qsize()) == (["task.queue"], ["task.queue"], 1)


def test_context_variable_when_put_back_then_has_its_default_again_and_without_one_cannot_be():
    for default, left in (({"default": 3}, []), ({}, ["task.variable"])):
        holder = Holder()
        holder.variable = ContextVar("variable", **default)
        state = ObjectState({"task": holder})
        holder.variable.set(5)
        assert state.put_back() == left
        assert holder.variable.get() == default.get("default", 5)


def test_objects_when_they_lie_too_deep_then_the_first_that_is_not_looked_at_is_named():
    holder = None
    for _ in range(2000):
        outer = Holder()
        outer.inner, holder = holder, outer
    state = ObjectState({"task": holder})
    assert state.unseen.startswith("task.inner.inner")
    holder.inner.count += 1
    assert list(state.changed()) == ["task.inner.count"]


def test_set_when_longer_than_is_compared_then_its_length_tells():
    holder = Holder()
    holder.value = set(range(200_000))
    state = ObjectState({"task": holder})
    holder.value.add(-1)
    assert list(state.changed()) == ["task.value"]


def test_objects_when_there_are_too_many_then_the_first_that_is_not_looked_at_is_named():
    state = ObjectState({"task": [[[0] for _ in range(100)] for _ in range(100)]})
    assert state.unseen is not None
    assert state.unseen.startswith("task[")
    assert ObjectState({"task": Holder()}).unseen is None


def test_cycles_and_long_lists_come_to_an_end():
    holder = Holder()
    holder.itself = holder
    holder.data = list(range(100_000))
    state = ObjectState({"task": holder})
    holder.data.append(1)
    assert list(state.changed()) == ["task.data"]


SEEN = [0]


COUNT = 0


class Global:
    calls = 0

    def loss(self):
        global COUNT
        SEEN.append(1)
        COUNT += 1
        type(self).calls += 1
        return np.zeros(1)


def test_library_when_it_is_in_a_folder_of_pip_target_then_its_classes_are_not_the_users(tmp_path, monkeypatch):
    for name in ("far_library", "near_module"):
        (tmp_path / f"{name}.py").write_text("class Thing:\n    pass\n")
    record = tmp_path / "far_library-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("far_library.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("far_library", "near_module")
    assert [is_users(importlib.import_module(name).Thing) for name in names] == [False, True]


def test_global_variables_that_a_class_uses_are_found_and_modules_and_functions_left_out():
    found = used_globals(Global)
    assert found.keys() == {"global SEEN", "globals of test_object_state", "class Global"}
    assert dict(vars(found["globals of test_object_state"])) == {"COUNT": 0}
    assert dict(vars(found["class Global"])) == {"calls": 0}


def test_variables_of_modules_and_classes_when_assigned_to_then_are_seen_and_put_back():
    state = ObjectState(used_globals(Global))
    Global().loss()
    assert set(state.changed()) == {"global SEEN", "globals of test_object_state.COUNT", "class Global.calls"}
    state.put_back()
    assert (COUNT, Global.calls, SEEN) == (0, 0, [0])


helpers = types.ModuleType("helpers_of_tests")
helpers.LIMIT, helpers.TIMES = [1], 0
sys.modules[helpers.__name__] = helpers
HITS = []


def note():
    HITS.append(1)


class Meter:
    count = 0

    @staticmethod
    def update():
        Meter.count += 1


class ByDetours:
    @staticmethod
    def static():
        note()

    @classmethod
    def of_class(cls):
        Meter.update()

    @property
    def total(self):
        return [helpers.LIMIT for _ in range(1)]

    def nested(self):
        def inner():
            helpers.TIMES = 3

        return inner


def test_state_that_is_reached_by_helpers_and_other_kinds_of_methods_is_found():
    found = used_globals(ByDetours)
    assert found["global HITS"] is HITS
    assert dict(vars(found["class Meter"])) == {"count": 0}
    assert found["global LIMIT"] is helpers.LIMIT
    assert dict(vars(found[f"globals of {helpers.__name__}"])) == {"TIMES": 0}


def test_module_and_optimizer_that_a_task_holds_when_stepped_then_are_seen_and_put_back():
    holder = Holder()
    holder.critic = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    holder.optimizer = torch.optim.Adam(holder.critic.parameters())
    holder.model = model = nn.Linear(2, 2)
    before = {name: value.clone() for name, value in holder.critic.state_dict().items()}
    state = ObjectState({"task": holder, "model": model})
    holder.critic(torch.randn(4, 2)).square().sum().backward()
    holder.optimizer.step()
    with torch.no_grad():
        model.weight.add_(1)
    changed = set(state.changed())
    assert {"task.critic.0.weight", "task.critic.1.running_mean", "task.optimizer"} <= changed
    assert not any("model" in path for path in changed)  # what is trained has its own place
    state.put_back()
    assert all(torch.equal(value, before[name]) for name, value in holder.critic.state_dict().items())
    assert not holder.optimizer.state_dict()["state"]


def test_locks_files_and_loggers_are_left_alone():
    holder = Holder()
    holder.lock, holder.queue, holder.log = threading.Lock(), queue.SimpleQueue(), logging.getLogger("x")
    with open(os.devnull) as file:
        holder.file = file
        state = ObjectState({"task": holder})
    holder.log.disabled = not holder.log.disabled
    assert (state.changed(), state.opaque) == ({}, [])
    holder.log.disabled = not holder.log.disabled


def test_changes_when_taken_are_named_once_but_for_names_that_came():
    holder = Holder()
    holder.count, holder.items, holder.act = 0, [1], nn.functional.relu
    state = ObjectState({"task": holder})
    assert state.take_changed() == set()
    holder.count, holder.late = 1, 2
    holder.items.append(2)
    assert state.take_changed() == {("task", "count"), ("task", "items"), ("task", "late")}
    holder.count = 2
    assert state.take_changed() == {("task", "late")}


def test_attribute_when_it_was_a_function_and_becomes_a_number_then_is_named():
    holder = Holder()
    holder.act = nn.functional.relu
    state = ObjectState({"task": holder})
    holder.act = 3
    assert list(state.changed()) == ["task.act"]
    assert state.take_changed() == {("task", "act")}


def test_state_of_functions_is_seen_and_put_back():
    calls, log = 0, []

    def counting(seen=[], step=1):  # noqa: B006 - a default that can change is what is seen
        nonlocal calls
        calls += 1
        log.append(calls)
        seen.append(calls)
        counting.last = calls

    class Holder:
        pass

    holder = Holder()
    holder.function = counting
    state = ObjectState({"task": holder})
    counting()
    assert set(state.changed()) == {
        "task.function().calls",
        "task.function().log",
        "task.function().seen",
        "task.function().last",
    }
    assert list(state.owners) == ["task", "task.function()"]
    state.put_back()
    assert (calls, log, counting.__defaults__, vars(counting)) == (0, [], ([], 1), {})


def test_hooks_of_modules_are_looked_into_and_functions_of_libraries_are_not():
    calls = []
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, output: calls.append(1))
    state = ObjectState({"model": model, "plain": {"function": torch.compile}})
    model(torch.ones(1, 2))
    assert list(state.changed()) == ["model.0._forward_hooks[0]().calls"]
    parameters = ["model.0.weight", "model.0.bias"]
    assert list(state.owners) == ["model", "model.0", "model.0._forward_hooks[0]()", *parameters]
    state.put_back()
    assert calls == []


def test_module_that_a_task_holds_when_its_modes_flags_gradients_or_buffers_change_then_they_are_put_back():
    holder = Holder()
    holder.critic = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    holder.critic.register_buffer("late", None)
    state = ObjectState({"task": holder})
    holder.critic[0](torch.ones(1, 1)).sum().backward()
    holder.critic.eval()
    holder.critic.late = torch.ones(1)
    holder.critic[0].bias.requires_grad_(False)
    assert {"task.critic", "task.critic.0.weight", "task.critic.0.bias"} <= set(state.changed())
    assert state.put_back() == []
    assert state.changed() == {}
    assert holder.critic.training
    assert holder.critic.late is None
    assert all(parameter.requires_grad and parameter.grad is None for parameter in holder.critic.parameters())


def test_array_when_its_changes_are_few_then_turns_of_samples_find_them():
    holder = Holder()
    holder.value = np.zeros(1 << 21)
    state = ObjectState({"task": holder})
    holder.value[12_345] = 1
    looks = next(number for number in range(1, 300) if state.changed())
    assert looks < 200


def test_long_list_of_containers_when_items_are_left_out_then_it_is_named_and_one_of_values_is_not():
    assert ObjectState({"task": [{"n": 0} for _ in range(1500)]}).unseen == "task"
    assert ObjectState({"task": [(0, "a")] * 1500}).unseen is None


def test_memory_of_numbers_that_processes_share_is_seen_and_put_back():
    holder = Holder()
    holder.value = multiprocessing.Value("i", 3)
    state = ObjectState({"task": holder})
    holder.value.value = 4
    assert list(state.changed()) == ["task.value"]
    state.put_back()
    assert holder.value.value == 3


def test_parameters_when_they_are_given_attributes_or_change_them_then_these_are_put_back():
    model = nn.Linear(2, 2)
    model.bias.rate = 0.1
    state = ObjectState({"model": model})
    model.weight.calls, model.bias.rate = 1, 0.2
    model.weight._dynamo_mark = 1  # a compiler's
    assert sorted(state.changed()) == ["model.bias.rate", "model.weight.calls"]
    state.put_back()
    assert (vars(model.weight), vars(model.bias)) == ({"_dynamo_mark": 1}, {"rate": 0.1})
    model.weight.calls = 1
    assert state.take_changed() == {("model.weight", "calls")}


class MarkedTensor(torch.Tensor): ...


class Queue(deque):
    def __init__(self, items):
        super().__init__(items)
        self.at = 0


class Pair(tuple):
    at = 0


class Marked(np.ndarray):
    at = 0


@pytest.mark.parametrize(
    "value",
    [Queue([1]), Pair((1, 2)), np.zeros(2).view(Marked), torch.zeros(2), torch.zeros(2).as_subclass(MarkedTensor)],
    ids=lambda value: type(value).__name__,
)
def test_attributes_of_containers_and_tensors_when_changed_then_are_named_and_put_back(value):
    holder = argparse.Namespace(value=value)
    value.at = 0
    state = ObjectState({"task": holder})
    value.at = 1
    assert list(state.changed()) == ["task.value.at"]
    state.put_back()
    assert value.at == 0
    value.later = 2
    assert list(state.changed()) == ["task.value.later"]
    state.put_back()
    assert not hasattr(value, "later")


def test_attributes_of_a_buffer_when_changed_then_are_named_and_put_back():
    model = nn.BatchNorm1d(2)
    state = ObjectState({"model": model})
    model.running_mean.calls = 1
    assert list(state.changed()) == ["model.running_mean.calls"]
    state.put_back()
    assert not vars(model.running_mean)


def test_cache_of_a_function_when_it_grows_then_it_is_emptied_again_and_counts_as_no_state():
    @functools.cache
    def cached(number):
        return [number]

    first = cached(1)
    state = ObjectState({"cached": cached})
    cached(2)
    assert (state.changed(), state.filled(), state.take_changed()) == ({}, ["cached"], set())
    assert state.put_back() == []
    assert cached.cache_info().currsize == 1
    assert cached(1) is first


def test_value_that_cannot_be_compared_is_shown_alike_in_every_process():
    shown = {repr(comparable([Version(number)])) for number in (1, 2)}
    assert shown == {"[<Version>]"}


class Version:
    """Object of a user's class."""

    def __init__(self, number: int) -> None:
        self.number = number
