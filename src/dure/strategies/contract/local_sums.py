"""Sums of a process's own losses and counts over a step."""

import torch
from torch import Tensor

from dure.host.device_kinds import has_float64
from dure.strategies.contract.step_facts import LossTerm, Requests, StepFacts


class LocalSums:
    """Losses that this process has computed in the current step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.terms: list[LossTerm] = []
        self.requests = Requests()
        """Requests of this rank."""
        self.count: Tensor | float = 0.0
        """Number of items in the losses, over all ranks once their facts are reduced; on an accelerator a tensor."""

    def begin(self, requests: Requests) -> None:
        """Reset the sums at the start of a step."""
        self.terms = []
        self.requests = requests

    def add(self, term: LossTerm) -> None:
        """Add a microbatch's loss."""
        self.terms.append(term)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which facts are summed on the device."""
        return torch.float64 if has_float64(self.device.type) else torch.float32

    def step_facts(self) -> StepFacts:
        """Return the facts of the step if there is no other rank."""
        return StepFacts(self.facts(), self.terms)

    def facts(self) -> Tensor | tuple[float, ...]:
        """Return this process's `[loss sum, count, stop, save]`: numbers on the CPU, otherwise a tensor."""
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
        """Return the facts as a tensor on the device, even if this rank has computed no loss."""
        if not self.terms and not any(self.requests):
            # filled on the device: a copy of numbers would wait for it
            return torch.zeros(2 + len(self.requests), dtype=self.dtype, device=self.device)
        facts = self.facts() if self.terms else (0.0, 0.0, *self.requests)
        return facts if isinstance(facts, Tensor) else torch.tensor(facts, dtype=self.dtype, device=self.device)
