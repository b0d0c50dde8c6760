"""Modules for several devices of one process, compared with the model on one device."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import dure
from dure.errors import EnvironmentLacks, TaskInvalid
from dure.parallel import BalancedDataParallel, DataParallelCriterion

TWO = ["cpu", "cpu"]


def model_of(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *more, nn.Linear(6, 3)).double()


def data(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_samples)
    x = torch.randn(num_samples, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (num_samples,), generator=generator)


def trained(model: nn.Module, criterion: Any, module: nn.Module) -> list[Any]:
    """Return losses and weights of four steps on batches of unequal size."""
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for num_samples in (10, 7, 3, 1):
        x, y = data(num_samples)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, *(parameter.detach().clone() for parameter in module.parameters())]


@pytest.mark.parametrize(
    ("share", "devices"), [(0.3, TWO), (0.0, TWO), (1.0, TWO), (None, TWO), (0.2, ["cpu"] * 3), (0.2, ["cpu"])]
)
@pytest.mark.parametrize("gathers", [True, False])
def test_loop_when_devices_have_other_shares_then_weights_are_those_of_one(
    share: float | None, devices: list[str], gathers: bool
) -> None:
    alone, divided = model_of(), model_of()
    expected = trained(alone, nn.CrossEntropyLoss(), alone)
    model = BalancedDataParallel(divided, devices, device0_share=share, gathers=gathers)
    criterion = nn.CrossEntropyLoss() if gathers else DataParallelCriterion(nn.CrossEntropyLoss())
    torch.testing.assert_close(trained(model, criterion, divided), expected, rtol=1e-12, atol=1e-12)
    model.close()


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, ignore_index=0)


def as_sum(output: Tensor, target: Tensor) -> Any:
    total = functional.cross_entropy(output, target, ignore_index=0, reduction="sum")
    return dure.Sum(total, (target != 0).sum())


@pytest.mark.parametrize(
    ("criterion", "plain"),
    [
        (nn.CrossEntropyLoss(ignore_index=0), None),
        (nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.5]).double(), label_smoothing=0.1), None),
        (nn.CrossEntropyLoss(reduction="sum"), None),
        (as_sum, ignoring),
        (lambda output, target: functional.cross_entropy(output, target), None),
    ],
)
def test_criterion_when_it_is_a_mean_over_something_then_is_that_of_all_samples(criterion: Any, plain: Any) -> None:
    x, y = data(10)
    model, module = model_of(), model_of()
    (plain or criterion)(model(x), y).backward()
    divided = BalancedDataParallel(module, TWO, device0_share=0.3, gathers=False)
    DataParallelCriterion(criterion)(divided(x), y).backward()
    for one, other in zip(model.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)


def test_criterion_when_it_gives_a_value_for_each_sample_then_they_are_joined() -> None:
    x, y = data(7)
    each = DataParallelCriterion(nn.CrossEntropyLoss(reduction="none"))
    found = each(BalancedDataParallel(model_of(), TWO, device0_share=0.3, gathers=False)(x), y)
    torch.testing.assert_close(found, nn.CrossEntropyLoss(reduction="none")(model_of()(x), y))


@pytest.mark.parametrize("criterion", [ignoring, lambda output, target: functional.mse_loss(output, output * 2) ** 0.5])
def test_criterion_when_it_is_no_mean_over_samples_then_is_refused(criterion: Any) -> None:
    x, _ = data(12)
    y = torch.tensor([0, 0, 1, 2, 1, 2] * 2)
    divided = BalancedDataParallel(model_of(), TWO, gathers=False)
    with pytest.raises(TaskInvalid, match=r"no mean over samples: let it return dure\.Sum"):
        DataParallelCriterion(criterion)(divided(x), y)


def test_criterion_when_it_has_parameters_then_they_are_trained() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return functional.cross_entropy(output * self.scale, target)

    x, y = data(9)
    alone, divided = Scaled(), Scaled()
    alone(model_of()(x), y).backward()
    DataParallelCriterion(divided)(BalancedDataParallel(model_of(), TWO, gathers=False)(x), y).backward()
    torch.testing.assert_close(divided.scale.grad, alone.scale.grad, rtol=1e-12, atol=1e-12)


def test_batch_norm_when_the_first_device_has_no_samples_then_learns_from_the_second() -> None:
    alone, divided = model_of(nn.BatchNorm1d(6)), model_of(nn.BatchNorm1d(6))
    x, _ = data(8)
    alone(x)
    model = BalancedDataParallel(divided, TWO, device0_share=0.0)
    model(x)
    torch.testing.assert_close(dict(divided.named_buffers()), dict(alone.named_buffers()))
    model.eval()
    alone.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), alone(x))


def test_inputs_when_nested_then_each_device_gets_its_samples() -> None:
    seen = []

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, batch: dict[str, Any], *, scale: float) -> dict[str, Any]:
            seen.append((len(batch["x"]), batch["names"], scale))
            return {"twice": batch["x"] * 2 * self.weight, "names": batch["names"]}

    model = BalancedDataParallel(Nested(), TWO, device0_share=0.25)
    out = model({"x": torch.arange(4.0), "names": ["a", "b", "c", "d"]}, scale=3.0)
    assert seen == [(1, ["a"], 3.0), (3, ["b", "c", "d"], 3.0)]
    assert out["names"] == ["a", "b", "c", "d"]
    assert out["twice"].tolist() == [0, 2, 4, 6]


def test_module_when_copied_or_pickled_after_a_call_then_goes_on() -> None:
    model = BalancedDataParallel(model_of(), TWO, device0_share=0.3)
    x, _ = data(5)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), expected)
    assert list(model.state_dict()) == [f"module.{name}" for name in model_of().state_dict()]


class Summing(nn.Linear):
    """Model that returns the sum over samples, which cannot be joined."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


