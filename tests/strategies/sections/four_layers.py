"""A model of four linear layers under a strategy that cuts it into sections."""

import torch
from torch import nn

from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.contract.step_facts import Requests
from dure.strategies.table import STRATEGIES, load_strategy
from tests.comm.gloo_ranks import on_ranks
from tests.specs import spec_of

CPU = torch.device("cpu")

LAYER_BYTES = [4 * (2 * 8 + 8), 4 * (8 * 16 + 16), 4 * (16 * 3 + 3), 4 * (3 + 1)]
"""Bytes of the parameters of each layer."""


def on_four_layers(name, num_ranks, look, **options):
    """Return what `look(strategy, step)` sees on each rank of a strategy with a model of four linear layers."""

    def work(group):
        strategy = load_strategy(name)(
            StrategyContext(STRATEGIES[name], group, (CPU,), Precision("fp32", "cpu"), spec_of(name, **options))
        )
        batch = torch.arange(12.0).view(6, 2)
        strategy.example = lambda num_samples: batch[:num_samples]
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(3, 1))
        strategy.prepare(model, lambda m: torch.optim.AdamW(m.parameters()), lambda model, x: model(x).mean())

        def step(*sizes):
            parts = batch[: sum(sizes)].split(sizes)
            microbatches = [Microbatch(batch=part, num_samples=len(part)) for part in parts]
            if strategy.share.takes_samples:
                strategy.forward_backward(microbatches, global_samples=sum(sizes), requests=Requests())
            else:
                strategy.serve_step(Requests())
            strategy.sync_gradients().read()
            strategy.optimizer_step()

        answer = look(strategy, step)
        strategy.close()
        return answer

    return on_ranks(num_ranks, work)
