"""Local SGD and DiLoCo as one writes them by hand, in one process; and one strategy alone on a rank."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dure.comm.groups import Group
from dure.data.partition import shares
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.contract.step_facts import NO_REQUESTS, Requests, StepFacts
from dure.strategies.table import STRATEGIES, load_strategy
from dure.training.seeds import seed_everything
from dure.training.session.sample_order import SampleOrder
from tests.specs import spec_of

CPU = torch.device("cpu")


class ByHand:
    """Models, as many as ranks, in one process, each with an optimiser of its own."""

    def __init__(self, task: Any, num_ranks: int, settings: dict[str, Any]) -> None:
        self.task, self.settings, self.num_ranks = task, settings, num_ranks
        self.models = []
        for _ in range(num_ranks):
            seed_everything(settings["seed"])
            self.models.append(task.build_model())
        self.optimizers = [task.build_optimizer(model) for model in self.models]
        self.items = [0.0] * num_ranks

    def local_step(self, rank: int, indices: Any, rate: float) -> None:
        """Step by the mean loss of a share; one without samples changes nothing."""
        if not len(indices):
            return
        model, optimizer = self.models[rank], self.optimizers[rank]
        loss = self.task.loss(model, self.data.__getitems__(indices))
        count = len(indices)
        if not isinstance(loss, Tensor):
            loss, count = loss.total / loss.count, float(loss.count)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss.backward()
        if self.settings.get("clip_norm"):
            nn.utils.clip_grad_norm_(model.parameters(), self.settings["clip_norm"])
        optimizer.step()
        self.items[rank] += count

    @torch.no_grad()
    def average(self) -> None:
        """Give every model the mean, weighted by items."""
        total = sum(self.items)
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            mean = sum(p * (items / total) for p, items in zip(parameters, self.items, strict=True))
            for parameter in parameters:
                parameter.copy_(mean)
        self.items = [0.0] * self.num_ranks

    @torch.no_grad()
    def save(self) -> None:
        """Do what a checkpoint does: average what there is to average, and the optimisers' moments evenly."""
        if any(self.items):
            self.average()
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            states = [o.state[p] for o, p in zip(self.optimizers, parameters, strict=True) if p.requires_grad]
            for key, first in (states[0] if states else {}).items():
                mean = first.clone() if key == "step" else sum(state[key] for state in states) / self.num_ranks
                for state in states:
                    state[key].copy_(mean)

    def train(self, every: int, outer: Callable[[nn.Module], None] | None = None) -> dict[str, Tensor]:
        """Return the weights after all steps, averaged every `every`, and at the ends of epochs, which are saved."""
        settings, self.data = self.settings, self.task.train_data()
        schedule = self.task.build_schedule(self.optimizers[0], settings["samples"])
        rate = self.optimizers[0].param_groups[0]["lr"]
        order = SampleOrder(self.task.num_samples, settings["global_batch_size"], seed=settings["seed"])
        for number, batch in enumerate(order.batches(0, settings["samples"]), 1):
            factor = schedule(batch.samples_seen - len(batch.indices)) if schedule else 1.0
            counts = shares(len(batch.indices), self.num_ranks)
            for rank, count in enumerate(counts):
                start = sum(counts[:rank])
                self.local_step(rank, batch.indices[start : start + count], rate * factor)
            if number % every == 0:
                self.average()
                if outer is not None:
                    for model in self.models:
                        outer(model)
            if batch.epoch_samples == order.epoch_samples or batch.samples_seen == settings["samples"]:
                self.save()
        return self.models[0].state_dict()


def prepared(
    name: str,
    group: Group,
    model: nn.Module,
    build_optimizer: Callable[..., Any],
    precision: str = "fp32",
    **options: Any,
) -> Any:
    """Return a strategy over a model of vectors, whose loss is the mean of what the model answers, ready to step."""
    info, options = STRATEGIES[name], {"comm": "ring", **options}
    strategy = load_strategy(name)(
        StrategyContext(info, group, (CPU,), Precision(precision, "cpu"), spec_of(name, **options))
    )
    strategy.prepare(model, build_optimizer, lambda model, batch: model(batch).mean())
    return strategy


def step(strategy: Any, rows: Tensor, requests: Requests = NO_REQUESTS) -> StepFacts:
    """Make a step of which this rank has its share of all rows (N, D)."""
    group = strategy.group
    counts = shares(len(rows), group.world_size)
    mine = rows[sum(counts[: group.rank]) :][: counts[group.rank]]
    is_empty = not len(mine)
    batch = Microbatch(batch=rows[:1] if is_empty else mine, num_samples=len(mine) or 1, is_padding=is_empty)
    strategy.forward_backward([batch], global_samples=len(rows), requests=requests)
    facts = strategy.sync_gradients()
    strategy.optimizer_step()
    return facts
