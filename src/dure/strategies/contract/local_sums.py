"""Sums of a process's own losses and counts over a step."""

import torch
from torch import Tensor

from dure.strategies.contract.step_facts import LossTerm, Requests, StepFacts


class LocalSums:
    """Losses that this process has computed in the step under way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.terms: list[LossTerm] = []
        self.requests = Requests()
        """Requests of this rank."""
        self.count: Tensor | float = 0.0
        """Items that the losses count, over all ranks once their facts are together; on an accelerator a tensor."""

    def begin(self, requests: Requests) -> None:
        """Forget the step before."""
        self.terms = []
        self.requests = requests

    def add(self, term: LossTerm) -> None:
        """Count a microbatch's loss in."""
        self.terms.append(term)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which facts are added up on the device."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def step_facts(self) -> StepFacts:
        """Return the facts of the step where there is no other rank."""
        return StepFacts(self.facts(), self.terms)

    def facts(self) -> Tensor | tuple[float, ...]:
        """Return this process's `[loss sum, count, stop, save]`: numbers on the CPU, elsewhere a tensor."""
        if self.device.type == "cpu":
            total: float = 0.0
            count: float = 0
            for term in self.terms:
                total += term.loss.item() * term.factor
                count += term.count.item() if isinstance(term.count, Tensor) else term.count
            self.count = count
            return (total, count, *self.requests)
        totals = torch.stack([term.total.to(self.device, self.dtype) for term in self.terms]).sum()
        counts = [
            term.count.to(totals, non_blocking=True)
            if isinstance(term.count, Tensor)
            else torch.full_like(totals, term.count)
            for term in self.terms
        ]
        self.count = torch.stack(counts).sum()
        requests = [torch.full_like(totals, request) for request in self.requests]
        return torch.stack([totals, self.count, *requests])

    def as_tensor(self) -> Tensor:
        """Return the facts as a tensor on the device, also of a rank that has computed no loss."""
        facts = self.facts() if self.terms else (0.0, 0.0, *self.requests)
        return facts if isinstance(facts, Tensor) else torch.tensor(facts, dtype=self.dtype, device=self.device)
