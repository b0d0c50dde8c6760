"""A loss that depends on the rank, where several ranks compute one loss by divided layers."""

import os

import pytest
from torch import Tensor, nn

from dure.errors import TaskInvalid, WorkerFailed
from tests.conformance.cases import train_case
from tests.conformance.tasks import Regression


class ByRank(Regression):
    """Task that reads the number of the rank."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return super().loss(model, batch) * (1 + int(os.environ.get("RANK", "0")))


@pytest.mark.parametrize(
    ("strategy", "nproc", "mesh"),
    [
        ("tensor_parallel", 2, None),
        pytest.param("tensor_parallel", 4, "data=2,tensor=2", marks=pytest.mark.slow),
        pytest.param("fsdp", 4, "shard=2,tensor=2", marks=pytest.mark.slow),
        pytest.param("pipeline", 4, "pipeline=2,tensor=2", marks=pytest.mark.slow),
    ],
)
def test_run_when_the_loss_depends_on_the_rank_then_is_refused_where_ranks_compute_one_together(
    strategy: str, nproc: int, mesh: str | None, tmp_path
) -> None:
    settings = {} if mesh is None else {"mesh": mesh}
    with pytest.raises(WorkerFailed, match="ranks along the axis tensor compute one loss together") as raised:
        train_case(tmp_path, ByRank(layered=True), strategy, nproc, samples=16, global_batch_size=8, **settings)
    assert raised.value.exit_code == TaskInvalid.exit_code
