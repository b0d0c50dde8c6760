"""The balanced DataParallel: shares by wish or by memory, the loss on the replicas."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from dure.comm.groups import Solo
from dure.strategies import STRATEGIES, balanced_dp
from dure.strategies.balanced_dp import BalancedDataParallel, state_tensors_per_parameter
from dure.strategies.base import StrategyOptions
from dure.strategies.precision import Precision
from tests.strategies.test_base import ROWS, prepared, step

CPU = torch.device("cpu")


def notes_sizes(sizes):
    def loss(model, x):
        sizes.append(len(x))
        return model(x).mean()

    return loss


@pytest.mark.parametrize(
    ("share", "devices", "split"),
    [(0.2, 3, [2, 4, 4]), (0.0, 3, [5, 5]), (1.0, 3, [10]), (0.5, 2, [5, 5]), (0.3, 2, [3, 7]), (0.7, 1, [10])],
)
def test_a_given_share_splits_the_batch_as_stated(share, devices, split):
    sizes = []
    strategy = prepared(
        notes_sizes(sizes), name="balanced_dp", devices=devices, device0_share=share, deterministic=True
    )
    batch = torch.arange(20, dtype=torch.float64).view(10, 2)
    alone = prepared(lambda model, x: model(x).mean())
    assert step(strategy, batch) == step(alone, batch)
    strategy.close()
    assert sizes == split
    torch.testing.assert_close(strategy.model.weight, alone.model.weight)


def prepared_with_memory(monkeypatch, available_bytes, build_optimizer, devices=2, numel=100, **options):
    """Return the fractions of a strategy over one float32 parameter on a machine that has so much memory left."""
    monkeypatch.setattr(balanced_dp, "total_memory_bytes", lambda: 2000)
    monkeypatch.setattr(balanced_dp, "available_memory_bytes", lambda: available_bytes)
    strategy = BalancedDataParallel(
        STRATEGIES["balanced_dp"], Solo(), (CPU,) * devices, Precision("fp32", "cpu"), StrategyOptions(**options)
    )
    strategy.prepare(nn.Linear(numel, 1, bias=False), build_optimizer, lambda model, x: model(x).mean())
    strategy.close()
    return strategy.fractions


# per device 1000 bytes are free, and gradients take 400 of them; the first device keeps the optimiser's state too
@pytest.mark.parametrize(
    ("build_optimizer", "left"),
    [
        (lambda m: SGD(m.parameters(), lr=0.1), [600, 600]),
        (lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9), [200, 600]),
        (lambda m: AdamW(m.parameters()), [0, 600]),
    ],
    ids=["no state", "one tensor", "two tensors"],
)
def test_share_by_memory_leaves_room_for_gradients_and_the_optimisers_state(monkeypatch, build_optimizer, left):
    fractions = prepared_with_memory(monkeypatch, 2000, build_optimizer)
    assert fractions == pytest.approx([part / sum(left) for part in left])


def test_share_by_memory_without_any_memory_is_even(monkeypatch):
    fractions = prepared_with_memory(monkeypatch, 3, lambda m: AdamW(m.parameters()), devices=3)
    assert fractions == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("available_bytes", [1000, 1500])
def test_share_by_memory_of_a_deterministic_run_does_not_depend_on_what_others_use(monkeypatch, available_bytes):
    fractions = prepared_with_memory(
        monkeypatch, available_bytes, lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9), deterministic=True
    )
    assert fractions == pytest.approx([1 / 4, 3 / 4])


def test_share_of_one_device_is_all(monkeypatch):
    assert prepared_with_memory(monkeypatch, 2000, lambda m: AdamW(m.parameters()), devices=1) == [1.0]


@pytest.mark.parametrize(
    ("build", "tensors"),
    [
        (lambda p: SGD(p, lr=0.1), 0),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: Adam(p), 2),
        (lambda p: AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.Adagrad(p), 1),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), 2),
        (lambda p: torch.optim.NAdam(p), 2),
        (lambda p: torch.optim.Adafactor(p), 1),
    ],
)
def test_state_of_any_optimiser_is_counted_by_trying_one_like_it(build, tensors):
    parameter = nn.Parameter(torch.zeros(4))
    assert state_tensors_per_parameter(build([parameter])) == tensors


def test_microbatches_are_bounded_by_the_largest_share():
    strategy = prepared(lambda model, x: model(x).mean(), name="balanced_dp", devices=2, device0_share=0.2)
    assert strategy.process_microbatch_size(8) == 10
    assert strategy.device_microbatch_size(10) == 8
    strategy.close()


def test_a_replica_whose_parameter_is_unused_gives_no_gradient():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.always = nn.Linear(2, 1, dtype=torch.float64)
            self.rare = nn.Linear(2, 1, dtype=torch.float64)

        def forward(self, x):
            return self.always(x) + (self.rare(x) if bool((x[:, 0] > 5).any()) else 0)

    torch.manual_seed(0)
    one = prepared(lambda model, x: model(x).mean(), model=Sometimes())
    torch.manual_seed(0)
    two = prepared(lambda m, x: m(x).mean(), model=Sometimes(), name="balanced_dp", devices=2, device0_share=0.5)
    batch = ROWS[:2]  # no row uses the rare layer
    step(one, batch)
    step(two, batch)
    two.close()
    for ours, theirs in zip(two.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
