"""Implementation of a strategy that a package of somebody else brings."""

import torch
from toy_options import ToyOptions

from dure.strategies.contract.reduced_facts import reduced_facts
from dure.strategies.contract.step_facts import StepFacts
from dure.strategies.contract.strategy import Strategy


class Toy(Strategy):
    """A process per device; every gradient is added up piece by piece after backward."""

    options: ToyOptions

    def distribute(self) -> None:
        """Begin with rank 0's weights everywhere."""
        super().distribute()
        self.group.broadcast(list(self.model.parameters()))

    def sync_gradients(self) -> StepFacts:
        """Add up each gradient."""
        for parameter in self.trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            for piece in parameter.grad.view(-1).chunk(self.options.pieces):
                self.group.all_reduce_sum(piece)
        return reduced_facts(self)

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return what a ring would send."""
        num_ranks = self.group.world_size
        return sum(2 * (num_ranks - 1) * p.nbytes // num_ranks for p in self.trainable)

    def measured(self) -> dict[str, float]:
        """Return the pieces of the largest gradient."""
        return {"pieces": float(max(len(p.view(-1).chunk(self.options.pieces)) for p in self.trainable))}
