"""Where a pipeline is cut: one rank tries the model on a few samples, and what it finds is told to all."""

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from dure.strategies.base import Strategy
from dure.strategies.section_costs import counted_operations, measured_seconds
from dure.strategies.section_plan import SectionPlan, look_at, plan_sections
from dure.strategies.section_rehearsal import rehearse
from dure.strategies.section_survey import Survey

_MOST_SAMPLES = 16


def decide(strategy: Strategy, model: nn.Module, num_stages: int, microbatch_samples: int) -> dict[str, Any]:
    """Return the plan and what is wrong with it, as JSON values.

    Cuts that are not given are found by measured seconds of each block, forward and backward; in a deterministic run by
    counted operations, so that a repeated run has the same cuts.

    Args:
        strategy: With the task's loss, its data, and its options.
        model: Whole, on the CPU, where it is again afterwards.
        num_stages: How many stages.
        microbatch_samples: The model is tried on so many samples, or on fewer.
    """
    if num_stages == 1:
        return {"faults": [], "plan": asdict(SectionPlan(calls=[], begins=[0], homes={}))}
    host = _host(strategy.device, model)
    is_like_a_step = host.type == strategy.device.type

    def costs(seen: Survey) -> list[float]:
        blocks = dict(model.named_modules())
        if strategy.options.deterministic or not is_like_a_step:
            return counted_operations(blocks, seen)
        return measured_seconds(blocks, seen, strategy.precision.autocast)

    model.to(host)
    surveyed = look_at(strategy, model, min(microbatch_samples, _MOST_SAMPLES))
    plan, faults = plan_sections(model, surveyed, num_stages, strategy.options.cuts, costs=costs)
    if plan is not None and surveyed is not None and is_like_a_step:  # elsewhere it would take too long
        fault = rehearse(model, plan, surveyed, strategy.precision.autocast)
        faults = [fault] if fault is not None else []
    model.to("cpu")
    return {"faults": faults, "plan": None if plan is None else asdict(plan)}


def _host(device: torch.device, model: nn.Module) -> torch.device:
    """Return the device if the whole model, and its gradients twice, fit there for a moment; otherwise the CPU."""
    if device.type == "cpu":
        return device
    needed = 4 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    free = torch.accelerator.get_memory_info(device)[0]
    return device if needed < free else torch.device("cpu")
