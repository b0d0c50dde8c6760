"""Schedules that act on model and data: what their trial before training does is undone, and each acts once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.nn.utils.prune
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

import dure
from dure.errors import DureError
from tests.conformance.cases import train_case
from tests.conformance.zoo.cell import reference_of, run_cell
from tests.conformance.zoo.feature import FEATURES, IN, OUT, STEPS, Feature, Samples, ZooTask, chain, data
from tests.conformance.zoo.later import KeptMask


class ActsOnce(ZooTask):
    """Does something to the model in the second epoch, by its schedule."""

    def build_model(self) -> nn.Module:
        self.model = chain()
        self.has_acted = False
        return self.model

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        def schedule(samples_seen: int) -> float:
            if samples_seen >= 25 and not self.has_acted:
                self.has_acted = True
                self.act()
            return 1.0

        return schedule

    def act(self) -> None:
        raise NotImplementedError


class HooksForward(ActsOnce):
    def act(self) -> None:
        self.model[2].register_forward_hook(lambda module, args, output: output * 0.5)


class HooksGradient(ActsOnce):
    def act(self) -> None:
        self.model[2].weight.register_hook(lambda gradient: gradient * 0.2)


class Prunes(ActsOnce):
    def act(self) -> None:
        torch.nn.utils.prune.l1_unstructured(self.model[0], "weight", 0.3)


class ScalesData(ActsOnce):
    def train_data(self) -> Any:
        self.samples = Samples(*(column.clone() for column in data()))
        return self.samples

    def act(self) -> None:
        self.samples.columns[0].mul_(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("task", [HooksForward, HooksGradient, Prunes, ScalesData])
def test_schedule_when_it_acts_once_then_it_does_so_at_that_step_on_all_ranks(
    task: type[ZooTask], tmp_path: Path
) -> None:
    feature = Feature(name=task.__name__, group="", title="", task=task)
    reference = reference_of(feature, tmp_path)
    assert run_cell(feature, "ddp", "straight", reference, tmp_path).kind == "exact"


def test_schedule_when_it_acts_late_then_one_process_acts_at_that_step_too(tmp_path: Path) -> None:
    never = train_case(tmp_path, ZooTask(), **{**STEPS, "samples": 20})
    late = train_case(tmp_path, HooksForward(), **{**STEPS, "samples": 20})
    losses = [
        [json.loads(line)["loss_sum"] for line in (run / "rank0.jsonl").read_text().splitlines()]
        for run in (never, late)
    ]
    assert losses[0] == losses[1]


class LeavesTeacherOut(ZooTask):
    """Has a model whose own `state_dict` has only the layers that are trained."""

    def build_model(self) -> nn.Module:
        class Distilled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.student, self.teacher = chain(), chain().requires_grad_(False)

            def forward(self, x: Any) -> Any:
                return self.student(x) + 0.1 * self.teacher(x)

            def state_dict(self, *args: Any, **kwargs: Any) -> Any:
                whole = super().state_dict(*args, **kwargs)
                return type(whole)((name, value) for name, value in whole.items() if name.startswith("student."))

            def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
                return super().load_state_dict(state_dict, strict=False)

        return Distilled()


@pytest.mark.parametrize(("strategy", "way"), [("single", "resumed"), ("single", "killed"), ("ddp", "killed")])
def test_schedule_when_it_keeps_what_it_made_then_that_survives(strategy: str, way: str, tmp_path: Path) -> None:
    feature = FEATURES[KeptMask.__name__]
    assert run_cell(feature, strategy, way, reference_of(feature, tmp_path), tmp_path).kind == "exact"


def test_model_when_its_own_state_dict_leaves_weights_out_then_that_is_declared(tmp_path: Path) -> None:
    run = train_case(tmp_path, LeavesTeacherOut(), **STEPS)
    (declared,) = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert declared.startswith("weights: the model's own state_dict leaves out teacher.0.weight, teacher.0.bias")


class RoundsWhatItKeeps(ZooTask):
    def build_model(self) -> nn.Module:
        class Rounded(nn.Sequential):
            def state_dict(self, *args: Any, **kwargs: Any) -> Any:
                whole = super().state_dict(*args, **kwargs)
                return type(whole)((name, value.float()) for name, value in whole.items())

        return Rounded(nn.Linear(IN, OUT)).double()


def test_model_when_its_own_state_dict_rounds_weights_then_that_is_declared(tmp_path: Path) -> None:
    run = train_case(tmp_path, RoundsWhatItKeeps(), **STEPS)
    (declared,) = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert declared.startswith(
        "weights: the model's own state_dict has other values of 0.weight, 0.bias than the model"
    )


class AsksScheduler(ZooTask):
    """Asks a scheduler of torch, with an optimiser of the task's own, for the factor."""

    def build_model(self) -> nn.Module:
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        return chain()

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        def schedule(samples_seen: int) -> float:
            self.scheduler.last_epoch = samples_seen // 5 - 1
            self.optimizer.step()
            self.scheduler.step()
            return float(self.scheduler.get_last_lr()[0])

        return schedule


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_schedule_when_it_has_an_optimiser_of_its_own_then_it_is_as_in_one_process(
    strategy: str, tmp_path: Path
) -> None:
    feature = Feature(name="AsksScheduler", group="", title="", task=AsksScheduler)
    reference = reference_of(feature, tmp_path)
    assert run_cell(feature, strategy, "straight", reference, tmp_path).kind == "exact"


