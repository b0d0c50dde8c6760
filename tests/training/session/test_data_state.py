"""State of a data set that no checkpoint holds."""

import json
from collections import deque
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset

import dure
from dure.errors import WorkerFailed
from dure.training.session.data_state import DataState
from dure.training.session.loader import SampleFetch
from tests.conformance.cases import largest_difference, train_case, weights_of
from tests.conformance.zoo.feature import STEPS, Samples, ZooTask, data


class Cached(Dataset[Any]):
    """Samples that are kept when they have been read, with noise that was drawn then, if any."""

    def __init__(self, noise: float) -> None:
        self.rows, self.noise = torch.arange(4.0), noise
        self.cache: dict[int, Tensor] = {}
        self.scratch = torch.zeros(1)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        self.scratch.fill_(index)
        if index not in self.cache:
            self.cache[index] = self.rows[index] + self.noise * torch.randn(())
        return self.cache[index]


def read(each: Any, index: int, epoch: int) -> Any:
    return SampleFetch(each, list, 3).sample(index, epoch)


@pytest.mark.parametrize(("noise", "is_kept"), [(0.0, False), (1.0, True)])
@pytest.mark.parametrize("wrap", [lambda each: each, lambda each: Subset(each, [1, 0])])
def test_samples_when_they_are_cached_then_only_kept_draws_count(noise: float, is_kept: bool, wrap: Any) -> None:
    cached = Cached(noise)
    assert DataState(wrap(cached)).keeps_random_values(read) == is_kept
    assert not cached.cache  # copies were read


def test_samples_when_they_draw_for_each_read_then_nothing_is_kept() -> None:
    class Drawing(Samples):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0] + torch.randn(())

    assert not DataState(Drawing(*data())).keeps_random_values(read)


def test_tensors_when_written_to_or_replaced_then_they_have_changed() -> None:
    samples = Samples(torch.zeros(3), torch.zeros(3))
    state = DataState(Subset(samples, [0, 1]))
    assert state.changed() == []
    samples.columns[1].add_(1)
    assert state.changed() == ["data.dataset.columns.1"]
    state.record()
    samples.columns = torch.zeros(3), samples.columns[1]
    assert state.changed() == ["data.dataset.columns.0"]


def test_tensors_when_reading_changes_them_then_they_are_no_state() -> None:
    cached = Cached(0.0)
    state = DataState(cached)
    _ = cached[0]
    state.leave_out_changed()
    _ = cached[1]
    assert state.changed() == []


def test_containers_when_an_item_is_overwritten_then_they_have_changed_and_not_when_a_cache_is_filled() -> None:
    cached = Cached(0.0)
    vars(cached).update(labels=[0, 1, 2, 3], weights=np.ones(4), images=[None, None])
    state = DataState(cached)
    vars(cached)["images"][1] = torch.ones(2)
    cached.cache[1] = torch.ones(())
    assert state.changed() == []
    vars(cached)["labels"][2], vars(cached)["weights"][0] = 5, 0.5
    assert state.changed() == ["data.labels", "data.weights"]


class Counting(Dataset[Any]):
    """Samples that follow from how many were read, and from which was read last."""

    def __init__(self) -> None:
        self.reads, self.last, self.scale = 0, deque([-1], maxlen=1), float("nan")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        self.last.append(index)
        return torch.tensor([float(self.reads), float(self.last[0])])


def test_numbers_and_queues_when_each_read_changes_them_then_they_are_named_and_stay_as_they_are() -> None:
    counting = Counting()
    assert DataState(Subset(counting, [1, 0])).changed_by_reading(read) == ["data.dataset.reads", "data.dataset.last"]
    assert (counting.reads, list(counting.last)) == (0, [-1])
    assert DataState(Cached(1.0)).changed_by_reading(read) == []


def running_mean(samples: Any, x: Tensor) -> Tensor:
    samples.seen.append(float(x.mean()))
    return x - sum(samples.seen) / len(samples.seen)


def mean_in_an_array(samples: Any, x: Tensor) -> Tensor:
    samples.mean *= 0.9
    samples.mean += 0.1 * float(x.mean())
    return x - float(samples.mean[0])


def mean_in_a_tensor(samples: Any, x: Tensor) -> Tensor:
    samples.average.lerp_(x.mean(), 0.1)
    return x - samples.average


def pasted_at_random(samples: Any, x: Tensor) -> Tensor:
    if samples.seen and torch.rand(()) < 0.7:
        x = x + samples.seen[-1]
    samples.seen.append(float(x.mean()))
    return x


def pasted_in_an_object(samples: Any, x: Tensor) -> Tensor:
    return pasted_at_random(samples.transform, x)


def cached(samples: Any, x: Tensor) -> Tensor:
    return samples.cache.setdefault(float(x[0]), x + 1)


class Transform:
    """Transform with state of its own."""

    def __init__(self) -> None:
        self.seen: list[float] = []


