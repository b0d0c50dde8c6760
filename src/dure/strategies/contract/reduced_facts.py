"""The step's facts over many processes, for strategies whose engine reduces gradients and nothing else."""

import torch
from torch import Tensor

from dure.strategies.contract.local_sums import LocalSums
from dure.strategies.contract.step_facts import StepFacts


class ReducedFacts(LocalSums):
    """Strategies of many processes: loss sum, count and requests are added up by one small all-reduce.

    Every rank counts its own terms (`begin_step`, `add_term`); of ranks that work on the same samples only the one
    that leads the share adds them in.
    """

    def reduced_facts(self, extra: Tensor | None = None) -> StepFacts:
        """Add up the facts of all ranks.

        Args:
            extra: Further numbers (N,) in the facts' dtype that travel with them; they are added up in place.

        Communication: one blocking all_reduce of 4 + N float64 (float32 on MPS) over all ranks.
        """
        facts = self._local_tensor()
        if not self.leads_share:
            facts[:2] = 0
        if extra is None:
            self.group.all_reduce_sum(facts)
        else:
            together = torch.cat([facts, extra])
            self.group.all_reduce_sum(together)
            facts, summed = together[: facts.numel()], together[facts.numel() :]
            extra.copy_(summed)
        if self.device.type != "cpu":
            self._count = facts[1]
            return StepFacts(facts, self._terms)
        known = facts.tolist()
        self._count = known[1]
        return StepFacts(known, self._terms)

    def _local_tensor(self) -> Tensor:
        if not self._terms:
            return torch.tensor([0.0, 0.0, *self._requests], dtype=self.facts_dtype, device=self.device)
        facts = self.local_facts()
        return facts if isinstance(facts, Tensor) else torch.tensor(facts, dtype=torch.float64)

    @property
    def facts_dtype(self) -> torch.dtype:
        """Return the dtype in which facts are sent."""
        return torch.float32 if self.device.type == "mps" else torch.float64
