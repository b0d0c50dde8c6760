"""Backward by the engine's own entry point, and gradients scaled down to a norm."""

import pytest
import torch
from torch import nn

from dure.torchcompat.gradients import clip_to_norm, run_backward


def test_run_backward_when_given_two_roots_then_gradients_are_autograds() -> None:
    weight, carrier = torch.ones(3, requires_grad=True), torch.zeros(2, requires_grad=True)
    for _ in range(2):
        run_backward((weight * 2.0).sum(), (carrier.view(-1), torch.tensor([3.0, 4.0])))
    assert [weight.grad.tolist(), carrier.grad.tolist()] == [[4.0, 4.0, 4.0], [6.0, 8.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_gradients_are_clipped_as_torch_clips_them(dtype):
    values = torch.randn(6, dtype=dtype, generator=torch.Generator().manual_seed(0))
    ours, theirs = (nn.Parameter(torch.zeros(6, dtype=dtype)) for _ in range(2))
    ours.grad, theirs.grad = values.clone(), values.clone()
    square = nn.utils.clip_grad_norm_([theirs], 0.5).double().square()
    clip_to_norm([ours, nn.Parameter(torch.zeros(1))], 0.5, square)
    torch.testing.assert_close(ours.grad, theirs.grad)
