"""Average of the optimiser states of ranks that stepped independently."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.comm.groups import Group
from dure.strategies.state.optimizer import STEP_KEY


def average_optimizer_state(model: nn.Module, optimizer: Optimizer, group: Group) -> None:
    """Give every rank's optimiser the same state.

    Floating-point tensors (momentum, second moments) become the mean over the ranks that have them; a rank may have
    none yet, because it had no samples, or no gradient for a parameter. Counts of steps, integers and plain values
    become those of the lowest rank that has them. State that an optimiser keeps elsewhere is not changed.

    Args:
        model: The same on every rank.
        optimizer: Optimiser over parameters of `model`, built in the same way on every rank.
        group: All ranks; each calls this.

    Communication: one gathered JSON message of about 100 bytes per tensor, then one all_reduce of the state for each
        dtype and device, and a broadcast for each integer tensor.
    """
    parameters = dict(model.named_parameters())
    own = {name: optimizer.state[p] for name, p in parameters.items() if p in optimizer.state}
    described = {name: {key: _describe(v) for key, v in state.items()} for name, state in own.items()}
    everyone: list[dict[str, dict[str, Any]]] = group.all_gather_json(described)
    summed: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, float]]] = {}
    for name, key, holders in _in_one_order(everyone):
        kind = everyone[holders[0]][name][key]
        state = optimizer.state[parameters[name]]
        if "value" in kind:
            state[key] = kind["value"]
        if "dtype" not in kind:
            continue
        if key not in state:
            state[key] = _zeros(kind, parameters[name])
        value: Tensor = state[key]
        is_lowest = group.rank == holders[0]
        if not value.is_floating_point():
            flat = value.reshape(-1)
            group.broadcast([flat], source_rank=holders[0])
            value.copy_(flat.view(value.shape))
            continue
        weight = float(is_lowest) if key == STEP_KEY else (group.rank in holders) / len(holders)
        summed.setdefault((value.dtype, value.device), []).append((value, weight))
    for tensors in summed.values():
        _add_up(tensors, group)


def _in_one_order(everyone: list[dict[str, dict[str, Any]]]) -> Iterator[tuple[str, str, list[int]]]:
    """Yield every name and key that any rank has, with these ranks, in the same order on all ranks."""
    entries = dict.fromkeys((name, key) for theirs in everyone for name, state in theirs.items() for key in state)
    for name, key in entries:
        yield name, key, [rank for rank, theirs in enumerate(everyone) if key in theirs.get(name, {})]


def _describe(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        is_on_host = value.device.type == "cpu"
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "is_on_host": is_on_host}
    return {"value": value} if value is None or isinstance(value, bool | int | float | str) else {}


def _zeros(kind: Mapping[str, Any], parameter: Tensor) -> Tensor:
    """Return zeros like the tensor described by another rank, with the parameter's strides if the shapes are equal."""
    dtype, device = getattr(torch, kind["dtype"]), "cpu" if kind["is_on_host"] else parameter.device
    if kind["shape"] == list(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, device=device, requires_grad=False)
    return torch.zeros(kind["shape"], dtype=dtype, device=device)


@torch.no_grad()
def _add_up(tensors: list[tuple[Tensor, float]], group: Group) -> None:
    """Replace tensors by their weighted sums over all ranks, all in one message."""
    flat = torch.cat([tensor.reshape(-1) * weight for tensor, weight in tensors])
    group.all_reduce_sum(flat)
    for (tensor, _), part in zip(tensors, flat.split([tensor.numel() for tensor, _ in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
