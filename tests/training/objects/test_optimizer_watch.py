"""Watch over an optimiser's attributes between its steps."""

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import AdamW

from dure.training.objects.optimizer_watch import OptimizerWatch


@pytest.fixture
def optimizer() -> AdamW:
    return AdamW(nn.Linear(2, 2).parameters())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda optimizer: optimizer.defaults.update(lr=5.0), ["defaults"]),
        (lambda optimizer: optimizer.defaults.update(lr=torch.ones(3)), ["defaults"]),  # compared element by element
        (lambda optimizer: vars(optimizer).update(factor=2.0), ["factor"]),
        (lambda optimizer: optimizer.param_groups[0].update(lr=5.0), []),  # the settings have a watch of their own
    ],
)
def test_change_between_two_steps_is_named(
    optimizer: AdamW, change: Callable[[AdamW], object], expected: list[str]
) -> None:
    watch = OptimizerWatch(optimizer)
    watch.note()
    change(optimizer)
    watch.compare()

    assert list(watch.changed) == expected


def test_change_by_the_step_itself_is_none(optimizer: AdamW) -> None:
    watch = OptimizerWatch(optimizer)
    watch.note()
    for number in range(3):
        watch.compare()
        vars(optimizer)["num_steps"] = number
        optimizer.defaults["lr"] = 1 / (1 + number)
        watch.note()

    assert not watch.changed


def test_attribute_of_its_own_when_changed_or_deleted_is_named(optimizer: AdamW) -> None:
    own = {"losses": [1.0], "last": deque([1.0]), "factor": torch.ones(2), "scales": np.ones(2), "gone": 1}
    vars(optimizer).update(own)
    watch = OptimizerWatch(optimizer)
    watch.note()
    own["losses"].append(2.0)
    own["last"].append(2.0)
    own["factor"].mul_(2)
    own["scales"][0] = 2
    del vars(optimizer)["gone"]
    watch.compare()

    assert list(watch.changed) == [*own]
