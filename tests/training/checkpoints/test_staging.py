"""Copies of what a rank writes: the same bits, in the same memory every time."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dure.strategies.state.tensor_shard import TensorShard
from dure.training.checkpoints import staging
from dure.training.checkpoints.rank_shard import RankShard
from dure.training.checkpoints.staging import StagingBuffer


def shard_of(**tensors: Any) -> RankShard:
    return RankShard(
        rank=0, parts={"model": tensors, "optimizer": {}}, per_rank={"random": torch.arange(5)}, state=b"{}"
    )


def steady(**tensors: Any) -> RankShard:
    share = shard_of(**tensors)
    return RankShard(rank=0, parts=share.parts, per_rank=share.per_rank, state=b"{}", steady=frozenset({"w"}))


@pytest.fixture
def held_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[StagingBuffer]:
    """Copies beside training whose thread comes too late for everything."""
    copy, main = staging._copy_from, threading.current_thread()
    monkeypatch.setattr(staging, "_copy_from", lambda w: copy(w) if threading.current_thread() is main else None)
    monkeypatch.setattr(staging, "_SMALL_BYTES", 1)
    copies = StagingBuffer(1)
    copies.is_beside = True
    yield copies
    copies.close()


def test_copy_when_beside_training_takes_at_once_what_is_not_steady_and_is_whole_when_completed(held_copies):
    w, buffer = torch.ones(1000), torch.ones(1000)
    copied = held_copies.of(steady(w=w, buffer=buffer)).parts["model"]
    buffer += 1
    assert copied["buffer"].sum() == 1000
    assert (held_copies.is_complete, held_copies.beside_bytes) == (False, w.nbytes)
    assert held_copies.complete()
    w += 1
    assert held_copies.is_complete
    assert copied["w"].sum() == 1000
    assert held_copies.complete()


def test_copy_when_its_source_changes_before_it_is_complete_says_so_once(held_copies):
    w = torch.ones(1000)
    held_copies.of(steady(w=w))
    w.detach().mul_(2)
    assert not held_copies.complete()
    held_copies.of(steady(w=w))
    assert held_copies.complete()


def test_copy_when_taken_again_lies_in_the_same_memory():
    copies, source = StagingBuffer(2), torch.arange(1000.0)
    first = copies.of(shard_of(w=source))
    assert copies.missing_bytes(shard_of(w=source)) == 0
    source += 1
    again = copies.of(shard_of(w=source))
    assert again.parts["model"]["w"].data_ptr() == first.parts["model"]["w"].data_ptr()
    assert torch.equal(again.parts["model"]["w"], source)
    assert copies.missing_bytes(shard_of(w=torch.zeros(2000))) >= 3968


def test_copy_when_of_any_kind_of_tensor_has_its_bits():
    base = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {
        "transposed": base.permute(2, 0, 1),
        "expanded": torch.ones(1).expand(5),
        "empty": torch.zeros(2, 0, 3, dtype=torch.bool),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "byte": torch.arange(3, dtype=torch.uint8),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "half": torch.rand(5).to(torch.bfloat16),
        "nan": torch.tensor([float("nan"), -0.0]),
    }
    copied = StagingBuffer(2).of(shard_of(**tensors)).parts["model"]
    for name, tensor in tensors.items():
        assert (copied[name].dtype, copied[name].shape) == (tensor.dtype, tensor.shape)
        torch.testing.assert_close(copied[name], tensor.resolve_conj(), rtol=0, atol=0, equal_nan=True)


def test_copy_when_of_a_piece_is_one_at_the_same_place():
    piece = TensorShard(tensor=torch.ones(2, 3), offsets=(4, 0), shape=(8, 3))
    copied = StagingBuffer(2).of(shard_of(w=piece)).parts["model"]["w"]
    assert (copied.offsets, copied.shape, copied.tensor.tolist()) == ((4, 0), (8, 3), [[1.0] * 3] * 2)
    assert copied.tensor.data_ptr() != piece.tensor.data_ptr()
