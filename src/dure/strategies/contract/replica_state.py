"""State that is bitwise identical on several ranks unless something is wrong; replica checks compare it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from dure.strategies.state.batchnorm import SyncBatchNorm

WHOLE = "all"
"""Name of the part that is the whole state."""


@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """Replica of a part of the state on one rank."""

    part: str
    """Name of the part. Ranks with the same part hold the same tensors, with the same names and in the same order."""
    tensors: dict[str, Tensor] = field(default_factory=dict)


def replica_state(
    part: str,
    parameters: Iterable[tuple[str, Tensor]],
    optimizer: Optimizer | None = None,
    model: nn.Module | None = None,
) -> ReplicaState:
    """Return parameters, their optimiser state, and the statistics that a model's ranks have in common.

    Other buffers are left out: each rank may change them by its own samples. Before they are read, those of one rank
    are sent to all.

    Args:
        part: Name of the part of the whole state.
        parameters: Parameters with their names; the same objects as in the optimiser.
        optimizer: Optimiser whose state is equal on all replicas; None if each has its own.
        model: Model whose synchronised BatchNorm layers are included.
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
    """Strategy with ranks that hold bitwise identical state between steps."""

    def replica(self) -> ReplicaState:
        """Return the tensors that other ranks hold too."""


def replica_of(strategy: object) -> ReplicaState | None:
    """Return the tensors that are bitwise identical between steps on all ranks that hold them, or None."""
    return strategy.replica() if isinstance(strategy, HasReplicas) else None


class _Trained(Protocol):
    """Strategy whose ranks have the whole model and its optimiser."""

    model: nn.Module
    optimizer: Optimizer


def whole_replica(strategy: _Trained) -> ReplicaState:
    """Return the whole state, for strategies under which every rank has all of it."""
    return replica_state(WHOLE, strategy.model.named_parameters(), strategy.optimizer, strategy.model)
