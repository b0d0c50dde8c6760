"""Decision where a model is cut: derived from one batch on one rank, and sent to all ranks."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from torch import nn

from dure.errors import DureError, TaskInvalid, message_of
from dure.spec import RunSpec
from dure.strategies.contract.batches import to_device
from dure.strategies.contract.strategy import Strategy
from dure.strategies.sections.costs import parameter_bytes
from dure.strategies.sections.cuts import begins_of, cut_names, faults_of, registered_chain
from dure.strategies.sections.stand_in import call_of
from dure.strategies.sections.trace import Survey, survey
from dure.strategies.state.trial import Trial

CURE = "ddp or fsdp"
SURVEYED_SAMPLES = 4
"""Samples for the trial of a model, whatever the size of a microbatch: a restart with smaller ones must not move a cut.
"""


@dataclass(frozen=True, kw_only=True)
class SectionPlan:
    """Plan of the sections: the calls and the tensors of each. JSON values only, so that one rank can send it."""

    calls: list[str]
    """Block of every call of a forward pass, in order."""
    begins: list[int]
    """Call with which each section begins."""
    homes: dict[str, int]
    """Parameters and buffers outside the blocks, and the section that uses them."""
    ends_with_last_block: bool = True
    """True if the model's output follows from the last block's output and the batch."""

    def section_of(self, position: int) -> int:
        """Return the section that computes a call."""
        return bisect_right(self.begins, position) - 1

    def section_of_block(self, name: str) -> int:
        """Return the section that keeps a block."""
        return self.section_of(self.calls.index(name))

    def owners(self, model: nn.Module) -> dict[str, int]:
        """Return the section that keeps each parameter and buffer, under every name that it has in the model."""
        modules = dict(model.named_modules())
        sections: dict[int, int] = {}
        for call in dict.fromkeys(self.calls):
            for tensor in [*modules[call].parameters(), *modules[call].buffers()]:
                sections.setdefault(id(tensor), self.section_of_block(call))
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            sections.setdefault(id(tensor), self.homes.get(name, 0))
        return {name: sections[id(tensor)] for name, tensor in named}

    def buffers_of_several(self, model: nn.Module, changed: AbstractSet[str]) -> list[str]:
        """Return the names of changed buffers that are registered in blocks of several sections, one text for each.

        Args:
            model: Whole model.
            changed: Names of the buffers that forward or the loss changes.
        """
        names: dict[int, list[str]] = defaultdict(list)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            names[id(buffer)].append(name)
        return [
            " and ".join(same)
            for same in names.values()
            if len(same) > 1 and not changed.isdisjoint(same) and len(set().union(*map(self._sections_with, same))) > 1
        ]

    def _sections_with(self, name: str) -> set[int]:
        """Return the sections that compute with a buffer: that of its block, or those of the blocks in its module."""
        module = f"{name.rpartition('.')[0]}."
        blocks = [call for call in dict.fromkeys(self.calls) if name.startswith(f"{call}.") or call.startswith(module)]
        return {self.section_of_block(block) for block in blocks} or {self.homes.get(name, 0)}

    def first_blocks(self) -> str:
        """Return the first blocks of the sections after the first, in the syntax of the option `cuts`."""
        return ",".join(self.calls[begin] for begin in self.begins[1:])

    def bounds(self, section: int) -> tuple[int, int]:
        """Return a section's first call and the call after its last."""
        ends = [*self.begins[1:], len(self.calls)]
        return self.begins[section], ends[section]


def look_at(strategy: Strategy, model: nn.Module) -> Survey | None:
    """Trace a forward pass of a model on the first samples; None if there is no batch.

    Args:
        strategy: Strategy with the task's loss and its data.
        model: Model on any device; the batch is moved to it. Model, task and generators are restored.

    Raises:
        TaskInvalid: The model works, but not while its blocks are traced.
    """
    if strategy.example is None:
        return None
    batch = first_batch(strategy, model)
    try:
        with Trial(model, strategy.objects, watches_writes=False), strategy.precision.autocast():
            args, kwargs = call_of(strategy.loss, model, batch)
            return survey(model, args, kwargs)
    except DureError:
        raise
    except Exception as error:
        if strategy.traits.reason_unknown is not None:
            raise  # it may fail anyway
        why = " ".join(f"{type(error).__name__}: {message_of(error)}".split())[:200]
        raise TaskInvalid(
            f"{type(model).__name__} cannot be divided into blocks ({why}): what calls them, or differentiates them, "
            f"itself does not take values that are watched; use {CURE}"
        ) from error


def first_batch(strategy: Strategy, model: nn.Module) -> Any:
    """Return the first samples, as many as a trial uses, on the model's device."""
    assert strategy.example is not None
    return to_device(strategy.example(SURVEYED_SAMPLES), next(model.parameters()).device)


def plan_sections(
    model: nn.Module, seen: Survey | None, num_sections: int, cuts: str | None, *,
    costs: Callable[[Survey], Sequence[float]], keeps_batch_apart: bool = False,
) -> tuple[SectionPlan | None, list[str]]:  # fmt: skip
    """Decide where a model is cut.

    Args:
        model: Whole model.
        seen: Survey of a forward pass; without one, blocks are in the order of registration and cost their bytes.
        num_sections: Number of sections.
        cuts: The option `cuts`, or None to find the most even ones.
        costs: Function that returns the cost of every call.
        keeps_batch_apart: Whether the batch stays on the first section's device, so that the model's own code cannot
            use it together with results of a later section.

    Returns:
        The plan, or the reasons why there is none, one sentence each.
    """
    chain, homes = registered_chain(model), dict[str, int]()
    if seen is not None:
        chain, homes = seen.with_batch_on_first_device() if keeps_batch_apart else seen.chain, dict(seen.homes)
    names = cut_names(cuts)
    if faults := faults_of(chain, num_sections, names, CURE):
        return None, faults
    if num_sections == 1:
        return SectionPlan(calls=list(chain.calls), begins=[0], homes=dict.fromkeys(homes, 0)), []
    prices = costs(seen) if seen is not None and names is None else _registered_costs(model, chain.calls)
    begins = begins_of(chain, num_sections, names, prices)
    sections = {name: bisect_right(begins, position) - 1 for name, position in homes.items()}
    is_last_enough = chain.why_not(len(chain.calls)) is None
    plan = SectionPlan(calls=list(chain.calls), begins=begins, homes=sections, ends_with_last_block=is_last_enough)
    return plan, []


def held_bytes(model: nn.Module, spec: RunSpec, seen: Survey) -> list[float]:
    """Return the bytes that each call needs on its device: parameters with their gradients, and activations."""
    ratio = (spec.microbatch_size or spec.global_batch_size) / SURVEYED_SAMPLES
    blocks, calls = dict(model.named_modules()), seen.chain.calls
    return [
        saved * ratio + (parameter_bytes(blocks[call]) if calls.index(call) == position else 0)
        for position, (call, saved) in enumerate(zip(calls, seen.saved_bytes, strict=True))
    ]


def _registered_costs(model: nn.Module, calls: Sequence[str]) -> list[float]:
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    return [float(sum(p.numel() * p.element_size() for p in modules[call].parameters())) for call in calls]
