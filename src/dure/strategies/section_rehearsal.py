"""A model cut into sections and run as such, beside the whole: the same output and the same gradients, or a reason."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from dure.data.randomness import GeneratorStates, kept_global_randomness
from dure.strategies.batches import map_tensors
from dure.strategies.pipeline_values import describe
from dure.strategies.section_plan import CURE, SectionPlan, Surveyed
from dure.strategies.section_survey import kept_buffers, tensors_of
from dure.strategies.sectioned_model import SectionedModel

Gradients = dict[str, Tensor | None]


def rehearse(
    model: nn.Module, plan: SectionPlan, surveyed: Surveyed, autocast: Callable[[], AbstractContextManager[Any]]
) -> str | None:
    """Compare the sections with the whole model on the batch of a survey.

    What a survey cannot see is found here: blocks that exchange values by themselves, or a recomputation that cuts the
    graph between them.

    Returns:
        One sentence if they differ.
    """
    tensors = tensors_of((surveyed.args, surveyed.kwargs)) or list(model.parameters())
    device = tensors[0].device
    with kept_global_randomness(device), kept_buffers(model), torch.enable_grad():
        states = GeneratorStates.now(device)
        whole = _whole(model, surveyed, autocast)
        states.put_back()
        cut = _in_sections(model, plan, surveyed, autocast, device)
    for name, gradient in whole.items():
        if not _are_close(gradient, cut[name]):
            return (
                f"{type(model).__name__} cut before {plan.first_blocks()} gives another gradient of {name} than the "
                f"whole model: something goes from section to section by another "
                f"way than what blocks return (torch.utils.checkpoint with use_reentrant=True around a block, or a "
                f"value that a block keeps); cut elsewhere with --cuts, or use {CURE}"
            )
    return None


def _whole(model: nn.Module, surveyed: Surveyed, autocast: Callable[[], AbstractContextManager[Any]]) -> Gradients:
    args, kwargs = map_tensors((surveyed.args, surveyed.kwargs), torch.clone)
    with autocast():
        total = _probe(model(*args, **kwargs))
    # by backward() into `.grad`, for recomputation knows no other way
    total.backward()
    return _taken_gradients(model)


def _in_sections(
    model: nn.Module, plan: SectionPlan, surveyed: Surveyed,
    autocast: Callable[[], AbstractContextManager[Any]], device: torch.device,
) -> Gradients:  # fmt: skip
    sections = SectionedModel(model, plan)
    known = [describe(value, call) for value, call in zip(surveyed.seen.outputs, plan.calls, strict=True)]
    passes: list[tuple[list[Tensor], list[Tensor]]] = []
    received: Any = None
    try:
        for number in range(len(plan.begins)):
            begin, end = plan.bounds(number)
            args, kwargs = map_tensors((surveyed.args, surveyed.kwargs), torch.clone)
            leaves = tensors_of(received)
            bounds = (begin, None if number == len(plan.begins) - 1 else end)
            with autocast():
                # copies: blocks may work in place
                given = map_tensors(received, torch.clone)
                value = sections.run(bounds, args, kwargs, received=given, known=known, device=device)
            passes.append((leaves, tensors_of(value)))
            received = map_tensors(value, _leaf)
    finally:
        sections.close()
    roots: list[Tensor] = [_probe(value)]
    arrived: list[Tensor | None] = [None]
    for number in reversed(range(len(passes))):
        if roots:
            torch.autograd.backward(roots, arrived)
        if number:
            sent, taken = passes[number - 1][1], passes[number][0]
            given = [(root, leaf.grad) for root, leaf in zip(sent, taken, strict=True)]
            given = [(root, gradient) for root, gradient in given if gradient is not None and root.requires_grad]
            roots, arrived = [root for root, _ in given], [gradient for _, gradient in given]
    return _taken_gradients(model)


def _taken_gradients(model: nn.Module) -> Gradients:
    """Return all gradients, and leave none."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def _probe(output: Any) -> Tensor:
    """Return a scalar that depends on every element of an output, on each in another way."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors_of(output):
        if tensor.requires_grad:
            flat = tensor.flatten()
            weights = torch.linspace(0.5, 1.5, flat.numel(), dtype=torch.float64, device=flat.device)
            total = total.to(flat.device) + (flat.double() * weights).sum()
    return total


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _are_close(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two gradients are the same but for rounding; none is as good as zeros."""
    if one is None or other is None:
        return all(gradient is None or not bool(gradient.any()) for gradient in (one, other))
    # sums in another order differ by some epsilon; a path that is missing changes a gradient by its own size
    tolerance = 16 * torch.finfo(one.dtype).eps ** 0.5
    return bool(((one - other).abs().max() <= tolerance * one.abs().max()) | one.isnan().any())