class WithHistory(Samples):
    """Samples with places for what reading remembers."""

    def __init__(self, change: Any) -> None:
        super().__init__(*data())
        self.change, self.seen, self.mean, self.average = change, [], np.zeros(1), torch.zeros((), dtype=torch.float64)
        self.transform, self.cache = Transform(), {}

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return self.change(self, x), y


@pytest.mark.parametrize(
    "change", [running_mean, mean_in_an_array, mean_in_a_tensor, pasted_at_random, pasted_in_an_object]
)
def test_samples_when_they_follow_from_those_read_before_then_that_is_found_and_they_are_not_read(change: Any) -> None:
    samples = WithHistory(change)
    assert DataState(Subset(samples, range(20))).follows_from_other_reads(read)
    assert (samples.seen, samples.transform.seen, float(samples.mean[0]), float(samples.average)) == ([], [], 0.0, 0.0)


def test_samples_when_reading_fills_a_cache_then_they_do_not_follow_from_it() -> None:
    assert not DataState(WithHistory(cached)).follows_from_other_reads(read)
    assert not DataState(Cached(1.0)).follows_from_other_reads(read)


def test_data_set_when_it_closes_a_file_as_it_is_freed_then_no_copy_closes_it(tmp_path: Path) -> None:
    class Open(Samples):
        def __init__(self) -> None:
            super().__init__(*data())
            self.file = (tmp_path / "data").open("w+b")

        def __del__(self) -> None:
            self.file.close()

    samples = Open()
    state = DataState(samples)
    assert not state.follows_from_other_reads(read)
    assert not state.changed_by_reading(read)
    assert not state.keeps_random_values(read)
    del state
    assert not samples.file.closed


def test_data_set_when_a_thread_fills_its_queue_then_no_copy_waits_for_one_of_its_own() -> None:
    class Fed(Samples):
        def __init__(self) -> None:
            super().__init__(*data())
            self.items: Queue[int] = Queue()

        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0] * self.items.get(timeout=5)

    samples = Fed()
    state = DataState(samples)
    for _ in range(40):
        samples.items.put(1)
    assert not state.follows_from_other_reads(read)
    assert samples.items.qsize() < 40  # the copies share it


class PastesLast(ZooTask):
    """Pastes what was read before into each sample."""

    def train_data(self) -> Dataset[Any]:
        return WithHistory(pasted_at_random)


class CountsReads(ZooTask):
    """Samples become larger with the number of reads, from the ten thousandth on."""

    def train_data(self) -> Dataset[Any]:
        class Larger(Samples):
            def __init__(self, *columns: Tensor) -> None:
                super().__init__(*columns)
                self.reads = 0

            def __getitem__(self, index: int) -> Any:
                x, y = super().__getitem__(index)
                self.reads += 1
                return x * (1 + self.reads // 10_000), y

        return Larger(*data())


class Resampled(ZooTask):
    """Draws targets again in the second epoch."""

    def train_data(self) -> Any:
        self.samples = Samples(*data())
        return self.samples

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        def schedule(samples_seen: int) -> float:
            if samples_seen == 27:
                x, y = self.samples.columns
                self.samples.columns = x, y.flip(0)
            return 1.0

        return schedule


class RollsOut(ZooTask):
    """Writes the next state of each sample into the data, in its loss."""

    def train_data(self) -> Any:
        x, y = data()
        self.samples = Samples(x, y, torch.arange(len(x)))
        return self.samples

    def eval_data(self) -> Any:
        return Samples(*data(7, seed=2), torch.arange(7))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y, places = batch
        out = model(x)
        if model.training:
            self.samples.columns[0][places] = 0.9 * x
        return functional.mse_loss(out, y)


class FollowsTraining(ZooTask):
    """Shifts the targets of its evaluation by what training has seen."""

    def eval_data(self) -> Any:
        self.evaluated = Samples(*data(7, seed=2))
        return self.evaluated

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if model.training:
            self.evaluated.columns[1].add_(batch[1].mean())
        return super().loss(model, batch)


class ReadsIntoScratch(ZooTask):
    """Evaluation data that read into memory of their own."""

    def eval_data(self) -> Any:
        class Read(Samples):
            def __init__(self, *columns: Tensor) -> None:
                super().__init__(*columns)
                self.buffer = torch.zeros_like(columns[0][0])

            def __getitem__(self, index: int) -> Any:
                x, y = super().__getitem__(index)
                return self.buffer.copy_(x).clone(), y

        return Read(*data(7, seed=2))


class CachesNoise(ZooTask):
    """Keeps samples with the noise that they got when they were first read."""

    def train_data(self) -> Any:
        class Noisy(Samples):
            def __init__(self, *columns: Tensor) -> None:
                super().__init__(*columns)
                self.cache: dict[int, Any] = {}

            def __getitem__(self, index: int) -> Any:
                if index not in self.cache:
                    x, y = super().__getitem__(index)
                    self.cache[index] = x + torch.randn_like(x), y
                return self.cache[index]

        return Noisy(*data())


def test_run_when_the_last_stage_alone_changes_its_data_then_that_is_declared_too(tmp_path: Path) -> None:
    run = train_case(tmp_path, RollsOut(), "pipeline", 2, **STEPS)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert any(
        text.startswith("state that no checkpoint holds: data.columns.0 changed on the way") for text in declared
    )


class Numbered(Samples):
    """Samples with their indices, and labels in a list."""

    def __init__(self, *columns: Tensor) -> None:
        super().__init__(*columns)
        self.labels = columns[1].argmax(1).tolist()

    def __getitem__(self, index: int) -> Any:
        return index, self.columns[0][index], self.labels[index]


class CorrectsLabels(ZooTask):
    """Gives samples other labels, from the start or once the loss has been called ten times."""

    def __init__(self, *, after: int = 0) -> None:
        self.after, self.calls = after, 0

    def train_data(self) -> Any:
        self.rows = Numbered(*data())
        return self.rows

    def eval_data(self) -> Any:
        return Numbered(*data(7, seed=2))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        index, x, label = batch
        output = model(x)
        if model.training:
            self.calls += 1
            for number, found in zip(index.tolist(), output.argmax(1).tolist(), strict=True):
                if self.calls > self.after:
                    self.rows.labels[number] = found
        return functional.cross_entropy(output, label)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (0, "state that the loss keeps (task.rows.labels): each rank's own"),
        (10**6, None),
        (8, "state that began to change later (data.labels): if by the loss, by each part of a batch"),
    ],
)
def test_run_when_the_loss_changes_labels_of_its_data_then_that_is_declared(
    after: int, said: str | None, tmp_path: Path
) -> None:
    run = train_case(tmp_path, CorrectsLabels(after=after), "ddp", 2, **STEPS)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert (said in declared) == (said is not None)
    not_kept = [text for text in declared if text.startswith("state that no checkpoint holds: data.labels changed")]
    assert bool(not_kept) == (said is not None)


