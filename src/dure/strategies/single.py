"""One process, one device: the definition that every other strategy is held to."""

from collections.abc import Iterable

import torch
from torch import Tensor

from dure.strategies.base import LossTerm, Requests, StepFacts, Strategy
from dure.strategies.batches import Microbatch
from dure.torchcompat import run_backward


class LocalSums(Strategy):
    """What strategies of one process share: the step's facts are sums over local loss terms."""

    def distribute(self) -> None:
        """Begin with no terms."""
        self._terms: list[LossTerm] = []
        self._requests = Requests()
        self._count: Tensor | float = 0.0

    def begin_step(self, requests: Requests) -> None:
        """Forget the step before."""
        self._terms = []
        self._requests = requests

    def add_term(self, term: LossTerm) -> None:
        """Count a microbatch's loss in."""
        self._terms.append(term)

    def sync_gradients(self) -> StepFacts:
        """Add up the terms; there is nobody to talk to."""
        is_integral = all(term.is_counted_whole for term in self._terms)
        losses = [term.value for term in self._terms]
        if self.device.type == "cpu":
            total = count = 0.0
            for term in self._terms:
                total += term.value.item() * term.factor
                count += term.count.item() if isinstance(term.count, Tensor) else term.count
            self._count = count
            return StepFacts((total, count, *self._requests), is_integral=is_integral, local_losses=losses)
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        totals = torch.stack([term.total.to(self.device, dtype) for term in self._terms]).sum()
        counts = [
            term.count.to(totals, non_blocking=True)
            if isinstance(term.count, Tensor)
            else torch.full_like(totals, term.count)
            for term in self._terms
        ]
        self._count = torch.stack(counts).sum()
        requests = [torch.full_like(totals, request) for request in self._requests]
        facts = torch.stack([totals, self._count, *requests])
        return StepFacts(facts, is_integral=is_integral, local_losses=losses)

    def counted_items(self) -> "Tensor | float":
        """Return the step's count."""
        return self._count


class Single(LocalSums):
    """The plain loop: forward, backward, step."""

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Accumulate the gradients of all microbatches."""
        self.begin_step(requests)
        for microbatch in microbatches:
            term = self.loss_term(self.model, microbatch, global_samples)
            run_backward(self.precision.scale(term.root))
            self.add_term(term)

    def sent_bytes(self, num_microsteps: int) -> int:
        """Nobody to send to."""
        return 0
