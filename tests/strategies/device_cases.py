"""Strategies of one process beside `single`, on batches of vectors in float64."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from dure.comm.groups import Solo
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.contract.step_facts import Requests
from dure.strategies.table import STRATEGIES, load_strategy
from tests.specs import spec_of

CPU = torch.device("cpu")
WIDTH = 6
TO_ROUNDING = 1e-13
"""Sums of at most a hundred float64 terms in another order."""


class Net(nn.Module):
    """Three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.body(x))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def rows(*sizes: int) -> list[Tensor]:
    """Return a batch of each size."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(size, WIDTH, generator=generator, dtype=torch.float64) for size in sizes]


def trained_weights(
    strategy: str,
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Sequence[Any],
    *,
    devices: int = 2,
    build_optimizer: Callable[[nn.Module], Optimizer] = sgd,
    example: Callable[[int], Any] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Train one step on each batch, and return the weights and buffers."""
    torch.manual_seed(0)
    settings = spec_of(strategy, **options)
    trained = load_strategy(strategy)(
        StrategyContext(STRATEGIES[strategy], Solo(), (CPU,) * devices, Precision("fp32", "cpu"), settings)
    )
    trained.example = example
    trained.prepare(build().double(), build_optimizer, loss)
    try:
        torch.manual_seed(1)
        for batch in copy.deepcopy(list(batches)):
            size = num_samples(batch)
            microbatch = Microbatch(batch=batch, num_samples=size)
            trained.forward_backward([microbatch], global_samples=size, requests=Requests())
            trained.sync_gradients().read()
            trained.optimizer_step()
    finally:
        trained.close()
    return {name: value.detach().clone() for name, value in trained.model.state_dict().items()}


def num_samples(batch: Any) -> int:
    """Return the rows of the first tensor of a batch."""
    if isinstance(batch, Tensor):
        return len(batch)
    return num_samples(next(iter(batch.values())) if hasattr(batch, "values") else batch[0])


def difference(
    strategy: str,
    build: Callable[[], nn.Module] = Net,
    loss: Callable[[], Callable[[nn.Module, Any], Tensor]] = lambda: mean_square,
    batches: Sequence[Any] | None = None,
    **options: Any,
) -> float:
    """Return the largest difference between the weights under a strategy and those under `single`.

    Args:
        strategy: Its name.
        build: Makes the model.
        loss: Makes the loss, a new one for each of the two.
        batches: By default three of different sizes.
        **options: Arguments of `trained_weights`.
    """
    batches = rows(5, 4, 3) if batches is None else batches
    optimizer = {"build_optimizer": options["build_optimizer"]} if "build_optimizer" in options else {}
    one = trained_weights("single", build, loss(), batches, devices=1, **optimizer)
    other = trained_weights(strategy, build, loss(), batches, **options)
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
