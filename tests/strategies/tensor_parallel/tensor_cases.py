"""Tensor parallelism on forked ranks beside one process, on batches of tokens in float64."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from dure.comm.groups import Group, Solo
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.contract.step_facts import Requests
from dure.strategies.table import STRATEGIES, load_strategy
from tests.comm.gloo_ranks import on_ranks
from tests.specs import spec_of

WIDTH, LENGTH = 6, 3
TO_ROUNDING = 1e-12
"""Tolerance as a fraction of the largest weight: sums of a few hundred float64 terms in another order, over three
steps."""

Loss = Callable[[nn.Module, Tensor], Tensor]
Case = tuple[Callable[[], nn.Module], Callable[[], Loss]]
"""Makes the model, and a new loss."""


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def tokens(*sizes: int) -> list[Tensor]:
    """Return a batch of each size."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(size, LENGTH, WIDTH, generator=generator, dtype=torch.float64) for size in sizes]


def trained_weights(
    strategy: str, group: Group, build: Callable[[], nn.Module], loss: Loss, batches: Sequence[Tensor], **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """Train one step on each batch, and return the whole weights and the losses."""
    torch.manual_seed(0)
    settings = spec_of(strategy, **options)
    trained = load_strategy(strategy)(
        StrategyContext(STRATEGIES[strategy], group, (torch.device("cpu"),), Precision("fp32", "cpu"), settings)
    )
    trained.prepare(build().double(), lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9), loss)
    torch.manual_seed(1)
    losses = []
    try:
        for batch in copy.deepcopy(list(batches)):
            microbatch = Microbatch(batch=batch, num_samples=len(batch))
            trained.forward_backward([microbatch], global_samples=len(batch), requests=Requests())
            losses.append(trained.sync_gradients().read()[0])
            trained.optimizer_step()
        state = trained.model.state_dict()
        return {name: _whole(value).clone() for name, value in state.items()}, losses
    finally:
        trained.close()


def _whole(value: Any) -> Tensor:
    found: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return found.detach()


def differences(cases: Sequence[Case], num_ranks: int = 2, **options: Any) -> list[Any]:
    """Return for each case the largest relative difference to `single` on any rank, or a rank's exception."""
    batches = tokens(4, 3, 2)
    expected = [trained_weights("single", Solo(), build, loss(), batches) for build, loss in cases]

    def work(group: Group) -> list[Any]:
        return [_caught(group, build, loss(), batches, options) for build, loss in cases]

    by_rank = on_ranks(num_ranks, work)
    return [_compared(one, [ranks[index] for ranks in by_rank]) for index, one in enumerate(expected)]


def _caught(group: Group, build: Any, loss: Loss, batches: Sequence[Tensor], options: dict[str, Any]) -> Any:
    try:
        return trained_weights("tensor_parallel", group, build, loss, batches, **options)
    except Exception as error:
        return error


def _compared(expected: Any, found: list[Any]) -> Any:
    if errors := [one for one in found if isinstance(one, Exception)]:
        return errors[0]
    weights, losses = expected
    differences = [
        float((value - own[name]).abs().max() / max(1.0, float(value.abs().max())))
        for own, _ in found
        for name, value in weights.items()
    ]
    differences += [abs(a - b) / max(1.0, abs(b)) for _, own in found for a, b in zip(own, losses, strict=True)]
    return max(differences)
