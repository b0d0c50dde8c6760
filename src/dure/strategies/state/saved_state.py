"""State of a strategy, as saved in and loaded from checkpoints."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from dure.strategies.state.tensor_shard import TensorShard


@dataclass(frozen=True, kw_only=True)
class StrategyState:
    """State of a strategy in a checkpoint: tensors under the model's own names, whole or as this rank's shards."""

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    """Result of `optimizer_to_names`, and under `own` further state of this strategy."""
    is_spread: bool = False
    """True if other ranks have tensors, or state, that rank 0 does not have."""


class CarriedState(Protocol):
    """State that each rank carries from step to step by itself."""

    def rank_state(self) -> dict[str, Tensor]:
        """Return its tensors by name."""

    def load_rank_state(self, state: dict[str, Tensor]) -> None:
        """Load them; they exist only for a run resumed on the same number of ranks."""


class SavedPosition(Protocol):
    """Position of a checkpoint in the run."""

    @property
    def step(self) -> int:
        """Optimiser steps done."""


class StateSource(Protocol):
    """Checkpoint from which a strategy loads its state."""

    def load_model(self, model: nn.Module, *, is_part: bool = False) -> None: ...

    def load_optimizer(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        whole: Sequence[Collection[str]] | None = None,
        cuts: Mapping[str, TensorShard] | None = None,
        has_state: bool = True,
    ) -> None: ...

    @property
    def own(self) -> Mapping[str, Any]:
        """The saved `StrategyState.optimizer["own"]`, with whole tensors on the CPU; empty if there was none."""

    @property
    def position(self) -> SavedPosition:
        """Position in the run at which it was saved."""