class ReadsGroups(ZooTask):
    """Lets the largest weight in the optimiser's groups scale the loss."""

    def build_model(self) -> nn.Module:
        self.largest = 0.0
        return chain()

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        def schedule(samples_seen: int) -> float:
            with torch.no_grad():
                self.largest = float(max(p.abs().max() for group in optimizer.param_groups for p in group["params"]))
            return 1.0

        return schedule

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return (1 + self.largest) * super().loss(model, batch)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("zero1", "exact"), ("fsdp", "refused"), ("tensor_parallel", "refused"), ("pipeline", "refused")],
)
def test_schedule_when_it_reads_the_weights_in_the_groups_then_is_refused_where_they_are_parts(
    strategy: str, kind: str, tmp_path: Path
) -> None:
    feature = Feature(name="ReadsGroups", group="", title="", task=ReadsGroups)
    verdict = run_cell(feature, strategy, "straight", reference_of(feature, tmp_path), tmp_path)
    assert verdict.kind == kind, verdict.detail
    if kind == "refused":
        assert "sets task.largest by weights, of which a rank" in verdict.detail


class FollowsLoss(ZooTask):
    """Warms up by the number of calls of the loss."""

    def build_model(self) -> nn.Module:
        self.calls = 0
        return chain()

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        return lambda samples_seen: min(1.0, (1 + self.calls) / 8)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls += model.training
        return super().loss(model, batch)


class FollowsEvaluation(ZooTask):
    """Halves the rate after every evaluation, whose metrics count."""

    def build_model(self) -> nn.Module:
        self.evaluated = 0
        return chain()

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        return lambda samples_seen: 1.0 if self.evaluated < 3 else 0.5

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, dure.Sum]:
        self.evaluated += 1
        return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "strategy"),
    [(FollowsLoss, "rpc_model"), (FollowsLoss, "parameter_server"), (FollowsEvaluation, "rpc_model")],
)
def test_schedule_when_it_follows_state_that_other_ranks_lack_then_it_is_refused(
    task: type[ZooTask], strategy: str, tmp_path: Path
) -> None:
    feature = Feature(name=task.__name__, group="", title="", task=task, settings={"eval_every_epochs": 0.5})
    verdict = run_cell(feature, strategy, "straight", reference_of(feature, tmp_path), tmp_path)
    assert verdict.kind == "refused"
    assert "the schedule's factor was" in verdict.detail


class Noisy(ZooTask):
    """Has data with noise, whose level the schedule or a hook on the optimiser's step sets."""

    by: str = "schedule"

    def train_data(self) -> Any:
        samples = Samples(*data())
        samples.level = 0.5  # type: ignore[attr-defined]
        self.samples = samples
        return TransformedRows(samples)

    def set_level(self) -> None:
        self.samples.level *= 0.9  # type: ignore[attr-defined]

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = super().build_optimizer(model)
        if self.by == "hook":
            optimizer.register_step_post_hook(lambda *_: self.set_level())
        return optimizer

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        def schedule(samples_seen: int) -> float:
            if self.by == "schedule":
                self.set_level()
            return 1.0

        return schedule


