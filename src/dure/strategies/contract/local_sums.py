"""Sums of a rank's own losses and counts over a step, for strategies that add them up locally first."""

from collections.abc import Iterable

import torch
from torch import Tensor

from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.step_facts import LossTerm, Requests, StepFacts
from dure.strategies.contract.strategy import Strategy
from dure.torchcompat import run_backward


class LocalSums(Strategy):
    """Base of strategies whose facts of a step are sums over local loss terms."""

    def distribute(self) -> None:
        """Begin with no terms."""
        self._terms: list[LossTerm] = []
        self._requests = Requests()
        self._count: Tensor | float = 0.0

    def begin_step(self, requests: Requests) -> None:
        """Forget the step before."""
        self._terms = []
        self._requests = requests

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Accumulate the gradients of this process's share."""
        self.begin_step(requests)
        for microbatch in microbatches:
            term = self.loss_term(self.model, microbatch, global_samples)
            run_backward(self.precision.scale(term.root))
            self.add_term(term)

    def add_term(self, term: LossTerm) -> None:
        """Count a microbatch's loss in."""
        self._terms.append(term)

    def sync_gradients(self) -> StepFacts:
        """Add up the terms; there is no other rank."""
        return StepFacts(self.local_facts(), self._terms)

    def local_facts(self) -> Tensor | tuple[float, ...]:
        """Return this process's `[loss sum, count, stop, save]`: numbers on the CPU, elsewhere a tensor."""
        if self.device.type == "cpu":
            total: float = 0.0
            count: float = 0
            for term in self._terms:
                total += term.loss.item() * term.factor
                count += term.count.item() if isinstance(term.count, Tensor) else term.count
            self._count = count
            return (total, count, *self._requests)
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
        return torch.stack([totals, self._count, *requests])

    def counted_items(self) -> "Tensor | float":
        """Return the step's count."""
        return self._count
