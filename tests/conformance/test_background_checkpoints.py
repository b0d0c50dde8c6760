"""A checkpoint that is written beside training has the very bytes of one that training waited for."""

from pathlib import Path

import pytest

from dure.strategies import STRATEGIES
from dure.training.checkpoint import Checkpoint, verify
from tests.conformance.cases import is_layered, train_case
from tests.conformance.tasks import Regression

PLACES = [pytest.param(name, marks=[] if name in ("single", "ddp") else pytest.mark.slow) for name in STRATEGIES]


@pytest.mark.parametrize("strategy", PLACES)
def test_checkpoints_when_written_beside_training_have_the_bytes_of_those_that_are_waited_for(strategy, tmp_path):
    task = Regression(kind="tokens", optimizer="adamw", dropout=0.2, layered=is_layered(strategy))
    nproc = 2 if STRATEGIES[strategy].many_devices else 1
    settings = {"global_batch_size": 7, "checkpoint_every_samples": 14, "keep_checkpoints": 99, "deterministic": True}
    beside, waited = (
        train_case(tmp_path, task, strategy, nproc, checkpoint_async=is_async, **settings) for is_async in (True, False)
    )
    paths = sorted((waited / "checkpoints").glob("samples-*"))
    assert len(paths) >= 3
    for path in paths:
        assert digests(beside / "checkpoints" / path.name) == digests(path), path.name
    Checkpoint.read(beside / "checkpoints" / paths[0].name)


def digests(path: Path) -> dict[str, str]:
    return {name: entry.sha256 for name, entry in verify(path).files.items()}
