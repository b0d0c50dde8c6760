"""Ranks that take longer than a collective may before there is anything to train."""

import os
import signal
import time

import pytest
import torch
from torch import nn

import dure
from dure.data import TensorData
from dure.errors import WorkerFailed
from tests.commands import RunFiles
from tests.conformance.cases import train_case

TIMEOUT, LONGER = 3.0, 5.0


class Slow(dure.Task):
    """Takes long, or dies, where it is told to, on rank 0 alone."""

    where: str = "prepare_data"
    dies: bool = False

    def _take(self, where):
        if where != self.where or torch.distributed.get_rank() != 0:
            return
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LONGER)

    def prepare_data(self):
        self._take("prepare_data")

    def train_data(self):
        self._take("train_data")
        return TensorData(torch.arange(12.0).view(6, 2), torch.zeros(6))

    def build_model(self):
        self._take("build_model")
        return nn.Linear(2, 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.001)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()


@pytest.mark.slow  # longer than a collective may take on a busy machine
@pytest.mark.parametrize("where", ["prepare_data", "train_data", "build_model"])
def test_start_when_one_rank_takes_longer_than_a_collective_may_then_the_others_wait(where, tmp_path):
    run = train_case(
        tmp_path, Slow(where=where), "ddp", 2, global_batch_size=2, timeout_seconds=TIMEOUT, hang_after=1.0
    )
    assert len(RunFiles(run).records(0)) == 3


def test_start_when_the_preparing_rank_dies_then_it_is_noticed_at_once(tmp_path):
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"rank 0 .*SIGKILL"):
        train_case(tmp_path, Slow(dies=True), "ddp", 2, global_batch_size=2, timeout_seconds=60.0)
    assert time.monotonic() - start < 30.0
