"""Cut of a pipeline: one rank tries the model on a few samples, and broadcasts its findings."""

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from dure.host.device_kinds import memory_of
from dure.strategies.contract.strategy import Strategy
from dure.strategies.sections.plan import SectionPlan, look_at, plan_sections
from dure.strategies.sections.verify import rehearse
from dure.torchcompat.modules import move_module


def decide(strategy: Strategy, model: nn.Module, num_stages: int, cuts: str | None) -> dict[str, Any]:
    """Return the plan and its faults, as JSON values.

    Cuts that are not given are found by counting operations, forward and backward: the same in every run of a task.

    Args:
        strategy: Strategy with the task's loss and its data.
        model: Whole model on the CPU, to which it returns afterwards.
        num_stages: Number of stages.
        cuts: Modules that begin a stage, or None to find them.
    """
    if num_stages == 1:
        return {"faults": [], "plan": asdict(SectionPlan(calls=[], begins=[0], homes={}))}
    host = _host(strategy.device, model)
    move_module(model, host)
    seen = look_at(strategy, model)
    plan, faults = plan_sections(model, seen, num_stages, cuts, costs=lambda seen: seen.operations)
    if plan is not None and seen is not None and host.type == strategy.device.type:  # on the CPU it would take too long
        fault = rehearse(strategy, model, plan, seen, loss_section=num_stages - 1)
        faults = [fault] if fault is not None else []
    move_module(model, "cpu")
    return {"faults": faults, "plan": None if plan is None else asdict(plan)}


def _host(device: torch.device, model: nn.Module) -> torch.device:
    """Return the device if the whole model and twice its gradients fit there temporarily; otherwise the CPU."""
    if device.type == "cpu":
        return device
    needed = 4 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    memory = memory_of(device)
    return device if memory is None or needed < memory[0] else torch.device("cpu")
