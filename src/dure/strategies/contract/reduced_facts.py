"""The step's facts over many processes, for strategies whose engine reduces gradients and nothing else."""

import torch
from torch import Tensor

from dure.strategies.contract.step_facts import StepFacts
from dure.strategies.contract.strategy import Strategy


def reduced_facts(strategy: Strategy, extra: Tensor | None = None) -> StepFacts:
    """Add up the facts of all ranks; of ranks that work on the same samples only the one that leads the share counts.

    Args:
        strategy: One that has added its losses to its `sums`.
        extra: Further numbers (N,) in the facts' dtype that travel with them; they are added up in place.

    Communication: one blocking all_reduce of 4 + N float64 (float32 on MPS) over all ranks.
    """
    sums = strategy.sums
    facts = sums.as_tensor()
    if not strategy.share.leads:
        facts[:2] = 0
    if extra is None:
        strategy.group.all_reduce_sum(facts)
    else:
        together = torch.cat([facts, extra])
        strategy.group.all_reduce_sum(together)
        facts, summed = together[: facts.numel()], together[facts.numel() :]
        extra.copy_(summed)
    if sums.device.type != "cpu":
        sums.count = facts[1]
        return StepFacts(facts, sums.terms)
    known = facts.tolist()
    sums.count = known[1]
    return StepFacts(known, sums.terms)
