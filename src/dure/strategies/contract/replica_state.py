"""State that ranks hold alike, bit by bit, as long as nothing is wrong: the object of replica checks."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from dure.strategies.state.sync_batchnorm import SyncBatchNorm


@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """A rank's replica of a part of the state."""

    part: str
    """Ranks that hold the same part hold the same tensors, under the same names and in the same order."""
    tensors: dict[str, Tensor] = field(default_factory=dict)


def replica_state(
    part: str,
    parameters: Iterable[tuple[str, Tensor]],
    optimizer: Optimizer | None = None,
    model: nn.Module | None = None,
) -> ReplicaState:
    """Return parameters, the optimiser's state of them, and the statistics that a model's ranks have in common.

    Other buffers are left out: each rank may change them by its own samples, and before they are read those of one
    rank are sent to all.

    Args:
        part: What of the whole this is.
        parameters: With their names; the very objects that the optimiser holds.
        optimizer: Whose state every replica has; None where each has its own.
        model: Whose synchronised BatchNorm layers are looked for.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters:
        tensors[name] = parameter.detach()
        state: dict[str, Any] = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key in sorted(state):
            if isinstance(state[key], Tensor):
                tensors[f"{key} of {name}"] = state[key]
    if model is not None:
        for path, module in model.named_modules():
            if isinstance(module, SyncBatchNorm | nn.SyncBatchNorm):
                tensors |= {f"{path}.{name}": buffer for name, buffer in module.named_buffers(recurse=False)}
    return ReplicaState(part=part, tensors=tensors)


@runtime_checkable
class HasReplicas(Protocol):
    """Strategy whose ranks hold the same, bit by bit, between any two steps."""

    def replica(self) -> ReplicaState:
        """Return the tensors that other ranks hold too."""


def replica_of(strategy: object) -> ReplicaState | None:
    """Return the tensors that are equal bit by bit on all ranks that hold them, between any two steps, or None."""
    return strategy.replica() if isinstance(strategy, HasReplicas) else None


class _Trained(Protocol):
    """Strategy whose ranks have the whole model and its optimiser."""

    model: nn.Module
    optimizer: Optimizer


def whole_replica(strategy: _Trained) -> ReplicaState:
    """Return everything, for strategies under which every rank holds everything."""
    return replica_state("all", strategy.model.named_parameters(), strategy.optimizer, strategy.model)
