"""Divergence between ranks that must hold equal state: which rank, which tensor, which element.

Ranks exchange only checksums, of ever smaller pieces; no tensor is sent.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dure.comm.groups import Group
from dure.strategies.contract.replica_state import ReplicaState
from dure.strategies.state.checksum import checksums

_PIECES = 64
"""Number of pieces into which a tensor is cut in each round; five rounds find one of 10^9 elements."""
_SHOWN_TENSORS = 3


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Replicas of one part of the state that differ."""

    holders: tuple[int, ...]
    """Ranks that hold the part."""
    odd: tuple[int, ...]
    """Ranks that differ from more than half of the holders; empty if there is no such majority."""
    tensors: tuple[str, ...]
    """Names of the tensors that differ."""
    element: str
    """First element that differs, such as `weight[3, 0]`; only the name if shapes differ."""
    values: Mapping[int, str]
    """Value on each holder, by rank."""

    def describe(self, step: int) -> str:
        """Return the divergence as a sentence without a full stop."""
        if self.odd:
            others = [rank for rank in self.holders if rank not in self.odd]
            verb = "hold" if len(self.odd) > 1 else "holds"
            who = f"{listed_ranks(self.odd)} {verb} other values than {listed_ranks(others)} after step {step}"
        else:
            which = "with two it is unknown which are wrong" if len(self.holders) == 2 else "none are the majority's"
            who = f"{listed_ranks(self.holders)} hold different values after step {step}, and {which}"
        shown = ", ".join(f"{value} on {listed_ranks(ranks)}" for value, ranks in self._ranks_by_value().items())
        more = ""
        if also := self.tensors[1 : 1 + _SHOWN_TENSORS]:
            rest = len(self.tensors) - 1 - len(also)
            more = f" (also {', '.join(also)}{f' and {rest} more' if rest else ''})"
        return f"{who}: {self.element} is {shown}{more}"

    def _ranks_by_value(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for rank in sorted(self.values):
            found.setdefault(self.values[rank], []).append(rank)
        return found


def common_parts(part_of_rank: Sequence[str | None]) -> dict[str, list[int]]:
    """Return the parts that several ranks hold, with these ranks, given the part that every rank holds."""
    parts: dict[str, list[int]] = {}
    for rank, part in enumerate(part_of_rank):
        if part is not None:
            parts.setdefault(part, []).append(rank)
    return {part: ranks for part, ranks in parts.items() if len(ranks) > 1}


def minority(digests: Mapping[int, Any]) -> tuple[int, ...]:
    """Return the ranks whose digest is not that of the majority; none if there is no majority."""
    most, count = Counter(digests.values()).most_common(1)[0]
    return tuple(rank for rank, digest in digests.items() if digest != most) if 2 * count > len(digests) else ()


def find_divergence(group: Group, own: ReplicaState | None, digests: Mapping[int, int]) -> Divergence:
    """Find the ranks, the tensors and the first element that differ.

    Args:
        group: Process group of all ranks; ranks that hold another part take part as well.
        own: Replica of this rank; None if it does not hold the part.
        digests: Digests of the part, by the ranks that hold it.

    Communication: several gathered JSON messages, the first of about 100 bytes per tensor, the others of 1 KiB.
    """
    sums = None if own is None else dict(zip(own.tensors, checksums(own.tensors.values()), strict=True))
    gathered = group.all_gather_json(sums)
    holders = tuple(sorted(digests))
    names = list(dict.fromkeys(name for rank in holders for name in gathered[rank]))
    differing = tuple(name for name in names if len({gathered[rank].get(name) for rank in holders}) > 1)
    first = differing[0]
    tensor = None if own is None else own.tensors.get(first)
    element, values = _first_element(group, tensor, holders)
    return Divergence(
        holders=holders,
        odd=minority(digests),
        tensors=differing,
        element=f"{first}{element}",
        values={rank: values[rank] for rank in holders},
    )


def _first_element(group: Group, tensor: Tensor | None, holders: Sequence[int]) -> tuple[str, list[str]]:
    """Return the index of the first element that differs, such as `[3, 0]`, and every rank's value there."""
    flat = None if tensor is None else tensor.detach().reshape(-1)
    gathered = group.all_gather_json(None if tensor is None else list(tensor.shape))
    shapes = [gathered[rank] for rank in holders]
    if any(shape != shapes[0] for shape in shapes):
        return "", ["missing" if shape is None else f"of shape {shape}" for shape in gathered]
    begin, end = 0, torch.Size(shapes[0]).numel()
    while end - begin > 1:
        length = -(-(end - begin) // _PIECES)
        starts = range(begin, end, length)
        sums = None if flat is None else checksums(flat[at : min(at + length, end)] for at in starts)
        gathered = group.all_gather_json(sums)
        pieces = zip(*(gathered[rank] for rank in holders), strict=True)
        begin = next((at for at, same in zip(starts, pieces, strict=True) if len(set(same)) > 1), begin)
        end = min(begin + length, end)
    values = group.all_gather_json(None if flat is None else repr(flat[begin].item()))
    place = [int(index) for index in torch.unravel_index(torch.tensor(begin), shapes[0])] if shapes[0] else []
    return str(place) if place else "", values


def listed_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as `rank 1` or `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
