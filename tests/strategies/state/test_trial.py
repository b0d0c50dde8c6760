"""A trial leaves no trace, and tells what it has changed."""

import copy
import itertools
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.trial import KeptBuffers, Trial, is_equal, sharing_state


def test_nested_tensors_are_equal_if_their_rows_are():
    rows = [torch.ones(2), torch.ones(3)]
    one, other = (torch.nested.nested_tensor(rows, layout=torch.jagged) for _ in range(2))
    assert one.shape != other.shape
    assert is_equal(one, other)
    assert not is_equal(one, torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged))
    assert not is_equal(one, torch.ones(2, 3))


class Task:
    calls = 0


def model_of_all_kinds():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model.note = "a"
    model[0].weight.grad = torch.ones(3, 3)
    return model


def clamp(model, task):
    with torch.no_grad():
        model[0].weight.clamp_(-1e-3, 1e-3)


def clamp_data(model, task):
    model[0].weight.data.clamp_(-1e-3, 1e-3)


def swap_data(model, task):
    model[0].weight.data = torch.zeros(3, 3)


def foreach(model, task):
    torch._foreach_mul_([parameter.data for parameter in model.parameters()], 2.0)


def forward(model, task):
    model(torch.randn(4, 3)).sum().backward()


def freeze(model, task):
    model[0].requires_grad_(False)
    model[2].eval()


def replace(model, task):
    model[2] = nn.Linear(3, 1)
    model.extra = nn.Linear(1, 1)


def count(model, task):
    task.calls += 1
    model.note = "b"


DEEDS = [clamp, clamp_data, swap_data, foreach, forward, freeze, replace, count]


def everything(model, task):
    flags = [(p.requires_grad, None if p.grad is None else p.grad.tolist()) for p in model.parameters()]
    state = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return state, flags, [m.training for m in model.modules()], model.note, task.calls, torch.get_rng_state().tolist()


@pytest.mark.parametrize("watches_writes", [True, False, None])
@pytest.mark.parametrize("deed", DEEDS)
def test_trial_when_something_was_done_in_it_then_nothing_is_left_of_it(deed, watches_writes):
    model, task = model_of_all_kinds(), Task()
    before = copy.deepcopy(everything(model, task))
    parameters = list(model.parameters())
    with Trial(model, {"task": task}, watches_writes=watches_writes) as trial:
        deed(model, task)
        torch.rand(1)
    assert everything(model, task) == before
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert trial.has_drawn


class Scores:
    """Plain object that a data set holds."""

    def __init__(self):
        self.by_index = {0: 1.0}


class Kept(Dataset):
    """Samples with state in containers, an array, an object and a data set within it."""

    def __init__(self, inner=None):
        self.labels, self.weights, self.seen = [0, 1, 2], np.ones(3), {1}
        self.scores, self.rows, self.inner = Scores(), [{"label": 0}], inner
        self.columns = torch.zeros(3), np.zeros(3)

    def __len__(self):
        return 3


DATA_DEEDS = {
    "labels": lambda kept: kept.labels.__setitem__(1, 5),
    "weights": lambda kept: kept.weights.__setitem__(1, 5.0),
    "seen": lambda kept: kept.seen.add(2),
    "scores.by_index": lambda kept: kept.scores.by_index.update({1: 2.0}),
    "columns.1": lambda kept: kept.columns[1].__setitem__(0, 1.0),
    "rows.0": lambda kept: kept.rows[0].update(label=1),
    "inner.labels": lambda kept: kept.inner.labels.append(1),
}


def content(kept):
    inner = [] if kept.inner is None else content(kept.inner)
    arrays = kept.weights.tolist(), kept.columns[1].tolist()
    return [kept.labels[:], arrays, {*kept.seen}, {**kept.scores.by_index}, dict(kept.rows[0]), inner]


@pytest.mark.parametrize("name", DATA_DEEDS)
def test_trial_when_contents_of_a_data_set_change_then_they_are_named_and_as_before(name):
    kept = Kept(inner=Kept())
    before, task = content(kept), Task()
    task.rows = kept
    with Trial(nn.Linear(1, 1), {"task": task}) as trial:
        DATA_DEEDS[name](kept)
    assert content(kept) == before
    assert [*trial.state] == [f"task.rows.{name}"]


def test_trial_when_a_tensor_of_a_data_set_changes_then_it_is_named_and_as_before():
    task = Task()
    task.rows = TensorDataset(torch.zeros(3))
    with Trial(nn.Linear(1, 1), {"task": task}) as trial:
        task.rows.tensors[0][1] = 5
    assert not task.rows.tensors[0].any()
    assert [*trial.state] == ["task.rows.tensors.0"]