class Clamping(nn.Linear):
    """Model that changes its weights by the samples of a device."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.add_(x.mean())
        return super().forward(x)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: BalancedDataParallel(nn.Linear(2, 1), TWO, device0_share=1.5), "a fraction from 0 to 1"),
        (lambda: BalancedDataParallel(nn.Linear(2, 1), []), "name at least one device"),
        (lambda: BalancedDataParallel(nn.Linear(2, 1, device="meta"), TWO), "weight is on meta"),
        (lambda: BalancedDataParallel(Summing(2, 1), TWO)(torch.arange(8.0).view(4, 2)), "one row per sample"),
        (lambda: BalancedDataParallel(Clamping(2, 1), TWO)(torch.arange(8.0).view(4, 2)), "changes weight in place"),
        (
            lambda: DataParallelCriterion(lambda x, y: 1.0)(
                BalancedDataParallel(nn.Linear(2, 1), TWO, gathers=False)(torch.ones(4, 2)), torch.ones(4)
            ),
            "returned no tensor",
        ),
    ],
)
def test_module_when_it_cannot_divide_then_says_so(build: Any, message: str) -> None:
    with pytest.raises(TaskInvalid, match=message):
        build()


def test_module_when_no_accelerator_is_there_then_asks_for_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dure.parallel.balanced.accelerator", lambda: None)
    with pytest.raises(EnvironmentLacks, match='device_ids=\\["cpu", "cpu"\\]'):
        BalancedDataParallel(nn.Linear(2, 1))


class Focal(nn.CrossEntropyLoss):
    """Criterion of a derived class, which is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.num_calls += 1
        each = functional.cross_entropy(output, target, reduction="none")
        return ((1 - torch.exp(-each)) * each).mean()


@pytest.mark.parametrize("num_samples", [2, 9])
def test_criterion_when_of_a_derived_class_then_is_a_mean_and_called_once(num_samples: int) -> None:
    x, y = data(num_samples)
    criterion = Focal()
    found = DataParallelCriterion(criterion)(
        BalancedDataParallel(model_of(), TWO, device0_share=0.5, gathers=False)(x), y
    )
    assert float(criterion.num_calls) == 1
    torch.testing.assert_close(found, Focal()(model_of()(x), y))


def test_criterion_when_every_device_has_one_sample_then_is_looked_at_too() -> None:
    x, _ = data(2)
    divided = BalancedDataParallel(model_of(), TWO, device0_share=0.5, gathers=False)
    with pytest.raises(TaskInvalid, match="no mean over samples"):
        DataParallelCriterion(lambda output, target: (output**2).sum() ** 0.5)(divided(x), x)
