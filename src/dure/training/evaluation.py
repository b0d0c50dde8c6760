"""Exact evaluation: every sample once, the same batches and the same result on any number of ranks."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dure.errors import DataInvalid, TaskInvalid
from dure.measure.records import Metric
from dure.measure.sums import Sum
from dure.strategies.base import Strategy
from dure.strategies.batches import to_device
from dure.strategies.replicas import DeviceThreads
from dure.training.fetch import FetchRequest, Loader
from dure.training.task import Task

_MOST_SAMPLES_PER_BATCH = 256
_LEAST_BATCHES = 16


def evaluation_batch_size(num_samples: int, asked: int | None) -> int:
    """Return the samples per evaluation batch: never a function of the number of ranks.

    The same batches at any world size make every batch's float32 arithmetic the same too. Sixteen batches or more
    spread evenly over a few ranks.
    """
    if asked is not None:
        return asked
    return max(1, min(_MOST_SAMPLES_PER_BATCH, math.ceil(num_samples / _LEAST_BATCHES)))


def evaluate(
    task: Task,
    strategy: Strategy,
    loader: Loader,
    *,
    num_samples: int,
    batch_size: int,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, Metric]:
    """Evaluate loss and metrics over all samples of the evaluation data.

    Whole batches are dealt to the ranks in turn. Every batch's sums are gathered and added with `math.fsum`, whose
    result does not depend on the order, so it is bit-equal at any world size if the batches' own sums are.

    Returns:
        `loss` and the task's metrics, each a value and the count it was divided by.

    Communication: one gathered JSON message of every batch's sums, about 40 bytes per batch and metric.
    """
    strategy.before_reading()
    models = strategy.evaluation_models()
    counts = [min(batch_size, num_samples - start) for start in range(0, num_samples, batch_size)]
    mine = _batches_of(strategy, len(counts))
    requests = [FetchRequest(0, np.arange(i * batch_size, i * batch_size + counts[i])) for i in mine]
    sums: list[dict[str, Sum]] = []
    were_training = [model.training for model in models]
    # virtual devices have nothing to gain, and what a task keeps between loss and metrics is not for several at once
    threads = DeviceThreads(strategy.devices[: len(models)], in_order=len(set(strategy.devices)) == 1)
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            batches = zip(loader.batches(requests), (counts[i] for i in mine), strict=True)
            for together in _grouped(batches, len(models)):
                on_batch()
                places = zip(models, strategy.devices, together, strict=False)
                calls = [_evaluation_call(task, strategy, model, device, *b) for model, device, b in places]
                sums.extend(threads.run(calls))
    finally:
        threads.close()
        for model, was_training in zip(models, were_training, strict=True):
            model.train(was_training)
    counted = sums[: _num_own(strategy, len(counts))]
    plain = [{name: (_number(s.total), _number(s.count)) for name, s in batch.items()} for batch in counted]
    return _combined([batch for rank in strategy.group.all_gather_json(plain) for batch in rank])


def _batches_of(strategy: Strategy, num_batches: int) -> list[int]:
    """Return the batches that this rank evaluates; where all must take part in each forward, some of them in vain."""
    if not strategy.takes_samples:
        return []
    mine = list(range(strategy.data_rank, num_batches, strategy.data_world_size))
    most = math.ceil(num_batches / strategy.data_world_size)
    return mine + [0] * (most - len(mine)) if strategy.evaluates_together else mine


def _num_own(strategy: Strategy, num_batches: int) -> int:
    """Return how many of them count: of ranks that share their samples only the first's do."""
    return len(range(strategy.data_rank, num_batches, strategy.data_world_size)) if strategy.leads_share else 0


def _evaluation_call(
    task: Task, strategy: Strategy, model: nn.Module, device: torch.device, batch: Any, num_samples: int
) -> Callable[[], dict[str, Sum]]:
    def call() -> dict[str, Sum]:
        with strategy.precision.autocast():
            there = to_device(batch, device)
            loss = strategy.computed(task.loss, model, there)
            if not isinstance(loss, Sum):
                loss = _mean_as_sum(loss, num_samples)
            measured = strategy.computed(task.metrics, model, there)
        if not isinstance(measured, dict) or not all(isinstance(value, Sum) for value in measured.values()):
            raise TaskInvalid(f"the task's metrics returned {measured!r:.80}: return a dict of dure.Sum(total, count)")
        if "loss" in measured:
            raise TaskInvalid("the task's metrics returned one named loss, as the task's own loss is: rename it")
        return {"loss": loss, **measured}

    return call


def _mean_as_sum(loss: object, num_samples: int) -> Sum:
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        seen = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:80]
        raise TaskInvalid(
            f"the task's loss returned {seen} in an evaluation: return a scalar tensor, or dure.Sum(total, count)"
        )
    return Sum((loss if loss.device.type == "mps" else loss.double()) * num_samples, num_samples)


def _combined(batches: Sequence[dict[str, tuple[float, float]]]) -> dict[str, Metric]:
    names = list(dict.fromkeys(name for batch in batches for name in batch))
    metrics = {}
    for name in names:
        total = math.fsum(batch[name][0] for batch in batches if name in batch)
        count = math.fsum(batch[name][1] for batch in batches if name in batch)
        if count == 0:
            raise DataInvalid(f"the evaluation metric {name} has a count of 0 over all samples: nothing to divide by")
        metrics[name] = Metric(value=total / count, count=int(count) if count.is_integer() else count)
    return metrics


def _number(value: "Tensor | float") -> float:
    if isinstance(value, Tensor) and value.dim():
        raise TaskInvalid(
            f"a dure.Sum of the evaluation holds a tensor of shape {tuple(value.shape)}: give it scalars, one Sum for "
            "each number"
        )
    return float(value.detach().double().cpu().item() if isinstance(value, Tensor) else value)


def _grouped(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    group: list[Any] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
