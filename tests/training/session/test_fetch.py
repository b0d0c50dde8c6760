"""Batches from indices: each sample's draws are its own, in whatever company it is fetched."""

import multiprocessing
import random
import socket
import sys
import threading
from contextlib import nullcontext
from functools import partial
from multiprocessing import resource_sharer
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, default_collate

import dure
from dure.data import TensorData
from dure.data.randomness import sample_uniform
from dure.errors import DataInvalid, TaskInvalid
from dure.strategies.sections.absent_tensors import made_absent
from dure.training.session import loader as loader_module
from dure.training.session.loader import FetchRequest, Loader, SampleFetch, check_dataset

CPU = torch.device("cpu")
NUM_SAMPLES = 40


class Drawing(Dataset):
    """Gives its index with a draw from each global generator."""

    def __init__(self, from_index=0):
        self.from_index = from_index

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        if index < self.from_index:
            return index, 0.0, 0.0, 0.0
        return index, random.random(), float(np.random.random()), float(torch.rand(()))


class Batched(Drawing):
    """Fetches by batch, with draws that belong to the samples."""

    def __getitems__(self, indices):
        return torch.tensor(indices), sample_uniform(indices, 2)


class Predicting(Drawing):
    """Gives a value of a weight that is on another rank."""

    weight = made_absent(torch.ones(2), "0.weight")

    def __getitem__(self, index):
        return index, float(self.weight[0])


class PredictingBatches(Predicting):
    def __getitems__(self, indices):
        return torch.tensor(indices), self.weight[indices]


@pytest.mark.parametrize("data", [Predicting(), PredictingBatches()], ids=["samples", "batches"])
def test_data_that_read_weights_of_another_rank_are_refused(data):
    with pytest.raises(TaskInvalid, match=r"the weights of 0\.weight are on another rank"):
        fetched(data, [[0, 1]])


def fetched(data, batches, *, epoch=3, seed=5, workers=0):
    """Return what each sample of the batches was, by index."""
    requests = [FetchRequest(epoch, np.array(batch)) for batch in batches]
    loader = Loader(SampleFetch(data, default_collate, seed), CPU, workers)
    samples = {}
    for index, *draws in loader.batches(iter(requests)):
        for row, i in enumerate(index.tolist()):
            samples[i] = [draw[row].tolist() for draw in draws]
    return samples


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_loaders_when_the_program_starts_processes_otherwise_then_data_need_not_be_picklable(method):
    class Local(Drawing):
        pass

    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=True)
    try:
        assert fetched(Local(), [[0, 1], [2]], workers=1).keys() == {0, 1, 2}
    finally:
        multiprocessing.set_start_method(before, force=True)


def cut(indices, size):
    return [indices[i : i + size] for i in range(0, len(indices), size)]


@pytest.mark.parametrize(("factor", "num_ahead"), [(None, 2), (5, 5)])
def test_loaders_fetch_as_far_ahead_as_they_are_told(factor, num_ahead):
    def requests():
        for index in range(20):
            asked.append(index)
            yield FetchRequest(0, np.arange(index, index + 1))

    asked = []
    loader = Loader(SampleFetch(Drawing(), default_collate, 0), CPU, 1, factor)
    batches = loader.batches(requests())
    next(batches)
    assert len(asked) == num_ahead + 1
    del batches


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "data",
    [Drawing(), Batched(), Subset(Drawing(), range(NUM_SAMPLES)), ConcatDataset([Drawing()])],
    ids=["one by one", "batched", "subset", "concatenated"],
)
def test_what_is_drawn_for_a_sample_does_not_depend_on_its_batch_or_worker(data, workers):
    together = fetched(data, [list(range(NUM_SAMPLES))])
    shuffled = np.random.default_rng(0).permutation(NUM_SAMPLES).tolist()
    assert fetched(data, cut(shuffled, 3), workers=workers) == together
    assert len({str(draws) for draws in together.values()}) == NUM_SAMPLES


@pytest.mark.parametrize("data", [Drawing(), Batched()])
def test_draws_differ_between_epochs_and_seeds(data):
    indices = [list(range(NUM_SAMPLES))]
    assert fetched(data, indices, epoch=1) != fetched(data, indices, epoch=2)
    assert fetched(data, indices, seed=1) != fetched(data, indices, seed=2)


def test_a_batched_fetch_that_begins_to_draw_late_is_found_at_the_next_probe():
    """The draws of a Subset whose first samples draw nothing are seen at one of the first eight fetches."""
    subset = Subset(Drawing(from_index=10), range(NUM_SAMPLES))
    by_threes = fetched(subset, cut(list(range(NUM_SAMPLES)), 3))
    assert by_threes == fetched(Drawing(from_index=10), cut(list(range(NUM_SAMPLES)), 7))


@pytest.mark.parametrize("data", [Drawing(), Batched(), Subset(Drawing(), range(NUM_SAMPLES))])
def test_fetching_leaves_the_global_generators_as_they_were(data):
    def draws():
        return random.random(), np.random.random(), float(torch.rand(()))

    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draws()
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    fetched(data, cut(list(range(NUM_SAMPLES)), 3))
    assert draws() == expected


