"""Backward by the engine's own entry point."""

import torch

from dure.torchcompat.gradients import run_backward


def test_run_backward_when_given_two_roots_then_gradients_are_autograds() -> None:
    weight, carrier = torch.ones(3, requires_grad=True), torch.zeros(2, requires_grad=True)
    for _ in range(2):
        run_backward((weight * 2.0).sum(), (carrier.view(-1), torch.tensor([3.0, 4.0])))
    assert [weight.grad.tolist(), carrier.grad.tolist()] == [[4.0, 4.0, 4.0], [6.0, 8.0]]
