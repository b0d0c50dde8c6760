"""Time of the backward in the records of a run."""

import time

import pytest
import torch
from torch import Tensor, nn

from dure.records.run_dir import RunDir
from dure.records.step_record import PARTS, step_from_json
from dure.report.summary import summarise
from tests.conformance.cases import train_case
from tests.conformance.tasks import Regression

SLOW_SECONDS = 0.03


class Slow(torch.autograd.Function):
    """Identity whose backward takes long."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(SLOW_SECONDS)
        return gradient


class SlowBackward(Regression):
    """Task whose backward takes longer than everything else."""

    def loss(self, model: nn.Module, batch: object) -> Tensor:
        return Slow.apply(super().loss(model, batch))


@pytest.mark.parametrize(("strategy", "nproc"), [("single", 1), ("ddp", 2)])
def test_records_when_the_backward_is_slow_then_say_so(strategy, nproc, tmp_path):
    run = RunDir(
        train_case(tmp_path, SlowBackward(), strategy, nproc, samples=24, global_batch_size=4, microbatch_size=1)
    )
    records = [*run.records(0)]
    num_backwards = 4 // nproc
    for record in records:
        assert num_backwards * SLOW_SECONDS <= record.backward_seconds <= record.forward_backward_seconds
        parts = sum(getattr(record, f"{part}_seconds") for part in PARTS)
        assert parts <= record.wall_seconds * 1.001
    assert step_from_json(records[-1]._asdict()) == records[-1]
    seconds = summarise(run, run.read_spec(), "completed").seconds
    assert seconds["backward"] > seconds["forward"] > 0
    assert "forward_backward" not in seconds
