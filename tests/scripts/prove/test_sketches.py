"""Sketches of tensors: linear, and as large as what they are of."""

import pytest
import torch

from dure.scripts.prove.sketches import NUM_SUMS, sketch


@pytest.mark.parametrize("shape", [(), (3,), (8,), (9,), (50, 31), (400, 500)])
def test_sketch_when_a_tensor_is_scaled_then_is_scaled_too(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = sketch(tensor)
    assert len(found) == min(max(tensor.numel(), 1), NUM_SUMS)
    torch.testing.assert_close(sketch(3 * tensor), 3 * found)
    if tensor.numel() <= 1 << 16:
        # the mean of 8 squares has a deviation of 1/2
        assert 0.1 < float(found.norm() / tensor.norm()) < 3


@pytest.mark.parametrize("place", [0, 777, 1549])
def test_sketch_when_one_element_differs_then_differs(place: int) -> None:
    one = torch.ones(50, 31, dtype=torch.float64)
    other = one.clone()
    other.view(-1)[place] += 1e-6
    assert float((sketch(one) - sketch(other)).norm()) == pytest.approx(1e-6, rel=1e-6)


def test_sketch_when_the_tensor_is_sparse_or_in_half_precision_then_is_of_its_values() -> None:
    sparse = torch.eye(12).to_sparse()
    assert torch.equal(sketch(sparse), sketch(torch.eye(12)))
    assert torch.equal(sketch(torch.eye(12, dtype=torch.bfloat16)), sketch(torch.eye(12)))
    assert sketch(torch.ones(3, dtype=torch.complex64)).dtype == torch.float64
