"""DiLoCo: local steps by the task's optimiser, and every H steps an outer step with Nesterov momentum.

Douillard et al. 2023, algorithm 1. The outer gradient is the parameters after the last outer step minus the mean of the
ranks' current parameters; an outer SGD applies it. The traffic is that of averaging, which is DiLoCo with an outer
learning rate of 1 and no outer momentum.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from dure.errors import CheckpointMismatch
from dure.strategies.local_sgd.averaging import Averaging
from dure.strategies.local_sgd.options import DiLoCoOptions
from dure.strategies.state.saved_state import StateSource, StrategyState


class DiLoCo(Averaging):
    """Averaging with an anchor, the parameters after the last outer step, and momentum over outer steps.

    An evaluation or a checkpoint between two outer steps averages the ranks without an outer step. The next outer step
    still starts from the anchor, at its usual time.
    """

    options: DiLoCoOptions

    def distribute(self) -> None:
        """Start without an anchor: the first local step sets it."""
        super().distribute()
        self._names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self._outer: SGD | None = None

    def optimizer_step(self) -> None:
        """Step with this rank's own gradient; average and take the outer step when it is due."""
        if self._outer is None and not self.is_warming_up:
            self._outer = self._anchored()
        super().optimizer_step()
        if self.is_averaging:
            self._outer_step()

    def _anchored(self) -> SGD:
        """Create the outer optimiser over copies of the current parameters."""
        lr, momentum = self.options.outer_lr, self.options.outer_momentum
        return SGD(
            [parameter.detach().clone() for parameter in self.trainable],
            lr=lr,
            momentum=momentum,
            nesterov=momentum > 0,
        )

    @property
    def _anchors(self) -> list[Tensor]:
        return [] if self._outer is None else list(self._outer.param_groups[0]["params"])

    @torch.no_grad()
    def _outer_step(self) -> None:
        """Take the outer step; the result is the same on every rank, because every rank has the same mean."""
        assert self._outer is not None
        for anchor, mean in zip(self._anchors, self.trainable, strict=True):
            anchor.grad = anchor - mean
        self._outer.step()
        for anchor, parameter in zip(self._anchors, self.trainable, strict=True):
            parameter.copy_(anchor)
            anchor.grad = None

    # checkpoints

    def state_dict(self) -> StrategyState:
        """Return weights and optimiser state with the anchor and the outer momentum, the same on every rank."""
        state = super().state_dict()
        return StrategyState(model=state.model, optimizer={**state.optimizer, "own": self._outer_state()})

    def _outer_state(self) -> dict[str, Any]:
        if self._outer is None:
            return {}
        momentum = {
            name: self._outer.state[anchor]["momentum_buffer"]
            for name, anchor in zip(self._names, self._anchors, strict=True)
            if self._outer.state[anchor].get("momentum_buffer") is not None
        }
        return {"anchor": dict(zip(self._names, self._anchors, strict=True)), "momentum": momentum}

    def load_state_dict(self, source: StateSource) -> None:
        """Load anchor and momentum too; start without them from another strategy's checkpoint."""
        super().load_state_dict(source)
        own = source.own
        if not own.get("anchor"):
            return
        if differing := own["anchor"].keys() ^ set(self._names):
            raise CheckpointMismatch(
                f"its diloco anchor and what this model trains differ in {', '.join(sorted(differing)[:5])}: build the "
                "model as the run that saved it did"
            )
        self._outer = self._anchored()
        for name, anchor in zip(self._names, self._anchors, strict=True):
            anchor.copy_(own["anchor"][name])
            if name in own["momentum"]:
                self._outer.state[anchor]["momentum_buffer"] = own["momentum"][name].to(anchor, copy=True)
