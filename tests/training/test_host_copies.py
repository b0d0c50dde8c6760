"""Copies of what a rank writes: the same bits, in the same memory every time."""

from typing import Any

import torch

from dure.strategies.pieces import Piece
from dure.training.checkpoint_share import Share
from dure.training.host_copies import HostCopies


def share_of(**tensors: Any) -> Share:
    return Share(rank=0, parts={"model": tensors, "optimizer": {}}, per_rank={"random": torch.arange(5)}, state=b"{}")


def test_copy_when_taken_again_lies_in_the_same_memory():
    copies, source = HostCopies(2), torch.arange(1000.0)
    first = copies.of(share_of(w=source))
    assert copies.missing_bytes(share_of(w=source)) == 0
    source += 1
    again = copies.of(share_of(w=source))
    assert again.parts["model"]["w"].data_ptr() == first.parts["model"]["w"].data_ptr()
    assert torch.equal(again.parts["model"]["w"], source)
    assert copies.missing_bytes(share_of(w=torch.zeros(2000))) >= 3968


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
    copied = HostCopies(2).of(share_of(**tensors)).parts["model"]
    for name, tensor in tensors.items():
        assert (copied[name].dtype, copied[name].shape) == (tensor.dtype, tensor.shape)
        torch.testing.assert_close(copied[name], tensor.resolve_conj(), rtol=0, atol=0, equal_nan=True)


def test_copy_when_of_a_piece_is_one_at_the_same_place():
    piece = Piece(tensor=torch.ones(2, 3), offsets=(4, 0), shape=(8, 3))
    copied = HostCopies(2).of(share_of(w=piece)).parts["model"]["w"]
    assert (copied.offsets, copied.shape, copied.tensor.tolist()) == ((4, 0), (8, 3), [[1.0] * 3] * 2)
    assert copied.tensor.data_ptr() != piece.tensor.data_ptr()