class TransformedRows(Dataset[Any]):
    """Rows with noise of the level of the samples that they are made of."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return x + self.samples.level * torch.randn_like(x), y


@pytest.mark.parametrize("by", ["schedule", "hook"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_when_the_run_sets_their_noise_then_copies_in_loader_processes_are_declared(
    by: str, num_workers: int, tmp_path: Path
) -> None:
    run = train_case(tmp_path, Noisy(by=by), **STEPS, num_workers=num_workers)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert ("of which loader processes keep the values" in " ".join(declared)) == (num_workers > 0)


@pytest.mark.slow
def test_run_when_restarted_loaders_have_later_noise_then_that_is_declared(tmp_path: Path) -> None:
    declares = ("loader processes",)
    feature = Feature(name="Noisy", group="", title="", task=Noisy, declares=declares, settings={"num_workers": 1})
    verdict = run_cell(feature, "ddp", "killed", reference_of(feature, tmp_path), tmp_path)
    assert verdict.kind == "declared"


class Grows(ActsOnce):
    """Gets a layer in the second epoch, and the optimiser its parameters."""

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        self.optimizer = optimizer
        return super().build_schedule(optimizer, total_samples)

    def act(self) -> None:
        layer = nn.Linear(OUT, OUT).double()
        self.model.append(layer)
        self.optimizer.add_param_group({"params": layer.parameters()})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "naive_ddp", "ring_ddp"])
def test_schedule_when_it_adds_new_parameters_then_they_are_refused_in_a_sentence(
    strategy: str, tmp_path: Path
) -> None:
    feature = Feature(name="Grows", group="", title="", task=Grows)
    verdict = run_cell(feature, strategy, "straight", reference_of(feature, tmp_path), tmp_path)
    assert verdict.kind == "refused"
    assert "that the model did not begin with" in verdict.detail


class Extends(ZooTask):
    """Gets the parameters of the first layer into the optimiser's only group in the second epoch."""

    def build_model(self) -> nn.Module:
        self.model = chain()
        return self.model

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(list(model.parameters())[2:], lr=0.1)

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        group = optimizer.param_groups[0]

        def schedule(samples_seen: int) -> float:
            if samples_seen >= 25 and len(group["params"]) == 6:  # of the whole model
                group["params"].extend(self.model[0].parameters())
            return 1.0

        return schedule


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("ddp", "exact"),
        ("fsdp", "refused"),
        ("pipeline", "refused"),
        ("rpc_model", "refused"),
        ("parameter_server", "refused"),
    ],
)
def test_schedule_when_it_extends_a_group_then_strategies_that_divided_it_refuse(
    strategy: str, kind: str, tmp_path: Path
) -> None:
    feature = Feature(name="Extends", group="", title="", task=Extends)
    assert run_cell(feature, strategy, "straight", reference_of(feature, tmp_path), tmp_path).kind == kind


class FreezesByGroups(ZooTask):
    """Freezes the last layer by the optimiser's groups, in the second epoch."""

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        def schedule(samples_seen: int) -> float:
            for parameter in optimizer.param_groups[0]["params"][-2:]:
                parameter.requires_grad_(samples_seen < 25)
            return 1.0

        return schedule


class UnfreezesByGroups(ZooTask):
    """Unfreezes the first layer by the optimiser's groups, in the second epoch."""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        model[0].requires_grad_(False)  # type: ignore[index]
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        parameters = [*optimizer.param_groups[0]["params"]]

        def schedule(samples_seen: int) -> float:
            for parameter in parameters if samples_seen >= 25 else []:
                parameter.requires_grad_(True)
            return 1.0

        return schedule


@pytest.mark.parametrize(
    ("task", "strategy"),
    [
        (FreezesByGroups, "fsdp"),
        (UnfreezesByGroups, "zero1"),
        *(
            pytest.param(FreezesByGroups, strategy, marks=pytest.mark.slow)
            for strategy in ("zero1", "pipeline", "rpc_model", "tensor_parallel")
        ),
    ],
)
def test_schedule_when_it_freezes_by_the_groups_then_strategies_with_others_refuse(
    task: type[ZooTask], strategy: str, tmp_path: Path
) -> None:
    with pytest.raises(DureError, match=r"the task (un)?froze .* during the run, and \w+ divided the work") as caught:
        train_case(tmp_path, task(), strategy, 2, **STEPS)
    assert caught.value.exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize("task", [FreezesByGroups, UnfreezesByGroups])
def test_schedule_when_it_freezes_by_the_groups_then_replicas_follow(task: type[ZooTask], tmp_path: Path) -> None:
    feature = Feature(name=task.__name__, group="", title="", task=task)
    assert run_cell(feature, "naive_ddp", "straight", reference_of(feature, tmp_path), tmp_path).kind == "exact"