@pytest.mark.parametrize("watches_writes", [True, False, None])
def test_trial_when_the_code_in_it_fails_then_nothing_is_left_of_it(watches_writes):
    model, task = model_of_all_kinds(), Task()
    before = copy.deepcopy(everything(model, task))

    def fail():
        with Trial(model, {"task": task}, watches_writes=watches_writes):
            clamp(model, task)
            count(model, task)
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        fail()
    assert everything(model, task) == before


@pytest.mark.parametrize("watches_writes", [True, False, None])
@pytest.mark.parametrize("deed", [clamp, clamp_data, swap_data])
def test_trial_when_a_parameter_was_written_to_then_it_is_named(deed, watches_writes):
    model = model_of_all_kinds()
    with Trial(model, watches_writes=watches_writes) as trial:
        deed(model, None)
    assert list(trial.parameters) == ["0.weight"]


@pytest.mark.parametrize("watches_writes", [True, False, None])
def test_trial_when_code_other_than_torchs_wrote_to_a_parameter_then_its_copy_is_restored(watches_writes, monkeypatch):
    monkeypatch.setattr("dure.strategies.state.trial._MOST_COPIED_BYTES", 0)
    model = nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    with Trial(model, watches_writes=watches_writes, copies_parameters=True) as trial:
        model.weight.data.numpy()[:] = 7.0
    assert list(trial.parameters) == ["weight"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_trial_when_a_write_changes_no_value_then_it_is_named_all_the_same():
    model = model_of_all_kinds()
    with Trial(model) as trial:
        model[0].weight.data.clamp_(-100, 100)
    assert list(trial.parameters) == ["0.weight"]


@pytest.mark.parametrize("watches_writes", [True, False, None])
def test_trial_when_nothing_was_done_to_data_then_they_are_not_written_to(watches_writes):
    data = TensorDataset(torch.zeros(8))
    with Trial(nn.Linear(1, 1), {"data": data}, watches_writes=watches_writes):
        pass
    assert data.tensors[0]._version == 0  # of a file in memory, a write is a segmentation fault


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # 2.11
@pytest.mark.parametrize("watches_writes", [True, False, None])
def test_trial_when_a_large_tensor_was_written_to_then_it_is_as_before_and_sparse_ones_are_left_alone(watches_writes):
    bank = torch.zeros(3 << 19)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (5000, 5000), check_invariants=True)
    holder = types.SimpleNamespace(bank=bank, sparse=sparse, array=np.zeros(3 << 19))
    with Trial(nn.Linear(1, 1), {"task": holder}, watches_writes=watches_writes) as trial:
        bank[:4] = 1
        bank.data[1000:1004] = 1
        holder.array[0] = 1
    assert trial.state.keys() == {"task.bank", "task.array"}
    assert trial.left == ["task.array"]
    assert not bank.any()


def test_trial_tells_buffers_with_their_values_and_plain_state():
    model, task = model_of_all_kinds(), Task()
    with Trial(model, {"task": task}, seed=3) as trial:
        forward(model, task)
        count(model, task)
        mean = model[1].running_mean.clone()
    assert torch.equal(trial.buffers["1.running_mean"], mean)
    assert sorted(trial.state) == ["model.note", "task.calls"]
    assert list(trial.parameters) == []


def test_trial_when_hooks_come_and_go_then_they_are_as_before():
    model = nn.Sequential(nn.Linear(1, 1))
    kept = model[0].register_forward_hook(lambda *_: None)
    with Trial(model):
        kept.remove()
        model.register_forward_hook(lambda module, inputs, output: output * 2)
        model.register_state_dict_pre_hook(lambda *_: None)
    assert list(model[0]._forward_hooks) == [kept.id]
    assert not model._forward_hooks
    assert not model._state_dict_pre_hooks


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([torch.nan], [torch.nan], True),
        ([torch.nan], [0.0], False),
        ([torch.inf], [torch.finfo(torch.float32).max], False),
        ([1j], [1j], True),
        ([], [], True),
        ([True], [1], False),
    ],
)
def test_is_equal_of_values_that_are_seldom(one, other, expected):
    assert is_equal(torch.tensor(one), torch.tensor(other)) is expected


def test_is_equal_of_sparse_and_conjugated_tensors():
    sparse = torch.eye(2).to_sparse()
    assert is_equal(sparse, sparse.clone())
    assert not is_equal(sparse, 2 * sparse)
    assert is_equal(torch.tensor([1j]).conj(), torch.tensor([-1j]))