def test_tensor_data_of_torch_and_of_dure_are_fetched_by_one_index():
    columns = torch.arange(12).view(6, 2), torch.arange(6)
    request = FetchRequest(0, np.array([4, 1]))
    task_collate = SmallTask().collate
    for data in (TensorDataset(*columns), TensorData(*columns)):
        x, y = SampleFetch(data, task_collate, 0).__getitems__(request)
        assert (x.tolist(), y.tolist()) == ([[8, 9], [2, 3]], [4, 1])


def test_a_collate_of_the_tasks_own_is_used_for_torchs_tensor_data_too():
    data = TensorDataset(torch.arange(6))
    request = FetchRequest(0, np.array([4, 1]))
    assert SampleFetch(data, lambda samples: len(samples), 0).__getitems__(request) == 2


class SmallTask(dure.Task):
    def build_model(self):
        return torch.nn.Linear(1, 1)

    def train_data(self):
        return Drawing()

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        return model(batch).mean()


class Lists(Drawing):
    """Answers a batched fetch with a list of samples, as torch's convention has it."""

    def __getitems__(self, indices):
        return [(index, 2 * index) for index in indices]


def test_a_list_from_a_batched_fetch_is_collated():
    index, double = SampleFetch(Lists(), default_collate, 0).__getitems__(FetchRequest(0, np.array([3, 5])))
    assert (index.tolist(), double.tolist()) == ([3, 5], [6, 10])


class Failing(Drawing):
    def __getitem__(self, index):
        raise FileNotFoundError(f"sample{index}.jpg is not there")


def test_an_error_in_the_data_is_the_users_own():
    with pytest.raises(FileNotFoundError, match=r"sample2\.jpg is not there") as caught:
        fetched(Failing(), [[2]])
    assert caught.value.__notes__ == ["while fetching sample 2 of the data"]


class Ragged(Drawing):
    def __getitem__(self, index):
        return torch.zeros(index)


def test_samples_that_do_not_go_together_are_named():
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size") as caught:
        fetched(Ragged(), [[2, 4, 3]])
    assert caught.value.__notes__ == ["while collating samples 2, 4, 3 of the data"]


class Graded(Drawing):
    """Gives the level that it has when it is read, which a schedule or a loss may set."""

    level = 0

    def __getitem__(self, index):
        return self.level


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batch_when_data_follow_what_steps_set_then_is_that_of_its_step_on_every_device(device, monkeypatch):
    # the host plays the accelerator and its streams
    monkeypatch.setattr(loader_module, "to_device", lambda batch, device: batch)
    monkeypatch.setattr(loader_module, "tensors_in", lambda batch: [])
    monkeypatch.setattr(loader_module, "_pinned", lambda tensor: tensor)
    monkeypatch.setattr(torch, "Stream", lambda device: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Mock())
    data = Graded()
    requests = (FetchRequest(0, np.array([index])) for index in range(4))
    loader = Loader(SampleFetch(data, default_collate, 0), torch.device(device), 0)
    levels = []
    for batch in loader.batches(requests):
        levels.append(int(batch))
        data.level += 1
    assert levels == [0, 1, 2, 3]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class NoLength:
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Stream(), "T.train_data returned Stream, an IterableDataset: a stream has no sample indices, so its order"),
        (NoLength(), "T.train_data returned NoLength: give a map-style dataset"),
        ({"x": [1, 2]}, "T.train_data returned dict, whose keys are no sample numbers: give one map-style dataset"),
        (None, "T.train_data returned NoneType: give a map-style dataset"),
        ([], r"T.train_data returned an empty dataset \(list\): there is nothing to use; check its path or filter"),
    ],
)
def test_data_that_a_run_cannot_be_defined_on_is_refused_in_one_sentence(data, said):
    with pytest.raises(DataInvalid, match=said):
        check_dataset(data, "T.train_data")


def test_plain_lists_are_data_too():
    check_dataset([1, 2, 3], "T.train_data")
    check_dataset({0: "a", 1: "b"}, "T.train_data")


@pytest.mark.parametrize(("is_of_loaders", "num_reported"), [(True, 0), (False, 1)])
def test_rank_killed_while_it_receives_a_batch_then_its_loader_reports_nothing(
    is_of_loaders, num_reported, monkeypatch
):
    reported, served = [], threading.Event()
    report = partial(loader_module._report_unless_rank_lost, lambda *raised: reported.append(raised))

    def noting(*raised):
        report(*raised) if is_of_loaders else reported.append(raised)
        served.set()

    monkeypatch.setattr(sys, "excepthook", noting)
    sharer = resource_sharer._ResourceSharer()
    address, _ = sharer.register(lambda connection, pid: None, lambda: None)
    with socket.socket(socket.AF_UNIX) as rank:
        rank.connect(address)  # and closed before it has said anything
    assert served.wait(10)
    sharer.stop()
    assert len(reported) == num_reported


def test_connection_that_a_task_lost_in_a_loader_is_reported():
    reported = []
    try:
        raise ConnectionResetError("of the task")
    except ConnectionResetError:
        loader_module._report_unless_rank_lost(lambda *raised: reported.append(raised), *sys.exc_info())
    assert str(reported[0][1]) == "of the task"
