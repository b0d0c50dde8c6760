"""What the blocks of a model cost: seconds as measured, operations as counted, or bytes held."""

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dure.strategies.batches import map_tensors
from dure.strategies.section_survey import Survey, tensors_of

Autocast = Callable[[], AbstractContextManager[Any]]

_REPEATS = 3
_FLOPS_PER_BYTE = 4.0
"""What moving a byte counts beside an operation of a matrix product: no block is for nothing."""


def measured_seconds(blocks: Mapping[str, nn.Module], seen: Survey, autocast: Autocast) -> list[float]:
    """Return the seconds of each call, forward and backward: the shortest of a few, after one that does not count.

    Measured on copies, so that neither buffers nor gradients of the model change.
    """
    costs = []
    for call, (args, kwargs) in zip(seen.chain.calls, seen.inputs, strict=True):
        twin = copy.deepcopy(blocks[call])
        costs.append(min(_seconds_once(twin, args, kwargs, autocast) for _ in range(_REPEATS + 1)))
    return costs


def _seconds_once(block: nn.Module, args: Any, kwargs: Any, autocast: Autocast) -> float:
    args, kwargs = map_tensors((args, dict(kwargs)), _leaf)
    device = next((tensor.device for tensor in tensors_of((args, kwargs))), torch.device("cpu"))
    start = _now(device)
    with torch.enable_grad(), autocast():
        results = [t for t in tensors_of(block(*args, **kwargs)) if t.requires_grad]
        total = torch.stack([t.float().sum() for t in results]).sum() if results else None
    if total is not None:
        total.backward()
    return _now(device) - start


def _leaf(tensor: Tensor) -> Tensor:
    # a copy: a block may work in place
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def counted_operations(blocks: Mapping[str, nn.Module], seen: Survey) -> list[float]:
    """Return the operations of each call, forward and backward: the same in every run, on every machine.

    Those of matrix products, convolutions and attention, three times for forward and both gradients, and the bytes that
    are kept for backward, for what computes element by element.
    """
    costs = []
    for position, call in enumerate(seen.chain.calls):
        args, kwargs = map_tensors(seen.inputs[position], torch.clone)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            copy.deepcopy(blocks[call])(*args, **kwargs)
        moved = seen.saved_bytes[position] + sum(
            t.numel() * t.element_size() for t in tensors_of(seen.outputs[position])
        )
        costs.append(3.0 * counter.get_total_flops() + _FLOPS_PER_BYTE * moved)
    return costs


def held_bytes(blocks: Mapping[str, nn.Module], seen: Survey, samples_per_sample: float) -> list[float]:
    """Return the bytes that each call makes its device hold: parameters with their gradients, and activations.

    Args:
        blocks: By name.
        seen: A survey of a few samples.
        samples_per_sample: Samples of a microbatch for each one of the survey's.
    """
    costs = []
    for position, call in enumerate(seen.chain.calls):
        is_first = seen.chain.calls.index(call) == position
        state = parameter_bytes(blocks[call]) if is_first else 0
        costs.append(state + seen.saved_bytes[position] * samples_per_sample)
    return costs


def parameter_bytes(module: nn.Module) -> int:
    """Return the bytes of parameters, of the gradients of those that are trained, and of buffers."""
    parameters = [p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in module.parameters()]
    return sum(parameters) + sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
