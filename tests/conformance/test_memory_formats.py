"""Weights that lie in memory in another order than their dimensions', and optimisers that read them in that order."""

import pytest
import torch
from torch import nn

import dure
from dure.comm import buckets
from dure.data import TensorData
from dure.strategies.table import STRATEGIES
from tests.conformance.cases import TO_ROUNDING, largest_difference, train_case, weights_of

STEPS = {"samples": 48, "global_batch_size": 6, "seed": 1}
LAYOUTS = {
    "tensor_parallel": (4, {"mesh": "data=2,tensor=2", "plan": "5=column,7=row"}),
    "pipeline": (4, {"mesh": "data=2,pipeline=2"}),
}
"""Ranks and settings of strategies that add up gradients along one axis only."""
FLATTENING = ("naive_ddp", "tensor_parallel")
"""Strategies that have sent contiguous gradients back."""
EXACT = [name for name, info in STRATEGIES.items() if info.is_exact]


class Images(dure.Task):
    """Convolutions in channels_last, stepped by a fused optimiser, whose kernels go through memory."""

    fused: bool = True

    def train_data(self):
        draw = torch.Generator().manual_seed(0)
        return TensorData(
            *(torch.randn(24, *shape, generator=draw, dtype=torch.float64) for shape in ((3, 6, 6), (4,)))
        )

    def build_model(self):
        model = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 4, 3, padding=1), nn.Tanh(), nn.Flatten(),
            nn.Linear(144, 8), nn.Tanh(), nn.Linear(8, 4),
        )  # fmt: skip
        return model.double().to(memory_format=torch.channels_last)

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=self.fused)

    def loss(self, model, batch):
        images, targets = batch
        return (model(images) - targets).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[] if name in FLATTENING else pytest.mark.slow) for name in EXACT]
)
def test_channels_last_with_a_fused_optimizer_then_weights_are_those_of_one_process(strategy, trained, tmp_path):
    usual = 3 if STRATEGIES[strategy].many_devices else 1
    nproc, settings = LAYOUTS.get(strategy, (usual, {}))
    many = train_case(tmp_path, Images(), strategy, nproc, **STEPS, **settings)
    assert largest_difference(weights_of(many), weights_of(trained(Images(fused=False), **STEPS))) < TO_ROUNDING


def test_gradient_of_a_vector_then_has_the_strides_of_its_parameter():
    parameter = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    vector = torch.arange(96.0)
    gradient = buckets.as_gradient_of(parameter, vector)
    assert gradient.stride() == parameter.stride()
    assert torch.equal(gradient, vector.view(2, 3, 4, 4))
    plain = buckets.as_gradient_of(nn.Parameter(torch.zeros(96)), vector)
    assert plain.data_ptr() == vector.data_ptr()
