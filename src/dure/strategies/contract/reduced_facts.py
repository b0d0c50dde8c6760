"""Reduction of the step's facts over processes, for strategies whose engine reduces gradients only."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dure.strategies.contract.step_facts import StepFacts
from dure.strategies.contract.strategy import Strategy


def reduced_facts(
    strategy: Strategy,
    extra: Tensor | None = None,
    *,
    num_checked: int = 0,
    check: Callable[[Sequence[float]], None] | None = None,
) -> StepFacts:
    """Sum the facts of all ranks; of ranks with the same share, only the first counts.

    Args:
        strategy: Strategy whose `sums` contain its losses.
        extra: Further numbers (N,) in the facts' dtype that are sent with them; they are summed in place.
        num_checked: Number of the first of these that are read with the facts.
        check: Called with them then; it raises an exception if they are wrong.

    Communication: one blocking all_reduce of 4 + N float64 (float32 on devices without float64) over all ranks.
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
        summed = together[facts.numel() :]
        facts = together[: facts.numel() + num_checked]
        extra.copy_(summed)
    if sums.device.type != "cpu":
        sums.count = facts[1]
        return StepFacts(facts, sums.terms, check=check)
    known = facts.tolist()
    sums.count = known[1]
    return StepFacts(known, sums.terms, check=check)
