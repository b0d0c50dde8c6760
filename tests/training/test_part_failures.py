"""A part of a batch that collate or the loss fails on, though they take the whole batch."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn import functional

from dure.errors import DureError, WorkerFailed
from tests.conformance.cases import train_case
from tests.conformance.zoo.feature import STEPS, Samples, ZooTask, data


class Gaps(Samples):
    """Samples of which some cannot be read."""

    def __getitem__(self, index: int) -> Any:
        return None if index % 7 == 3 else super().__getitem__(index)


class LeavesOutGaps(ZooTask):
    def train_data(self) -> Any:
        return Gaps(*data())

    def collate(self, samples: Any) -> Any:
        return super().collate([sample for sample in samples if sample is not None])


class NeedsPositive(ZooTask):
    """Computes some of the samples alone, of which there must be one in a batch."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        counts = x[:, 0] > -0.5
        if model.training and not counts.any():
            raise ValueError("no sample counts")
        return functional.mse_loss(model(x[counts]), y[counts]) if model.training else functional.mse_loss(model(x), y)


ALONE = {**STEPS, "microbatch_size": 1}
IN_PAIRS = {**STEPS, "global_batch_size": 4, "microbatch_size": 2, "drop_last": True, "samples": 80}


@pytest.mark.parametrize(
    ("task", "strategy", "settings", "said"),
    [
        (LeavesOutGaps, "single", ALONE, "collate takes the 5 samples of a batch together, but fails on the 1 of"),
        (LeavesOutGaps, "ddp", ALONE, "collate takes the 5 samples of a batch together, but fails on the 1 of"),
        (LeavesOutGaps, "pipeline", ALONE, "collate takes the 5 samples of a batch together, but fails on the 1 of"),
        (NeedsPositive, "ddp", IN_PAIRS, "the loss takes the 4 samples of a batch together, but fails on the 2 of"),
        (NeedsPositive, "single", IN_PAIRS, "the loss takes the 4 samples of a batch together, but fails on the 2 of"),
    ],
)
def test_batch_when_a_part_of_it_fails_and_the_whole_does_not_then_that_is_said(
    task: type[ZooTask], strategy: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(DureError, match=said) as refused:
        train_case(tmp_path, task(), strategy, 1 if strategy == "single" else 2, **settings)
    assert refused.value.exit_code == 2


def test_batch_when_the_whole_fails_too_then_the_error_is_the_tasks_own(tmp_path: Path) -> None:
    class FailsLater(ZooTask):
        def __init__(self) -> None:
            self.calls = 0

        def loss(self, model: nn.Module, batch: Any) -> Any:
            self.calls += 1
            if self.calls > 8:
                raise ValueError("enough")
            return super().loss(model, batch)

    with pytest.raises(WorkerFailed, match="ValueError: enough"):
        train_case(tmp_path, FailsLater(), "ddp", 2, **ALONE)
