"""Exact evaluation: each sample once, in the same batches and with the same result on any number of ranks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dure.data.randomness import GeneratorStates, kept_global_randomness, seed_draws
from dure.errors import DataInvalid, TaskInvalid
from dure.host.device_kinds import has_float64
from dure.records.step_record import Metric
from dure.records.sums import Sum, exact_sum
from dure.strategies.contract.batches import to_device
from dure.strategies.contract.strategy import Strategy
from dure.strategies.device_threads import DeviceThreads
from dure.terminal import few, print_status
from dure.training.session.loader import FetchRequest, Loader
from dure.training.session.metric_checks import check_count, check_name, check_sum, doubt
from dure.training.task.task import Task

_MOST_SAMPLES_PER_BATCH = 256
_LEAST_BATCHES = 16


def evaluation_batch_size(num_samples: int, asked: int | None) -> int:
    """Return the samples per evaluation batch, which never depends on the number of ranks.

    Equal batches at any world size also make each batch's float32 arithmetic equal. Sixteen or more batches spread
    evenly over a few ranks.
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
    has_metrics: bool = True,
    seed: int | None = None,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, Metric]:
    """Evaluate loss and metrics over all samples of the evaluation data.

    Whole batches are assigned to the ranks in turn. The sums of all batches are gathered and added with `exact_sum`,
    whose result does not depend on the order. The result is therefore bit-equal at any world size if the batches' own
    sums are. The random numbers of a batch come from its own seed; those of training continue as if there had been no
    evaluation.

    Args:
        task: Task whose loss and metrics are evaluated.
        strategy: Strategy that holds the models.
        loader: Loader of the evaluation data.
        num_samples: Number of samples to evaluate, from the first one.
        batch_size: Samples per batch; the last batch may be smaller.
        has_metrics: Whether to evaluate the task's metrics as well as its loss.
        seed: Seed for the draws of model, loss and metrics; None for the seed of the run.
        on_batch: Called before each batch.

    Returns:
        `loss` and the task's metrics, each as a value and the count it was divided by.

    Communication: one gathered JSON message with the sums of every batch, about 40 bytes per batch and metric.
    """
    strategy.before_reading()
    models = strategy.evaluation_models()
    counts = [min(batch_size, num_samples - start) for start in range(0, num_samples, batch_size)]
    mine = strategy.share.evaluated(len(counts))
    requests = [FetchRequest(0, np.arange(i * batch_size, i * batch_size + counts[i])) for i in mine]
    sums: list[dict[str, Sum]] = []
    modes = [(module, module.training) for model in models for module in model.modules()]
    devices = strategy.devices[: len(models)]
    with ExitStack() as stack:
        stack.enter_context(kept_global_randomness(*devices))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(_put_back, strategy, models, modes)
        calls_on_devices = stack.enter_context(closing(_SeededCalls(devices, loader.seed if seed is None else seed)))
        for model in models if strategy.share.takes_samples else ():  # a server has no whole model
            strategy.computed(model.eval)
        stack.enter_context(torch.no_grad())
        batches = zip(loader.batches(requests), (counts[i] for i in mine), strict=True)
        for together in _grouped(zip(mine, batches, strict=True), len(models)):
            on_batch()
            places = zip(models, devices, together, strict=False)
            calls = [
                (i, _evaluation_call(task, strategy, model, device, *b, has_metrics=has_metrics))
                for model, device, (i, b) in places
            ]
            sums.extend(calls_on_devices.run(calls))
    # of all batches: reading a number that is divided over the ranks is a call of all of them
    numbers = [{name: (_number(s.total), _number(s.count)) for name, s in batch.items()} for batch in sums]
    counted = numbers[: strategy.share.num_counted(len(counts))]
    plain = [{name: (total, check_count(name, count)) for name, (total, count) in batch.items()} for batch in counted]
    all_batches = [batch for rank in strategy.group.all_gather_json(plain) for batch in rank]
    metrics = _combined(all_batches)
    if strategy.group.rank == 0:
        _print_doubts(task, all_batches, num_samples)
    return metrics


