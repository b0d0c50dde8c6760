"""Cuts of a model into sections from outside: the possible ones, and the best.

A model is treated as a chain of *blocks*: the contents of its containers (`nn.Sequential`, `nn.ModuleList`,
`nn.ModuleDict`), and the model's other children, such as an embedding before and a head after the chain. A cut is a
position before the call of a block. Code of the model's own `forward` between two blocks is not changed.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

_BODIES = (nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)
"""Modules of torch that call their children in training and in evaluation; others may compute around them."""
_SHOWN = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Barrier:
    """Range of calls that must stay together."""

    first: int
    last: int
    """Last of the calls `first + 1` to `last`; there may be no cut before any of these."""
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """Blocks of a model in the order in which one forward pass calls them."""

    model: str
    """Class name of the model, for messages."""
    calls: tuple[str, ...]
    """Name of the block of every call."""
    barriers: tuple[Barrier, ...] = ()
    is_seen: bool = True
    """True if the order is that of a forward pass; False if it is the order of registration."""

    def why_not(self, position: int) -> str | None:
        """Return the reason why no section can begin with a call, or None if one can."""
        return next((b.why for b in self.barriers if b.first < position <= b.last), None)

    def places(self) -> list[int]:
        """Return the calls with which a section can begin, except the first."""
        return [position for position in range(1, len(self.calls)) if self.why_not(position) is None]

    def position(self, name: str) -> int | None:
        """Return the first call of a block, or of the first block inside a container of blocks."""
        found = (i for i, call in enumerate(self.calls) if call == name or call.startswith(f"{name}."))
        return next(found, None)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in the order of registration.

    Containers are opened, and so is the one child with more than half of a model's parameters (the body that the model
    wraps). Everything else is a block, which is never cut.
    """
    num_all = _num_elements(model)
    found: dict[str, nn.Module] = {}

    def walk(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            if is_container(child) or (_is_body(child) and 2 * _num_elements(child) > num_all):
                walk(f"{prefix}{name}.", child)
            else:
                found[prefix + name] = child

    walk("", model)
    return found


def is_container(module: nn.Module) -> bool:
    """Return whether a module only holds others, which are called one by one."""
    if isinstance(module, nn.Sequential):
        return type(module).forward is nn.Sequential.forward
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _is_body(module: nn.Module) -> bool:
    is_torchs = type(module).__module__.startswith("torch.nn.")
    return next(module.children(), None) is not None and (not is_torchs or isinstance(module, _BODIES))


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def registered_chain(model: nn.Module) -> Chain:
    """Return the chain without a forward pass: calls in order of registration, and barriers from tied parameters."""
    blocks = find_blocks(model)
    calls = tuple(blocks)
    return Chain(model=type(model).__name__, calls=calls, barriers=tuple(tied(model, blocks, calls)), is_seen=False)


def tied(model: nn.Module, blocks: dict[str, nn.Module], calls: Sequence[str]) -> list[Barrier]:
    """Return the ranges of calls that use the same parameter."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    positions: dict[int, list[int]] = defaultdict(list)
    for position, call in enumerate(calls):
        for parameter in blocks[call].parameters():
            positions[id(parameter)].append(position)
    barriers: dict[tuple[int, int], Barrier] = {}
    for key, used in positions.items():
        if used[0] != used[-1]:
            is_one = calls[used[0]] == calls[used[-1]]
            why = (
                f"{calls[used[0]]} is called more than once"
                if is_one
                else f"{' and '.join(names[key])} are one and the same parameter"
            )
            barriers.setdefault((used[0], used[-1]), Barrier(first=used[0], last=used[-1], why=why))
    return list(barriers.values())


def cut_names(cuts: str | None) -> list[str] | None:
    """Split the option `cuts` into the names of the modules that begin a new section."""
    return None if cuts is None else [word.strip() for word in cuts.split(",") if word.strip()]


def faults_of(chain: Chain, num_sections: int, cuts: Sequence[str] | None, cure: str) -> list[str]:
    """Return the reasons why a chain cannot be cut in this way, one sentence each.

    Args:
        chain: The blocks.
        num_sections: Requested number of sections.
        cuts: Names of the modules that begin a new section; None if any cuts will do.
        cure: Alternative, such as `ddp or fsdp`.
    """
    if num_sections == 1 and not cuts:
        return []
    if cuts is not None:
        return _faults_of_cuts(chain, num_sections, cuts, cure)
    places = chain.places()
    if len(chain.calls) < 2:
        return [
            f"{chain.model} has no place to cut: a model is cut between the modules of an nn.Sequential or "
            f"nn.ModuleList, or between the model's own children, and it has "
            f"{'one (' + chain.calls[0] + ')' if chain.calls else 'none'}; use {cure}"
        ]
    if len(places) < num_sections - 1:
        reasons = list(dict.fromkeys(barrier.why for barrier in chain.barriers))
        because = f" ({'; '.join(reasons[:_SHOWN])})" if reasons else ""
        possible = f"can be cut into at most {len(places) + 1} sections" if places else "cannot be cut"
        return [
            f"{chain.model} is {len(chain.calls)} blocks ({_few(chain.calls)}) and {possible}{because}, but "
            f"{num_sections} sections are wanted: use {'fewer devices, or ' if places else ''}{cure}"
        ]
    return []


def _faults_of_cuts(chain: Chain, num_sections: int, cuts: Sequence[str], cure: str) -> list[str]:
    faults = []
    if len(cuts) != num_sections - 1:
        faults.append(
            f"cuts names {len(cuts)} module(s) ({', '.join(cuts)}), which makes {len(cuts) + 1} sections, but "
            f"{num_sections} are wanted: name {num_sections - 1}, or leave out cuts"
        )
    positions = [chain.position(name) for name in cuts]
    for name, position in zip(cuts, positions, strict=True):
        inside = next((call for call in chain.calls if name.startswith(f"{call}.")), None)
        if position is None and inside is not None:
            faults.append(f"cuts names {name}, which is inside the block {inside}: a cut is before a whole block")
        elif position is None:
            faults.append(f"cuts names {name}, but the blocks of {chain.model} are {_few(chain.calls)}")
        elif position == 0 and chain.is_seen:
            faults.append(f"cuts names {name}, with which the first section begins anyway: name a later block")
        elif (why := chain.why_not(position)) is not None:
            faults.append(f"no section can begin with {name}: {why}; cut elsewhere, or use {cure}")
    known = [position for position in positions if position is not None]
    if len(set(known)) != len(known) or (known != sorted(known) and chain.is_seen):
        faults.append(f"cuts names {', '.join(cuts)}, but the model calls them in another order, or one is named twice")
    return faults


def _few(names: Sequence[str]) -> str:
    if len(names) <= 2 * _SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:_SHOWN])}, ... {', '.join(names[-_SHOWN:])}"


def begins_of(chain: Chain, num_sections: int, cuts: Sequence[str] | None, costs: Sequence[float]) -> list[int]:
    """Return the call with which each section begins: the given cuts, or the most even ones.

    Args:
        chain: The blocks.
        num_sections: Number of sections.
        cuts: Names in which `faults_of` finds no fault; None finds the cuts by `costs`.
        costs: Cost of every call.
    """
    if cuts is not None:
        return [0, *(chain.position(name) or 0 for name in cuts)]
    return balanced(costs, chain.places(), num_sections)


def balanced(costs: Sequence[float], places: Sequence[int], num_sections: int) -> list[int]:
    """Cut a sequence so that the largest cost of a section is minimal; among equals the earliest cuts win.

    Exact, by dynamic programming over (sections, places): O(sections * places^2).

    Args:
        costs: Cost of each item.
        places: Items with which a section after the first may begin, ascending.
        num_sections: At most one more than there are places.

    Returns:
        The item with which each section begins.
    """
    until = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    ends = [*places, len(costs)]
    # best[j]: the least possible maximum cost of a section if the sections so far end before ends[j]
    best = [(float(until[end]), [0]) for end in ends]
    for number in range(2, num_sections + 1):
        following: list[tuple[float, list[int]]] = []
        for j, end in enumerate(ends):
            options = [
                (max(best[i][0], float(until[end] - until[ends[i]])), [*best[i][1], ends[i]])
                for i in range(number - 2, j)
            ]
            following.append(min(options, default=(np.inf, [])))
        best = following
    return best[-1][1]
