"""Declarations that would be false: of tasks that come out as on one device, the record says nothing."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.nn import functional

import dure
from tests.conformance.cases import train_case
from tests.conformance.zoo.cell import reference_of, run_cell
from tests.conformance.zoo.feature import STEPS, Feature, Samples, ZooTask, chain


class NoiseInEvaluation(ZooTask):
    """Draws in evaluations, and there alone."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return functional.mse_loss(model(x if model.training else x + torch.randn_like(x)), y)


class SoftmaxOverDocuments(ZooTask):
    """Takes the last bias out again, so that its gradient is rounding."""

    def train_data(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(22, 5, 6, generator=generator, dtype=torch.float64)
        return Samples(x, torch.rand(22, 5, generator=generator, dtype=torch.float64))

    def eval_data(self) -> Any:
        return None

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, grades = batch
        return -(grades.softmax(1) * model(x)[..., 0].log_softmax(1)).sum(1).mean()


class KeepsWorldSize(ZooTask):
    """Reads how many ranks there are, for its messages."""

    def build_model(self) -> nn.Module:
        self.num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        return chain()


class FixedNorm(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


class FrozenNorm(ZooTask):
    """Has a BatchNorm of fixed statistics, as is usual in fine-tuning."""

    def build_model(self) -> nn.Module:
        first, *others = chain()
        return nn.Sequential(first, FixedNorm(8).double(), *others)


class FrozenBackbone(ZooTask):
    """Has a pretrained part with dropout that stays in evaluation mode, as is usual in fine-tuning."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5)).double().requires_grad_(False)
            self.head = chain()

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.backbone.eval()
            return self

        def forward(self, x: Any) -> Any:
            return self.head(self.backbone(x))

    def build_model(self) -> nn.Module:
        return self.Model()

    def build_optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.head.parameters(), lr=0.1)


class FollowingTeacher(ZooTask):
    """Keeps a teacher that begins as a copy of the model and follows it in the loss."""

    def build_model(self) -> nn.Module:
        model = chain()
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        with torch.no_grad():
            for own, followed in zip(self.teacher.parameters(), model.parameters(), strict=True):
                own.lerp_(followed, 0.1 if model.training else 0.0)
        predicted = model(x)
        return functional.mse_loss(predicted, y) + functional.mse_loss(predicted, self.teacher(x))


class LateTeacher(ZooTask):
    """Copies the model in the first call of the loss, as a teacher that follows it."""

    teacher: nn.Module | None = None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        if self.teacher is None:
            self.teacher = copy.deepcopy(model).requires_grad_(False)
        with torch.no_grad():
            for own, followed in zip(self.teacher.parameters(), model.parameters(), strict=True):
                own.lerp_(followed, 0.1 if model.training else 0.0)
        predicted = model(x)
        return functional.mse_loss(predicted, y) + functional.mse_loss(predicted, self.teacher(x))


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_teacher_that_the_loss_copies_from_the_model_then_no_ranks_own_state_is_declared(
    strategy: str, tmp_path: Path
) -> None:
    run = train_case(tmp_path, LateTeacher(), strategy, 2, **STEPS)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert [text for text in declared if not text.startswith("state that no checkpoint holds: task.teacher")] == []


class FlagOfSchedule(FollowingTeacher):
    """Has a schedule too, which sets a flag for some steps, by which the loss stays a mean over samples."""

    def build_schedule(self, optimizer: Any, total_samples: int) -> Any:
        def schedule(samples_seen: int) -> float:
            self.is_heavy = 22 <= samples_seen < 37
            return 1.0

        return schedule

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * (2.0 if getattr(self, "is_heavy", False) else 1.0)


class OldNorms(ZooTask):
    """Has layers whose weights each forward pass computes, and is evaluated."""

    def build_model(self) -> nn.Module:
        model = chain()
        nn.utils.prune.l1_unstructured(model[0], "weight", 0.3)
        nn.utils.weight_norm(model[2])
        return model


class WholeBatchLoss(ZooTask):
    """Mixes the samples of a batch in the loss, draws there and in collate, and has a buffer that the loss moves."""

    def build_model(self) -> nn.Module:
        model = chain()
        model.register_buffer("center", torch.zeros(3, dtype=torch.float64))
        return model

    def collate(self, samples: Any) -> Any:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        return x * (torch.rand(x.shape) < 0.8), y

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        predicted = model(x)
        if model.training:
            model.center.lerp_(predicted.detach().mean(0), 0.1)
            y = y + 0.1 * torch.randn_like(y)
        return functional.cross_entropy((predicted - model.center) @ y.T, torch.arange(len(x)))


class PenaltyNowAndThen(ZooTask):
    """Adds a penalty in every fourth call of its loss."""

    def build_model(self) -> nn.Module:
        self.calls = 0
        return chain()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls += model.training
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        return super().loss(model, batch) + (0.1 * penalty if self.calls % 4 == 3 else 0.0)


class WeighedByHistory(ZooTask):
    """Weighs its losses by their means over a few steps, which it lists."""

    def build_model(self) -> nn.Module:
        self.calls, self.total, self.means = 0, 0.0, [1.0]
        return chain()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch) * self.means[-1]
        if model.training:
            self.calls, self.total = self.calls + 1, self.total + loss.item()
            if self.calls % 4 == 0:
                self.means.append(self.total / 4)
                self.total = 0.0
        return loss


class CentredGradients(ZooTask):
    """Has hooks that take the mean out of each row of a weight's gradient."""

    def build_model(self) -> nn.Module:
        model = chain()
        for weight in [parameter for parameter in model.parameters() if parameter.dim() == 2]:
            weight.register_hook(lambda gradient: gradient - gradient.mean(1, keepdim=True))
        return model


class PaddedByCollate(ZooTask):
    """Pads sequences to the longest of a batch, which its convolution and its mean see."""

    def train_data(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return [(torch.randn(2 + n % 5, 6, generator=generator).double(), torch.ones(3).double()) for n in range(22)]

    def eval_data(self) -> Any:
        return None

    def collate(self, samples: Any) -> Any:
        rows, targets = zip(*samples, strict=True)
        return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.stack(targets)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return functional.mse_loss(model(x).mean(1), y)


class NestedBatch(ZooTask):
    """Has rows of several lengths in one nested tensor."""

    def collate(self, samples: Any) -> Any:
        rows, targets = zip(*samples, strict=True)
        lengths = [2 + int(row[0] > 0) for row in rows]
        cut = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        return torch.nested.nested_tensor(cut, layout=torch.jagged), torch.stack(targets)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        padded = torch.nested.to_padded_tensor(x, 0.0)
        return functional.mse_loss(model(functional.pad(padded, (0, 6 - padded.shape[1]))), y)


class RoundedLoss(ZooTask):
    """Returns its loss in a less precise dtype than the model's."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch).float()


class NoiseInCollate(ZooTask):
    """Adds noise to the inputs in collate."""

    def collate(self, samples: Any) -> Any:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        return x + 0.1 * torch.randn_like(x), y


class Positions(nn.Module):
    """Adds a table of positions, which it makes when it is first called."""

    table: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or self.table.shape[0] < x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype).cos()
        return x + self.table[: x.shape[1]]


class TableOfPositions(ZooTask):
    def build_model(self) -> nn.Module:
        return nn.Sequential(Positions(), *chain())


TASKS = (NoiseInEvaluation, SoftmaxOverDocuments, KeepsWorldSize, FollowingTeacher, FlagOfSchedule, OldNorms)
CASES = [(task, name) for task in (*TASKS, TableOfPositions) for name in ("ddp", "fsdp", "pipeline")]
CASES += [(FrozenBackbone, name) for name in ("ddp", "dp", "fsdp", "pipeline", "rpc_model")]
CASES += [(NoiseInCollate, name) for name in ("dp", "balanced_dp", "model_parallel")]
CASES += [(WholeBatchLoss, name) for name in ("dp", "model_parallel", "tensor_parallel")]
CASES += [(PenaltyNowAndThen, "dp"), (PenaltyNowAndThen, "ddp"), (NestedBatch, "ddp"), (WeighedByHistory, "dp")]
CASES += [(CentredGradients, "dp"), (PaddedByCollate, "dp")]
CASES += [(FrozenNorm, name) for name in ("ddp", "dp", "fsdp", "pipeline", "parameter_server")]
CASES.remove((OldNorms, "fsdp"))  # refused
CASES.remove((FlagOfSchedule, "pipeline"))  # refused, as the next one
CASES.remove((FollowingTeacher, "pipeline"))  # refused: the teacher follows weights of which a stage has a part


def _marked() -> list[Any]:
    """Return the cases; each task is among the fast tests under its first strategy."""
    first = dict(reversed(CASES))
    return [pytest.param(*case, marks=[] if first[case[0]] == case[1] else pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("task", "strategy"), _marked())
def test_task_when_it_is_exact_then_nothing_is_declared(task: type[ZooTask], strategy: str, tmp_path: Path) -> None:
    feature = Feature(name=task.__name__, group="", title="", task=task, settings={"eval_every_epochs": 1.0})
    reference = reference_of(feature, tmp_path)
    verdict = run_cell(feature, strategy, "straight", reference, tmp_path)
    assert verdict.kind == "exact", verdict
    for summary in tmp_path.glob("*/summary.json"):
        assert json.loads(summary.read_text())["not_preserved"] == []


class OldSpectralNorm(ZooTask):
    """Has a layer whose weight shares the memory of the one that it is computed from, until the first forward pass."""

    def build_model(self) -> nn.Module:
        model = chain()
        nn.utils.spectral_norm(model[2])
        return model


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "parameter_server"])
def test_weights_when_forward_computes_them_then_they_do_not_count_as_sharing_memory(
    strategy: str, tmp_path: Path
) -> None:
    feature = Feature(name="OldSpectralNorm", group="", title="", task=OldSpectralNorm, declares=("buffers learned",))
    reference = reference_of(feature, tmp_path)
    verdict = run_cell(feature, strategy, "straight", reference, tmp_path)
    assert verdict.kind == "exact", verdict


class NeedsGroup(ZooTask):
    """Asks for the number of ranks where there may be none to ask."""

    def train_data(self) -> Any:
        assert torch.distributed.get_world_size() > 1
        return super().train_data()


class CountedByBoth(ZooTask):
    """Has a number that evaluations change, and from the third step on the loss too, which reads it."""

    def build_model(self) -> nn.Module:
        self.calls, self.number = 0, 0.0
        return chain()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls += model.training
        if not model.training or self.calls > 7:
            self.number += 0.01
        return super().loss(model, batch) * (1 + self.number * model.training)


class TeacherInBuffers(ZooTask):
    """Keeps copies of the parameters in buffers, which follow them in the loss."""

    def build_model(self) -> nn.Module:
        model = chain()
        self.names = {name: f"teacher_{number}" for number, (name, _) in enumerate(model.named_parameters())}
        for name, parameter in [*model.named_parameters()]:
            model.register_buffer(self.names[name], parameter.detach().clone())
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        predicted = model(x)
        followed = {name: model.get_buffer(buffer) for name, buffer in self.names.items()}
        with torch.no_grad():
            taught = torch.func.functional_call(model, followed, (x,))
            for name, parameter in model.named_parameters():
                followed[name].lerp_(parameter, 0.1 if model.training else 0.0)
        return functional.mse_loss(predicted, y) + functional.mse_loss(predicted, taught)


class MasksInCollate(ZooTask):
    """Draws in collate which targets count."""

    def collate(self, samples: Any) -> Any:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        counts = torch.rand(len(x)) < 0.8
        counts[0] = True
        return x, y, counts

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y, counts = batch
        return dure.Sum(functional.mse_loss(model(x)[counts], y[counts], reduction="sum"), 3 * int(counts.sum()))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_batch_when_collate_draws_then_the_loss_is_not_blamed(strategy: str, tmp_path: Path) -> None:
    run = train_case(tmp_path, MasksInCollate(), strategy, 2, **STEPS)
    (text,) = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert text.startswith("random numbers in collate: drawn for each of the 2 parts")


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (NeedsGroup, "fails with ValueError where it is the only process"),
        (CountedByBoth, "(task.number)"),
        (TeacherInBuffers, "buffers learned in forward (teacher_"),
    ],
)
def test_task_when_it_may_differ_then_that_is_declared(task: type[ZooTask], said: str, tmp_path: Path) -> None:
    settings = {**STEPS, "eval_every_epochs": 1.0, "microbatch_size": 2}
    run = train_case(tmp_path, task(), "ddp", 2, **settings)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert [text for text in declared if said in text and "evaluation" not in text]


class RareGap(ZooTask):
    """Leaves one of many samples out of its batch."""

    NUM_SAMPLES, GAP = 3000, 1307

    def __init__(self, *, gives_count: bool = False) -> None:
        super().__init__()
        self.gives_count = gives_count

    def train_data(self) -> Any:
        x = torch.randn(self.NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return [None if index == self.GAP else row for index, row in enumerate(x)]

    def eval_data(self) -> Any:
        return None

    def collate(self, samples: Any) -> Any:
        return torch.stack([sample for sample in samples if sample is not None])

    def build_model(self) -> nn.Module:
        return nn.Linear(6, 1).double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        losses = (model(batch) - batch.sum(1, keepdim=True)).square()
        return dure.Sum(losses.sum(), len(batch)) if self.gives_count else losses.mean()


class RareGapInLayers(RareGap):
    """Has an evaluation, and layers to cut."""

    def eval_data(self) -> Any:
        return self.train_data()[:8]

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()


@pytest.mark.parametrize("gives_count", [False, True], ids=["mean", "sum and count"])
def test_sample_when_collate_leaves_it_out_is_declared_unless_the_loss_counts(gives_count, tmp_path):
    task = RareGap(gives_count=gives_count)
    run = train_case(tmp_path, task, "ddp", 2, samples=3000, global_batch_size=100, microbatch_size=50)
    said = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert [text for text in said if "a batch of 50 samples had 49 rows" in text] == ([] if gives_count else said)
    assert bool(said) is not gives_count


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_sample_that_one_rank_alone_misses_is_declared_where_ranks_compare_losses_together(strategy, tmp_path):
    task = RareGap() if strategy == "fsdp" else RareGapInLayers()
    settings = {"samples": 6000, "global_batch_size": 100, "checkpoint": {"every_samples": 1500}}
    run = train_case(tmp_path, task, strategy, 2, **settings)
    (said,) = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert said.startswith("the loss is no mean over samples: a batch of")


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_loss_when_it_is_rounded_then_late_comparisons_allow_for_it(strategy: str, tmp_path: Path) -> None:
    run = train_case(tmp_path, RoundedLoss(), strategy, 2, **STEPS, checkpoint={"every_samples": 5})
    assert json.loads((run / "summary.json").read_text())["not_preserved"] == []
