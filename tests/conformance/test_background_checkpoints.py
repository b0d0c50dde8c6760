"""A checkpoint that is written beside training has the very bytes of one that training waited for."""

from pathlib import Path

import pytest
import torch

from dure.records.events import CheckpointSaved, Warned
from dure.records.run_dir import RunDir
from dure.strategies.table import STRATEGIES
from dure.training.checkpoints import staging
from dure.training.checkpoints.reader import Checkpoint, verify
from tests.conformance.cases import is_layered, train_case
from tests.conformance.tasks import Regression

PLACES = [pytest.param(name, marks=[] if name in ("single", "ddp") else pytest.mark.slow) for name in STRATEGIES]


@pytest.mark.parametrize("strategy", PLACES)
def test_checkpoints_when_written_beside_training_have_the_bytes_of_those_that_are_waited_for(
    strategy, tmp_path, monkeypatch
):
    monkeypatch.setattr(staging, "_SMALL_BYTES", 1)  # as if it were large: copied beside the next step
    task = Regression(kind="tokens", optimizer="adamw", dropout=0.2, layered=is_layered(strategy))
    nproc = 2 if STRATEGIES[strategy].many_devices else 1
    settings, often = {"global_batch_size": 7, "deterministic": True}, {"every_samples": 14, "keep": 99}
    beside, waited = (
        train_case(tmp_path, task, strategy, nproc, checkpoint={**often, "background": is_background}, **settings)
        for is_background in (True, False)
    )
    paths = sorted((waited / "checkpoints").glob("samples-*"))
    assert len(paths) >= 3
    for path in paths:
        assert digests(beside / "checkpoints" / path.name) == digests(path), path.name
    Checkpoint.read(beside / "checkpoints" / paths[0].name)
    saves = [event for event in RunDir.open(beside).events() if isinstance(event, CheckpointSaved)]
    is_steady = strategy not in ("averaging", "diloco", "parameter_server", "rpc_model")
    assert [event.beside_bytes > 0 for event in saves] == [is_steady] * len(saves)
    assert not [event for event in RunDir.open(beside).events() if isinstance(event, Warned)]


def digests(path: Path) -> dict[str, str]:
    return {name: entry.digest for name, entry in verify(path).files.items()}


class Meddling(Regression):
    """Changes its weights in its loss: through `data`, which no count shows, always; or openly, in one step."""

    way: str = "always"
    _calls = 0

    def loss(self, model, batch):
        self._calls += model.training
        with torch.no_grad():
            if self.way == "always":
                model.inner.weight.data.mul_(0.99 if model.training else 1.0)
            elif self._calls == 5:
                model.inner.weight.mul_(0.5)
        return super().loss(model, batch)


@pytest.mark.parametrize("way", ["always", "once"])
def test_checkpoints_when_the_loss_itself_changes_weights_are_of_one_position_all_the_same(way, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_SMALL_BYTES", 1)
    settings, often = {"global_batch_size": 4, "deterministic": True}, {"every_samples": 16, "keep": 99}
    beside, waited = (
        train_case(tmp_path, Meddling(way=way), checkpoint={**often, "background": is_background}, **settings)
        for is_background in (True, False)
    )
    events = list(RunDir.open(beside).events())
    saved = [(event.samples_seen, event.beside_bytes > 0) for event in events if isinstance(event, CheckpointSaved)]
    warnings = [event.message for event in events if isinstance(event, Warned)]
    if way == "always":  # seen before the first save: nothing is copied beside a loss like this
        assert saved == [(16, False), (32, False), (44, False)]
        assert warnings == []
    else:  # the fifth step changed what was being copied; one step later all is copied at once
        assert saved == [(24, False), (32, False), (44, False)]
        assert len(warnings) == 1
        assert warnings[0].endswith("from here on training waits for the copy of each")
    for samples in (32, 44):
        name = f"samples-{samples:012d}"
        assert digests(beside / "checkpoints" / name) == digests(waited / "checkpoints" / name)
