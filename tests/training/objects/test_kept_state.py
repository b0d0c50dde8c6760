"""Plain state in checkpoints: kept, brought back into the objects that are there, or named as lost."""

import ctypes
import functools
import hashlib
import multiprocessing
import random
import threading
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from enum import Enum, Flag
from functools import partial
from queue import Queue
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

import dure
from dure.errors import CheckpointMismatch
from dure.strategies.state.objects.used_globals import state_outside
from dure.strategies.state.trial import Trial
from dure.training.objects.kept_objects import CannotKeep, Keeper, KnownObjects
from dure.training.objects.kept_state import KeptState
from dure.training.objects.restored_objects import Restorer


class Meter:
    def __init__(self):
        self.values = deque(maxlen=2)
        self.total = None


def kept(value, path="x", **known):
    keeper = Keeper(KnownObjects(known))
    return keeper.entry(value, path), keeper.objects


def known_of(value):
    return {"x": value, **{f"x.{name}": each for name, each in vars(value).items()}, **slots_of(value)}


def slots_of(value):
    return {f"x.{name}": getattr(value, name) for name in getattr(type(value), "__slots__", ()) if name != "__dict__"}


def restored(state, **there):
    entry, objects = state
    return Restorer(objects, there).value(entry)


class Calls(nn.Module):
    """Criterion that counts its calls."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def forward(self, *args):
        self.number += 1
        return self.number


class Stored:
    """Descriptor that keeps the values itself."""

    def __init__(self):
        self.values = WeakKeyDictionary()

    def __get__(self, owner, cls=None):
        return self.values.get(owner, 0)

    def __set__(self, owner, value):
        self.values[owner] = value


class Shared:
    number = 0


class Sharing(Shared):
    def __call__(self):
        Shared.number += 1
        return self.number


def registered():
    REGISTERED[0] += 1
    return REGISTERED[0]


REGISTERED = [0]
REGISTER = {"one": registered}


class Structure(ctypes.Structure):
    _fields_ = [("number", ctypes.c_int)]


class OutOfTheWay(dure.Task):
    """A task whose state is reached through classes, methods and what it was given."""

    criterion = Calls()
    counting = functools.partial(Calls())
    stored = Stored()

    def __init__(self, kind, path):
        self.kind = kind
        last = deque(maxlen=99)
        self.append, self.length = last.append, last.__len__
        self.method = Calls().forward
        self.given = Sharing()
        self.random, self.uniform = np.random.default_rng(3).random, random.Random(3).uniform
        self.structure = Structure()
        self.file = path.open()
        type(self).criterion, type(self).counting = Calls(), functools.partial(Calls())
        type(self).stored, Shared.number, REGISTERED[0] = Stored(), 0, 0

    def train_data(self):
        raise NotImplementedError

    build_model = build_optimizer = loss = train_data

    def call(self):
        return getattr(self, f"_by_{self.kind}")()

    def _by_class(self):
        return self.criterion()

    def _by_partial(self):
        return self.counting()

    def _by_descriptor(self):
        self.stored += 1
        return self.stored

    def _by_builtin(self):
        self.append(1)
        return self.length()

    def _by_method(self):
        return self.method()

    def _by_given(self):
        return self.given()

    def _by_register(self):
        return REGISTER["one"]()

    def _by_draws(self):
        return self.random()

    def _by_python_draws(self):
        return self.uniform(0, 1)

    def _by_structure(self):
        self.structure.number += 1
        return self.structure.number

    def _by_file(self):
        return self.file.readline()


WAYS = [name.removeprefix("_by_") for name in vars(OutOfTheWay) if name.startswith("_by_")]


@pytest.mark.parametrize("kind", WAYS)
def test_state_that_is_reached_through_classes_and_methods_is_put_back_and_kept(kind, tmp_path):
    (tmp_path / "lines").write_text("1\n2\n3\n4\n5\n")
    task, model = OutOfTheWay(kind, tmp_path / "lines"), nn.Linear(1, 1)
    state = KeptState(task, model, SGD(model.parameters(), lr=0.1))
    first = task.call()
    second = task.call()
    tensors = {name: tensor.clone() for name, tensor in state.tensors().items()}
    assert not state.lost
    third = task.call()
    state.restore(tensors)
    assert task.call() == third
    with Trial(model, {"task": task, **state_outside(task, model)}) as trial:
        fourth = task.call()
    assert trial.state or trial.has_drawn
    assert task.call() == fourth
    assert len({first, second, third, fourth}) == 4
    task.file.close()


VALUES = [
    7, -0.1, float("inf"), "text", None, True, [1, [2, "x"]], (1, 2), {3, 4}, frozenset({5}), deque([1, 2]),
    {"a": 1, 2: "b"}, OrderedDict(x=1), defaultdict(None, {"y": [1]}), torch.arange(3.0),
    torch.tensor(2, dtype=torch.int8), np.arange(4).reshape(2, 2), np.float32(0.1), {"deep": [{"t": torch.ones(2)}]},
    Counter("aab"),
    deque([1], maxlen=3), defaultdict(list, {"y": [1]}), b"\x00a", bytearray(b"b"), array("d", [1.5]), array("i"),
    1 - 2j, np.arange(2, dtype=">i4"), np.longdouble("0.1"),
    np.array([(1, [2.5, 3])], dtype=[("a", "i4"), ("b", "f8", (2,))]),
    np.array(["2026-01-01"], dtype="datetime64[D]"), np.zeros((0, 3)), np.array([1j]),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_value_when_kept_and_restored_then_is_the_same_of_the_same_type(value):
    back = restored(kept(value))
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_object_when_restored_then_the_one_that_is_there_has_its_state():
    meter, other = Meter(), Meter()
    known = known_of(meter)
    meter.values.extend([1, 2, 3])
    meter.total = torch.tensor(5.0)
    values = other.values
    assert restored(kept(meter, **known), **known_of(other)) is other
    assert (list(other.values), other.total) == ([2, 3], torch.tensor(5.0))
    assert other.values is values
    assert other.values.maxlen == 2


class Kind(Enum):
    FIRST = 1
    SECOND = 2


class Slots:
    __slots__ = ("__dict__", "kind")

    def __init__(self):
        self.kind, self.table, self.array = Kind.FIRST, defaultdict(lambda: 0), np.zeros(2)


def test_objects_with_slots_enums_and_factories_when_restored_then_are_as_they_were():
    old, new = Slots(), Slots()
    old.kind = Kind.SECOND
    old.table["a"] += 2
    old.array[0] = 7
    alias = new.array
    restored(kept(old, **known_of(old)), **known_of(new))
    assert (new.kind, dict(new.table), list(alias)) == (Kind.SECOND, {"a": 2}, [7, 0])
    assert new.table["never seen"] == 0


class Raising:
    def __getattr__(self, name):
        raise RuntimeError(name)


def test_object_whose_attributes_raise_is_kept_all_the_same():
    old, new = Raising(), Raising()
    vars(old)["n"] = 3
    assert vars(restored(kept(old, **known_of(old)), **known_of(new))) == {"n": 3}


@pytest.mark.parametrize(
    "value", [[Meter()], {"a": Meter()}, {Meter(): 1}, {Meter()}, Kind.FIRST, random.Random(), defaultdict(lambda: 1)]
)
def test_value_that_no_session_would_find_again_cannot_be_kept(value):
    with pytest.raises(CannotKeep, match="that was made on the way, which cannot be kept"):
        kept(value)


def test_generator_when_restored_then_goes_on_drawing():
    for make, draw in [
        (torch.Generator, lambda g: torch.rand(1, generator=g).item()),
        (random.Random, random.Random.random),
    ]:
        generator, other = make(), make()
        draw(generator)
        restored(kept(generator, g=generator), g=other)
        assert draw(generator) == draw(other)


@pytest.mark.parametrize(
    "value",
    [open, lambda: 1, nn.Linear, object(), np.array(["a", None]), Queue()],
    ids=["builtin", "function", "class", "object", "array of objects", "queue"],
)
def test_value_of_an_unknown_kind_cannot_be_kept(value):
    with pytest.raises(CannotKeep, match=r"x(\.y)? is a .* which cannot be kept"):
        kept(value)


class Task(dure.Task):
    calls = 0

    def build_model(self):
        return nn.Linear(1, 1)

    def train_data(self):
        return [0]

    def build_optimizer(self, model):
        return SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        return model(batch)


def session_of(meter=Meter):
    task, model = Task(), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    task.meter = meter()
    optimizer = SGD(model.parameters(), lr=0.1)
    return task, model, optimizer, KeptState(task, model, optimizer)


def test_state_when_nothing_changed_then_is_nothing():
    *_, state = session_of()
    assert state.tensors() == {}


def test_state_when_attributes_changed_then_another_session_goes_on_with_them():
    task, model, optimizer, state = session_of()
    task.calls, task.meter.total, model[1].note, optimizer.warmth = 3, 0.5, "x", [1.0]
    model[0].requires_grad_(False)
    tensors = state.tensors()
    other_task, other_model, other_optimizer, other = session_of()
    other.restore(tensors)
    assert (other_task.calls, other_task.meter.total, other_model[1].note) == (3, 0.5, "x")
    assert other_optimizer.warmth == [1.0]
    assert [p.requires_grad for p in other_model.parameters()] == [False, False, True, True]
    assert {name: t.tolist() for name, t in other.tensors().items()} == {
        name: t.tolist() for name, t in tensors.items()
    }


BUFFER, ARRAY, RECORDS = bytearray(1), np.zeros(2), [0]


class Inner(Task):
    """State inside of containers and objects, which begins as the weight itself, or as what another attribute names."""

    def __init__(self):
        self.array = self.first_array = np.zeros(2)
        self.pair = (torch.zeros(2), [1])
        self.meter = self.first_meter = Meter()
        self.phase = Kind.FIRST

    def globals(self):
        return BUFFER, ARRAY, RECORDS


def inner_session():
    task, model = Inner(), nn.Linear(1, 1)
    task.best = {"weight": model.weight.detach()}
    optimizer = SGD(model.parameters(), lr=0.1)
    return task, model, KeptState(task, model, optimizer)


def test_state_when_another_object_took_a_place_then_what_was_there_keeps_its_values():
    task, _, state = inner_session()
    task.best["weight"] = torch.full((1, 1), 7.0)
    task.array = task.array + 1
    task.pair = (torch.ones(2), [2])
    task.meter = Meter()
    task.meter.total = 5
    task.phase = Kind.SECOND
    tensors = state.tensors()
    assert state.lost == {}
    other, other_model, other_state = inner_session()
    weight = other_model.weight.item()
    other_state.restore(tensors)
    assert (other.best["weight"].item(), other_model.weight.item()) == (7.0, weight)
    assert (list(other.array), list(other.first_array)) == ([1, 1], [0, 0])
    assert (other.pair[0].tolist(), other.pair[1]) == ([1, 1], [2])
    assert (other.meter.total, other.first_meter.total, other.phase) == (5, None, Kind.SECOND)


def test_global_buffers_when_restored_then_are_filled_where_they_are():
    _, _, state = inner_session()
    BUFFER[0], ARRAY[0] = 3, 4
    RECORDS.append(5)
    tensors = state.tensors()
    BUFFER[0], ARRAY[0] = 0, 0
    del RECORDS[1:]
    _, _, other_state = inner_session()
    other_state.restore(tensors)
    assert (BUFFER, list(ARRAY), RECORDS) == (bytearray([3]), [4, 0], [0, 5])
    BUFFER[0], ARRAY[0] = 0, 0
    del RECORDS[1:]


def test_state_when_an_attribute_changed_back_and_forth_then_its_size_stays():
    task, _, _, state = session_of()
    sizes = set()
    for calls in range(1, 60):
        task.calls = calls
        sizes |= {tensor.shape for tensor in state.tensors().values()}
    assert len(sizes) == 1


@pytest.mark.parametrize("calls", [1, 5, 11])
def test_state_when_it_first_changes_after_any_number_of_saves_then_the_next_has_it(calls):
    task, model, _, state = session_of()
    for _ in range(calls):
        assert state.tensors() == {}
    task.meter.total, model[1].late = 0.5, 7
    tensors = state.tensors()
    other_task, other_model, _, other = session_of()
    other.restore(tensors)
    assert (other_task.meter.total, other_model[1].late) == (0.5, 7)


def test_state_that_cannot_be_kept_is_named_and_the_rest_is_kept():
    task, *_, state = session_of()
    task.calls, task.stream = 2, object()
    tensors = state.tensors()
    assert list(state.lost) == ["task.stream"]
    other_task, *_, other = session_of()
    other.restore(tensors)
    assert other_task.calls == 2


def test_state_when_the_object_that_had_it_is_gone_then_is_refused():
    task, *_, state = session_of()
    task.meter.total = 4.0
    tensors = state.tensors()
    *_, other = session_of(lambda: None)
    with pytest.raises(CheckpointMismatch, match=r"task\.meter had state .* and is not there now"):
        other.restore(tensors)


class SavesItself(Task):
    def state_dict(self):
        return {"calls": self.calls * 2}

    def load_state_dict(self, state):
        self.calls = state["calls"] // 2


def test_state_of_a_task_that_saves_itself_is_what_it_says():
    task, model = SavesItself(), nn.Linear(1, 1)
    state = KeptState(task, model, task.build_optimizer(model))
    task.calls, task.other = 4, object()
    tensors = state.tensors()
    assert state.lost == {}
    again = SavesItself()
    KeptState(again, model, again.build_optimizer(model)).restore(tensors)
    assert again.calls == 4


def test_state_of_a_task_that_saves_itself_is_not_reached_by_its_schedule():
    task, model = SavesItself(), nn.Linear(1, 1)
    state = KeptState(task, model, task.build_optimizer(model))
    state.add_schedule(lambda seen: task.calls)
    task.calls, task.other = 4, object()
    state.tensors()
    assert (state.lost, state.changed_since([])) == ({}, [])


def test_state_of_a_task_that_a_hook_of_the_optimiser_holds_has_the_tasks_paths():
    task, model = Task(), nn.Linear(1, 1)
    optimizer = task.build_optimizer(model)
    optimizer.register_step_post_hook(lambda *_: task.calls)
    state = KeptState(task, model, optimizer)
    task.calls += 1
    state.tensors()
    assert (state.lost, state.changed_since([])) == ({}, ["task.calls"])


class Recorder:
    """Stand-in for a writer of a library, with values that no checkpoint could hold."""

    __module__ = "wandb.sdk.wandb_run"

    def __init__(self):
        self.lines, self.queue, self.step = iter(()), Queue(), 0

    def log(self, value):
        self.step += 1
        self.queue.put(value)


class Writes:
    def __init__(self):
        self.number, self.recorder, self.log = 0, Recorder(), Recorder().log


def test_recorder_when_a_task_or_its_schedule_writes_with_it_then_is_no_state():
    task, model, recorder = Task(), nn.Linear(1, 1), Recorder()
    task.writes = Writes()
    state = KeptState(task, model, task.build_optimizer(model))
    state.add_schedule(lambda seen: recorder.log(seen))
    with Trial(model, {"task": task, "recorder": recorder}) as trial:
        recorder.log(1)
        task.writes.recorder.log(2)
    assert (trial.state, recorder.step) == ({}, 1)
    task.writes.number += 1
    task.writes.log(3)
    state.tensors()
    assert (state.lost, state.changed_since([])) == ({}, ["task.writes"])


class Model(nn.Sequential):
    """A model with a table and a count that no `state_dict` has."""

    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self[1].register_buffer("table", torch.zeros(1 << 15), persistent=False)


class Holding(Task):
    """State that is told by which object it is, or that lies where nobody asks for it."""

    def __init__(self):
        self.first, self.second = Meter(), Meter()
        self.order = [self.first, self.second]
        self.by_parameter = {}
        self.critic = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
        self.critic.register_buffer("late", None)
        self.leaf = torch.zeros(2, requires_grad=True)
        self.call = partial(max, [0])
        self.mine = threading.local()
        self.weak = WeakKeyDictionary()
        self.flags = Side.LEFT
        self.made = make()
        self.action = self.begin

    def begin(self): ...

    def end(self): ...


class Side(Flag):
    LEFT = 1
    RIGHT = 2


def make():
    class Counter:
        calls = 0

    return Counter()


class Slow(SGD):
    __slots__ = ("rate",)


def holding():
    task, model = Holding(), Model()
    optimizer = Slow(model.parameters(), lr=0.1)
    task.active = model[0]
    return task, model, optimizer, KeptState(task, model, optimizer)


def taken_over(change):
    """Return another session that took over what a change of this one left, and this one."""
    one = holding()
    change(*one[:3])
    tensors = one[3].tensors()
    assert one[3].lost == {}
    other = holding()
    with torch.no_grad():
        for parameter, value in zip(other[1].parameters(), one[1].parameters(), strict=True):
            parameter.copy_(value)
    other[3].restore(tensors)
    return other


def test_buffers_that_no_state_dict_has_when_changed_then_are_kept_and_constant_ones_cost_nothing():
    def change(task, model, optimizer):
        model.count += 3
        model[0].register_buffer("made", torch.ones(1), persistent=False)

    _, model, _, state = taken_over(change)
    assert (model.count.item(), model[0].made.item()) == (3, 1)
    assert not {"count", "0.made"} & model.state_dict().keys()
    assert all(tensor.numel() < 1 << 12 for tensor in state.tensors().values())


def test_large_buffer_that_no_state_dict_has_when_written_to_then_is_kept():
    _, model, *_ = taken_over(lambda task, model, optimizer: model[1].table.add_(2))
    assert model[1].table.eq(2).all()


def test_attributes_with_dots_in_their_names_and_in_slots_are_kept():
    def change(task, model, optimizer):
        setattr(task, "avg_0.weight", 1.5)
        optimizer.rate = 3

    task, _, optimizer, _ = taken_over(change)
    assert (getattr(task, "avg_0.weight"), optimizer.rate) == (1.5, 3)


def test_parts_of_the_model_when_an_attribute_names_them_then_are_these_parts():
    def change(task, model, optimizer):
        task.active = model[1]
        task.by_parameter[model[0].weight] = 1
        task.chosen, task.some = {model[1].weight}, [model[1].bias]
        task.view = model[0].weight.detach()[1]

    task, model, *_ = taken_over(change)
    assert task.active is model[1]
    assert list(task.by_parameter) == [model[0].weight]
    assert task.chosen == {model[1].weight}
    assert task.some[0] is model[1].bias
    with torch.no_grad():
        model[0].weight[1, 0] = 77
    assert task.view[0] == 77


def test_objects_that_changed_places_or_have_two_names_stay_the_same_objects():
    def change(task, model, optimizer):
        task.first, task.second = task.second, task.first
        task.first.total = 2
        task.order.reverse()
        task.log = [{"n": 0}]
        task.current = task.log[0]
        task.log.append(task.log)
        task.action = task.end

    task, *_ = taken_over(change)
    assert task.order == [task.first, task.second]
    assert (task.first.total, task.second.total) == (2, None)
    assert task.current is task.log[0]
    assert task.log[1] is task.log
    assert task.action == task.end


def test_objects_in_a_set_which_no_session_tells_apart_are_declared():
    def session():
        task, model = Task(), nn.Linear(1, 1)
        task.meters = {Meter(), Meter()}
        task.expanded = torch.zeros(1).expand(3)
        return task, KeptState(task, model, task.build_optimizer(model))

    task, state = session()
    next(iter(task.meters)).total = 1
    task.expanded[:1].add_(4)
    tensors = state.tensors()
    assert list(state.lost) == ["task.meters"]
    other, other_state = session()
    other_state.restore(tensors)
    assert other.expanded.tolist() == [4, 4, 4]


def test_view_of_other_memory_that_cannot_be_made_again_is_declared():
    task, *_, state = holding()
    task.array = np.zeros(4)
    state = KeptState(task, Model(), SGD([torch.zeros(1)], lr=0.1))
    task.part = task.array[1:]
    state.tensors()
    assert list(state.lost) == ["task.part"]


def test_module_that_a_task_holds_keeps_modes_flags_gradients_and_late_buffers():
    def change(task, model, optimizer):
        task.critic[0](torch.ones(1, 1)).sum().backward()
        task.critic[1].eval()
        task.critic[0].bias.requires_grad_(False)
        task.critic.late = torch.ones(3)
        (task.leaf.sum() * 3).backward()

    task, *_ = taken_over(change)
    assert task.critic[0].weight.grad.item() == 1
    assert [module.training for module in task.critic.modules()] == [True, True, False]
    assert [p.requires_grad for p in task.critic[0].parameters()] == [True, False]
    assert task.critic.late.tolist() == [1, 1, 1]
    assert task.leaf.grad.tolist() == [3, 3]


def test_state_in_partials_thread_locals_weak_keys_flags_and_classes_is_kept():
    def change(task, model, optimizer):
        task.call.args[0].append(4)
        task.mine.n = 5
        task.weak[model[1]] = 6
        task.flags = Side.LEFT | Side.RIGHT
        type(task.made).calls = 7

    task, model, *_ = taken_over(change)
    assert (task.call.args[0], task.mine.n, task.weak[model[1]]) == ([0, 4], 5, 6)
    assert (task.flags, type(task.made).calls) == (Side.LEFT | Side.RIGHT, 7)


def test_attributes_of_tensors_and_an_optimizers_defaults_are_kept():
    def change(task, model, optimizer):
        task.leaf.calls, model.count.calls, model[0].weight.calls = 1, 2, 3
        optimizer.defaults["calls"] = 4

    task, model, optimizer, _ = taken_over(change)
    assert (task.leaf.calls, model.count.calls, model[0].weight.calls) == (1, 2, 3)
    assert optimizer.defaults["calls"] == 4


class Ring(list):
    at = 0


@functools.cache
def counts():
    return [0]


@pytest.mark.parametrize("kind", ["attribute of a list", "tensor made on the way", "cache"])
def test_attributes_and_caches_that_cannot_be_kept_are_declared(kind):
    task, model, optimizer, _ = holding()
    task.value = Ring() if kind == "attribute of a list" else counts if kind == "cache" else None
    state = KeptState(task, model, optimizer)
    if kind == "attribute of a list":
        task.value.at = 1
    elif kind == "cache":
        counts()[0] += 1
        state = KeptState(task, model, optimizer)
        counts()[0] += 1
    else:
        task.value = torch.zeros(1)
        task.value.calls = 1
    state.tensors()
    assert list(state.lost) == ["task.value"]


def test_state_by_the_id_of_a_parameter_is_declared():
    task, model, _, state = holding()
    task.by_parameter[id(model[0].weight)] = 1
    state.tensors()
    assert list(state.lost) == ["task.by_parameter"]


@pytest.mark.parametrize("kind", ["masked", "shared", "sparse"])
def test_state_of_other_kinds_is_declared(kind):
    values = {
        "masked": np.ma.masked_array(np.zeros(2), mask=[0, 1]),
        "shared": multiprocessing.Value("i", 0),
        "sparse": torch.eye(2).to_sparse(),
    }
    task, *_, state = holding()
    task.value = values[kind]
    assert KeptState(task, Model(), SGD([torch.zeros(1)], lr=0.1)).lost == {}
    state.tensors()
    assert list(state.lost) == ["task.value"]


def test_hooks_and_objects_whose_changes_cannot_be_seen_are_declared():
    task, model = Holding(), Model()
    task.digest = hashlib.sha256()
    state = KeptState(task, model, SGD(model.parameters(), lr=0.1))
    assert list(state.lost) == ["task.digest"]
    model[0].register_forward_hook(lambda *_: None)
    state.look()
    assert list(state.lost) == ["task.digest", "model.0._forward_hooks"]


def test_large_array_when_a_sample_misses_its_change_then_a_checkpoint_finds_it():
    task, *_ = session = holding()
    task.counts = np.zeros(3 << 20)
    state = KeptState(*session[:3])
    for _ in range(3):
        assert state.tensors() == {}
    task.counts[1_234_567] = 1
    assert state.tensors(is_thorough=True)