def test_trial_when_parameters_share_a_storage_then_the_one_that_was_written_to_is_put_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    flat = torch.zeros(12)
    for index, parameter in enumerate([model[0].weight, model[0].bias, model[1].weight]):
        parameter.data = flat[4 * index : 4 * index + parameter.numel()].view_as(parameter)
    with Trial(model, keeps_gradients=False) as trial:
        model[0].weight.data.add_(1)
        model[1].weight.detach()[0].add_(1)
    assert list(trial.parameters) == ["0.weight", "1.weight"]
    assert not flat.any()


def test_tensor_of_inference_mode_is_watched_by_its_values():
    with torch.inference_mode():
        held = types.SimpleNamespace(table=torch.zeros(3))
    state = ObjectState({"held": held})
    assert state.changed() == {}
    with torch.inference_mode():
        held.table.add_(1)
    assert list(state.changed()) == ["held.table"]


def with_buffers() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("count", torch.zeros(()))
    model.register_buffer("later", None)
    return model


def test_buffers_that_were_written_to_replaced_set_or_registered_are_named_and_put_back():
    model = with_buffers()
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    kept = KeptBuffers(model)
    assert kept.changed() == []
    model.count = model.count + 1
    model[1].running_mean.add_(1)
    model.later = torch.ones(2)
    model[0].register_buffer("new", torch.ones(1))
    assert sorted(kept.changed()) == ["0.new", "1.running_mean", "count", "later"]
    kept.put_back()
    assert kept.changed() == []
    assert model.later is None
    assert dict(model.named_buffers()).keys() == before.keys()
    for name, buffer in model.named_buffers():
        assert buffer is before[name][0]
        assert torch.equal(buffer, before[name][1])


@pytest.mark.parametrize("shape", [(0,), (), (1, 3)])
def test_trial_when_code_resizes_a_buffer_or_a_tensor_of_the_task_then_both_are_as_before(shape):
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("highest", torch.full(shape, 2.0))
    task = types.SimpleNamespace(highest=torch.full(shape, 2.0))
    kept = KeptBuffers(model)
    with Trial(model, {"task": task}) as trial:
        for tensor in (model.highest, task.highest):
            tensor.resize_(4, 2).fill_(1)
        model(torch.ones(1, 2)).sum().backward()
    assert trial.buffers["highest"].shape == (4, 2)
    assert list(trial.state) == ["task.highest"]
    assert [parameter.grad for parameter in model.parameters()] == [None, None]
    model.highest.resize_(5)
    kept.put_back()
    assert all(torch.equal(tensor, torch.full(shape, 2.0)) for tensor in (model.highest, task.highest))


def test_buffers_that_are_not_selected_stay_as_they_are():
    model = with_buffers()
    kept = KeptBuffers(model, lambda name: name == "count")
    model.count.add_(1)
    model[1].running_mean = model[1].running_mean + 1
    assert kept.changed() == ["count"]
    kept.put_back()
    assert model.count == 0
    assert model[1].running_mean.tolist() == [1, 1]


@pytest.mark.parametrize(("size", "num_samples"), [(8, 8), (1024, 8), (8, 2**20)])
def test_trial_when_it_may_copy_then_only_small_tensors_are_copied(size, num_samples):
    data = TensorDataset(torch.zeros(num_samples))
    with Trial(nn.Linear(size, 1024), {"data": data}, watches_writes=None) as trial:
        assert bool(trial._writes.before) == (size == num_samples)


def test_trials_when_they_share_their_state_then_each_begins_with_what_is_true():
    model, task = model_of_all_kinds(), types.SimpleNamespace(seen=[], calls=0)
    with sharing_state():
        states = []
        for change in (lambda: task.seen.append(1), lambda: setattr(task, "calls", 5), lambda: None):
            with Trial(model, {"task": task}) as first:
                task.seen.append("inside")
            states.append(first._plain)
            change()
            with Trial(model, {"task": task}) as again:
                task.seen, task.calls = [], -1
            states.append(again._plain)
    assert (task.seen, task.calls) == ([1], 5)
    assert [one is other for one, other in itertools.pairwise(states)] == [False, True, False, True, True]
    with Trial(model, {"task": task}) as apart:
        pass
    assert apart._plain is not states[-1]


class Unreadable:
    """Object whose attributes cannot be looked at."""

    @property
    def __dict__(self):
        raise RuntimeError("not now")


def test_trial_when_it_cannot_begin_then_nothing_is_left_of_it():
    model, before = model_of_all_kinds(), torch.get_rng_state()
    trial = Trial(model, {"task": Unreadable()}, seed=0)
    with pytest.raises(RuntimeError, match="not now"), trial:
        pass
    assert torch.equal(torch.get_rng_state(), before)
