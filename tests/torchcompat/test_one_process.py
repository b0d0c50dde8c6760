"""Reads of the number of ranks."""

import os

import pytest
import torch

from dure.torchcompat.one_process import reads_of_world_size


def test_world_size_when_read_then_noted_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with reads_of_world_size() as reads:
        assert os.environ["HOME"]
        assert reads == []
        assert os.environ.get("WORLD_SIZE") == "2"
        assert os.getenv("LOCAL_WORLD_SIZE") is None
        with pytest.raises(ValueError, match="process group"):
            torch.distributed.get_world_size()
    assert os.environ["WORLD_SIZE"] == "2"
    assert [read.rpartition(":")[0] for read in reads] == [__file__, __file__]
