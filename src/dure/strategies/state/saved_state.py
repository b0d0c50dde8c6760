"""State of a strategy, as checkpoints take and give it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from dure.strategies.state.tensor_shard import TensorShard


@dataclass(frozen=True, kw_only=True)
class StrategyState:
    """State of a strategy in a checkpoint: tensors under the model's own names, whole or as this rank's pieces."""

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    """The answer of `optimizer_to_names`, and under `own` what this strategy alone needs to go on."""
    is_spread: bool = False
    """True if other ranks have tensors, or state, that rank 0 has not."""


class CarriedState(Protocol):
    """State that each rank carries from step to step for itself."""

    def rank_state(self) -> dict[str, Tensor]:
        """Return its tensors by name."""

    def load_rank_state(self, state: dict[str, Tensor]) -> None:
        """Take them over; only a run resumed on as many ranks has them."""


class SavedPosition(Protocol):
    """Position of a checkpoint in the run."""

    @property
    def step(self) -> int:
        """Optimiser steps done."""


class StateSource(Protocol):
    """A checkpoint as a strategy sees it."""

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
        """The saved `StrategyState.optimizer["own"]`, its tensors whole and on the CPU; nothing if there was none."""

    @property
    def position(self) -> SavedPosition:
        """Position in the run at which it was saved."""