def _put_back(strategy: Strategy, models: list[nn.Module], modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Restore the modes of modules by `train`, in which some modules do work (LoRA unmerges its weights there)."""
    before = {id(module): mode for module, mode in modes}
    for model in models if strategy.share.takes_samples else ():
        strategy.computed(model.train, before[id(model)])
    for module, mode in modes:
        if module.training is not mode:
            module.training = mode


_doubted: set[tuple[int, str]] = set()
"""Task identity and name of each metric already reported; identities because a task need not be hashable."""


def _print_doubts(task: Task, batches: Sequence[dict[str, tuple[float, float]]], num_samples: int) -> None:
    """Print each implausible metric value, once per metric."""
    for name in sorted({name for batch in batches for name in batch}):
        words = doubt(name, [batch[name] for batch in batches if name in batch], num_samples)
        if words is not None and (id(task), name) not in _doubted:
            _doubted.add((id(task), name))
            print_status(words)


def check_counts(at_once: Mapping[str, Metric], in_parts: Mapping[str, Metric], num_samples: int) -> None:
    """Refuse a metric whose totals add up over batches while its counts do not, which gives no meaningful mean.

    Args:
        at_once: Metrics of some samples.
        in_parts: Metrics of the same samples, evaluated in smaller batches.
        num_samples: Number of these samples.

    Raises:
        TaskInvalid: The metric counts batches, which is right only for a total that is a mean over its batch.
    """
    for name, metric in at_once.items():
        parts = in_parts.get(name, metric)
        totals = metric.value * metric.count, parts.value * parts.count
        is_total_additive = totals[0] != 0 and math.isclose(*totals, rel_tol=1e-3)
        if name != "loss" and is_total_additive and not math.isclose(parts.count, metric.count, rel_tol=1e-5):
            raise TaskInvalid(
                f"the task's metric {name} counts {metric.count:g} over {num_samples} samples and "
                f"{parts.count:g} over the same in smaller batches: a dure.Sum is a total over items and the number of "
                "these items, such as dure.Sum(is_correct.sum(), len(is_correct))"
            )


class _SeededCalls:
    """Runner of one call per device at a time, each with the random numbers of its own batch."""

    def __init__(self, devices: Sequence[torch.device], seed: int) -> None:
        self._devices = devices
        self._seed = seed
        self._one_by_one = DeviceThreads(devices, in_order=True)
        self._together: DeviceThreads | None = None
        self._is_first = True

    def run(self, calls: Sequence[tuple[int, Callable[[], Any]]]) -> list[Any]:
        """Run the calls of some batches, given with their batch numbers; return their results in order."""
        drew: list[bool] = []

        def seeded(number: int, call: Callable[[], Any], device: torch.device) -> Any:
            seed_draws(device, self._seed, number)
            if not self._is_first:
                return call()
            before = GeneratorStates.now(device)
            result = call()
            drew.append(not GeneratorStates.now(device).is_same_as(before))
            return result

        threads = self._together or self._one_by_one
        pairs = zip(calls, self._devices, strict=False)
        results = threads.run([partial(seeded, number, call, device) for (number, call), device in pairs])
        if self._is_first and len(set(self._devices)) > 1 and not any(drew):
            # virtual devices gain nothing; threads share generators, so calls that draw run one after the other
            self._together = DeviceThreads(self._devices, in_order=False)
        self._is_first = False
        return results

    def close(self) -> None:
        """Stop the threads."""
        if self._together is not None:
            self._together.close()


def _evaluation_call(
    task: Task,
    strategy: Strategy,
    model: nn.Module,
    device: torch.device,
    batch: Any,
    num_samples: int,
    *,
    has_metrics: bool,
) -> Callable[[], dict[str, Sum]]:
    def call() -> dict[str, Sum]:
        with strategy.precision.autocast(), strategy.state_guard:
            there = to_device(batch, device)
            loss = strategy.computed(task.loss, model, there)
            if not isinstance(loss, Sum):
                loss = _mean_as_sum(loss, num_samples)
            # after the loss, which may set the flags in each of its calls, in training as well
            are_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
            measured = strategy.computed(task.metrics, model, there) if has_metrics else {}
        changed = []
        for name, parameter in model.named_parameters():
            parameter.grad = None  # loss or metrics may call backward, and the next step begins without gradients
            if parameter.requires_grad is not are_trained.get(name):
                changed.append(name)
        if changed:
            raise TaskInvalid(
                f"the task's metrics freeze or unfreeze {few(changed)} in an evaluation, which is to look at "
                "the model only, and of which each rank has its own batches: do it in the loss where model.training "
                "is true, or set the flags back as they were"
            )
        if not isinstance(measured, dict):
            raise TaskInvalid(f"the task's metrics returned {measured!r:.80}: return a dict of dure.Sum(total, count)")
        if wrong := [name for name, value in measured.items() if not isinstance(value, Sum)]:
            raise TaskInvalid(
                f"the task's metrics returned {measured[wrong[0]]!r:.80} as {wrong[0]!r:.40}: return the total over "
                "the batch and what it counts, such as dure.Sum(correct.sum(), len(correct)), for batches may differ "
                "in size"
            )
        for name, value in measured.items():
            check_name(name)
            check_sum(name, value)
        if "loss" in measured:
            raise TaskInvalid("the task's metrics returned one named loss, as the task's own loss is: rename it")
        return {"loss": loss, **measured}

    return call


def _mean_as_sum(loss: object, num_samples: int) -> Sum:
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        seen = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:80]
        hint = " (its mean, say)" if isinstance(loss, Tensor) else ", with a return statement" if loss is None else ""
        raise TaskInvalid(
            f"the task's loss returned {seen} in an evaluation: return a scalar tensor{hint}, or dure.Sum(total, count)"
        )
    return Sum((loss.double() if has_float64(loss.device.type) else loss) * num_samples, num_samples)


def _combined(batches: Sequence[dict[str, tuple[float, float]]]) -> dict[str, Metric]:
    names = list(dict.fromkeys(name for batch in batches for name in batch))
    metrics = {}
    for name in names:
        total = exact_sum(batch[name][0] for batch in batches if name in batch)
        count = exact_sum(batch[name][1] for batch in batches if name in batch)
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
    try:
        return float(value.detach().double().cpu().item() if isinstance(value, Tensor) else value)
    except OverflowError as error:
        raise TaskInvalid("a dure.Sum of the evaluation holds an integer that no float holds: scale it") from error


def _grouped(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    group: list[Any] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
