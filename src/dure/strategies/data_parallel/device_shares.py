"""Fractions of a batch for the devices of one process, the first of which also has the optimiser's state."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.host.device_kinds import memory_of
from dure.host.devices import available_memory_bytes, total_memory_bytes


def fractions_of(num_devices: int, device0_share: float) -> list[float]:
    """Return the fraction of each device, of which all after the first get the same."""
    others = num_devices - 1
    return [1.0] if others == 0 else [device0_share] + [(1 - device0_share) / others] * others


def device0_share_by_memory(
    devices: Sequence[torch.device], *, gradient_bytes: float, state_bytes: float, counts_all: bool
) -> float:
    """Return the fraction of a batch for device 0 with which all devices fill up at the same batch size.

    The memory of a device for activations is its free memory less later allocations: the gradients on every device, and
    the optimiser's state on the first. Memory used by other processes varies, and the shares with it.

    Args:
        devices: At least one.
        gradient_bytes: Bytes of the gradients of a model.
        state_bytes: Bytes of the optimiser's state.
        counts_all: Whether all memory is counted as free, so that every run has the same shares.
    """
    if len(devices) == 1:
        return 1.0
    memories = [memory for memory in map(memory_of, devices) if memory is not None]
    if len(memories) == len(devices):
        free = [float(memory[counts_all]) for memory in memories]
    else:
        free = [(total_memory_bytes() if counts_all else available_memory_bytes()) / len(devices)] * len(devices)
    left = [max(0.0, available - gradient_bytes) for available in free]
    left[0] = max(0.0, left[0] - state_bytes)
    return left[0] / sum(left) if sum(left) else 1 / len(devices)


USUAL_STATE_TENSORS = 2.0
"""Parameter-sized tensors that AdamW keeps, assumed for an optimiser that cannot be tried."""


def state_tensors_per_parameter(optimizer: Optimizer) -> float:
    """Return the number of parameter-sized tensors that the optimiser keeps, by stepping a copy on small tensors."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    total: int = sum(parameter.numel() for parameter in parameters)
    if not total:
        return USUAL_STATE_TENSORS
    if optimizer.state:
        counts = [_parameter_sized(optimizer.state.get(p, {}), p) for p in parameters]
    else:
        probes = [nn.Parameter(p.new_zeros([2] * p.dim()), p.requires_grad) for p in parameters]
        try:
            # a copy of everything except the parameters: its constructor's arguments are unknown
            twin = copy.deepcopy(optimizer, {id(p): probe for p, probe in zip(parameters, probes, strict=True)})
            for probe in probes:
                probe.grad = torch.zeros_like(probe)
            twin.step()
            counts = [_parameter_sized(twin.state.get(probe, {}), probe) for probe in probes]
        except Exception:  # the optimiser may fail on these tensors for any reason
            return USUAL_STATE_TENSORS
    kept = sum(count * parameter.numel() for count, parameter in zip(counts, parameters, strict=True))
    return float(kept / total)


def _parameter_sized(state: Any, parameter: Tensor) -> int:
    values = state.values() if isinstance(state, dict) else []
    return sum(isinstance(value, Tensor) and value.shape == parameter.shape for value in values)
