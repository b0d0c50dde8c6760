"""Inspection of a task before training: its loss, its data, and what it does in an evaluation, on rank 0."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dure.strategies.contract.loss_traits import LossTraits
from dure.strategies.contract.strategy import Strategy
from dure.strategies.division.trial import Trial, is_equal
from dure.strategies.state.containers import tensors_in
from dure.strategies.state.generator_state import GENERATORS, generator_state
from dure.strategies.state.namespaces import ATOMS
from dure.training.inspection.loss_inspection import LossInspection, silent
from dure.training.session.loader import FetchRequest, Loader
from dure.training.session.sample_order import SampleOrder
from dure.training.task.task import Task

_MOST_PARTS = 100
"""Items of a container in a data set in which generators are looked for."""
_COPIED = "data"
"""Beginning of the paths of state in a data set of which loader processes have copies."""


def inspected_on_rank0(
    strategy: Strategy, task: Task, model: nn.Module, loader: Loader, order: SampleOrder
) -> LossTraits:
    """Inspect the task's loss on rank 0; other ranks return at once, to be told.

    Args:
        strategy: Not prepared yet, with its `objects`.
        task: With the loss.
        model: Whole, on the CPU, where it is again afterwards.
        loader: Of the training data.
        order: Of the training data; its first samples are those of the first step.
    """
    device = strategy.device
    if strategy.group.rank:
        return LossTraits()
    if device.type != "cpu" and 4 * _num_bytes(model) > torch.accelerator.get_memory_info(device)[0]:
        return LossTraits(reason_unknown="the whole model does not fit the device, to be tried")
    fetch = _fetch_of(loader, order)
    once = [tensor.clone() for tensor in tensors_in(fetch(range(min(2, order.num_samples))))]
    states = [*_generator_states(loader.data)]
    model.to(device)
    try:
        traits = inspection_of(strategy, task, model, loader, order).traits(order.num_samples)
        traits = replace(traits, **_tried_in_evaluation(strategy, task, model, fetch))
    finally:
        model.to("cpu")
    # after the loss, which may have written into what the data set holds
    again = list(tensors_in(fetch(range(min(2, order.num_samples)))))
    is_same = len(once) == len(again) and all(map(is_equal, once, again))
    has_drawn = states != [*_generator_states(loader.data)]
    state = (*traits.learned_state, *traits.counted_state)
    return replace(
        traits,
        collate_draws=loader.has_collate_drawn,
        data_changes=has_drawn or not is_same,
        copied_state=tuple(path for path in state if path.startswith(f"{_COPIED}.")),
    )


def inspection_of(
    strategy: Strategy, task: Task, model: nn.Module, loader: Loader, order: SampleOrder
) -> LossInspection:
    """Return an inspection of the task's loss on the first samples of training.

    Args:
        strategy: The one that divides batches, with its `objects`.
        task: With the loss.
        model: Whole, on the strategy's device.
        loader: Of the training data.
        order: Of the training data.
    """
    copied = {_COPIED: loader.data} if loader.has_workers else {}
    even = -(-strategy.options.global_batch_size // (strategy.data_world_size * len(strategy.devices)))
    return LossInspection(
        task.loss,
        model,
        _fetch_of(loader, order),
        {**copied, **strategy.objects},
        strategy.precision.autocast,
        is_exact=strategy.precision.name == "fp32",
        is_divided=strategy.group.world_size * len(strategy.devices) > 1 or bool(strategy.options.microbatch_size),
        most_at_once=strategy.options.microbatch_size or strategy.default_microbatch_size() or even,
    )


def _fetch_of(loader: Loader, order: SampleOrder) -> Callable[[Sequence[int]], Any]:
    first = order.permutation(0)
    own = loader.without_workers()
    return lambda places: next(own.batches([FetchRequest(0, first[list(places)])]))


def _generator_states(data: Any, depth: int = 4) -> Iterator[str]:
    """Yield the states of the generators that a data set keeps, or what it is made of does."""
    if isinstance(data, GENERATORS):
        yield repr(generator_state(data))
    elif depth and isinstance(data, list | tuple | dict):
        for item in [*(data.values() if isinstance(data, dict) else data)][:_MOST_PARTS]:
            yield from _generator_states(item, depth - 1)
    elif depth and not isinstance(data, (*ATOMS, Tensor, type)) and hasattr(data, "__dict__"):
        for value in vars(data).values():
            yield from _generator_states(value, depth - 1)


def _tried_in_evaluation(
    strategy: Strategy, task: Task, model: nn.Module, fetch: Callable[[Sequence[int]], Any]
) -> dict[str, Any]:
    """Return which parameters the metrics write to without gradients, and whether training samples can be evaluated."""
    try:
        with silent(), Trial(model, strategy.objects, seed=0, watches_writes=False) as trial:
            model.eval()
            with torch.no_grad(), strategy.precision.autocast():
                task.metrics(model, fetch(range(2)))
        with silent(), Trial(model, strategy.objects, seed=0, watches_writes=False):
            model.eval()
            with torch.no_grad(), strategy.precision.autocast():
                task.loss(model, fetch(range(2)))
    except Exception:
        return {}  # the evaluation's own data may be of another kind
    return {"writes_in_evaluation": tuple(trial.parameters), "is_evaluable": True}


def _num_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])