@pytest.mark.parametrize(
    "case",
    [
        (
            Resampled,
            "state that no checkpoint holds: data.columns.1 changed on the way",
            "state that began to change later (data.columns.1)",
        ),
        (
            FollowsTraining,
            "state that the loss keeps (task.evaluated.columns.1)",
            "state that no checkpoint holds: eval_data.columns.1 changed on the way",
        ),
        (ReadsIntoScratch,),
        (CachesNoise, "data: samples keep the random values that they had when they were first read"),
        (CountsReads, "state of the data set that changes with each read (data.reads)"),
        (ZooTask,),
    ],
)
def test_run_when_its_data_have_state_then_that_is_declared(case: Any, tmp_path: Path) -> None:
    task, *said = case
    run = train_case(tmp_path, task(), "ddp", 2, **STEPS)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert [text for text, begin in zip(declared, said, strict=True) if text.startswith(begin)] == declared


def test_run_when_samples_follow_from_those_read_before_then_that_is_declared(tmp_path: Path) -> None:
    run = train_case(tmp_path, PastesLast(), "ddp", 2, **STEPS)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert any(text.startswith("data: a sample follows from the samples that were read before it") for text in declared)


class ReadsWeights(Samples):
    """Samples that follow from the model's weights."""

    weight: Tensor | None = None

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        with torch.no_grad():
            return x if self.weight is None else x + 0.1 * self.weight[0].tanh(), y


class SamplesOfWeights(ZooTask):
    def train_data(self) -> Any:
        self.samples = ReadsWeights(*data())
        return self.samples

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        self.samples.weight = next(model.parameters())
        return super().build_optimizer(model)


def test_run_when_samples_follow_from_divided_weights_then_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="samples follow from weights of the model, of which a rank of fsdp") as e:
        train_case(tmp_path, SamplesOfWeights(), "fsdp", 2, **STEPS)
    assert e.value.exit_code == 2


class ListOfSamples(ZooTask):
    """Keeps its data in a list of its own, and smooths the targets in it."""

    def train_data(self) -> Any:
        self.samples = [(number, *row) for number, row in enumerate(zip(*data(), strict=True))]
        return self.samples

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        index, x, y = batch
        output = model(x)
        for number, found in zip(index.tolist(), output.detach(), strict=True):
            _, inputs, target = self.samples[number]
            self.samples[number] = number, inputs, 0.8 * target + 0.2 * found
        return functional.mse_loss(output, y)


def test_run_when_its_data_are_a_list_of_the_task_then_checkpoints_hold_it(tmp_path: Path) -> None:
    alone = train_case(tmp_path, ListOfSamples(), **STEPS)
    assert json.loads((alone / "summary.json").read_text())["not_preserved"] == []
    half = train_case(tmp_path, ListOfSamples(), **{**STEPS, "samples": 27})
    whole = Path(dure.train(ListOfSamples(), resume=half, quiet=True, samples=STEPS["samples"]).run)
    assert largest_difference(weights_of(whole), weights_of(alone)) < 1e-10
