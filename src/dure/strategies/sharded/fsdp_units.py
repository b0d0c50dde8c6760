"""Modules that `fsdp` gathers separately: found automatically, or named by patterns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from dure.comm.groups import Group
from dure.errors import TaskInvalid
from dure.strategies.state.module_patterns import matching
from dure.torchcompat.modules import BatchNorm

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Containers of repeated blocks. Subclasses have their own forward, so they are blocks themselves."""

_UNIT_MODULUS = 4_093
"""Modulus of fingerprints, so small that a sum over dozens of ranks is exact in float32."""
_LEAST_BYTES = 128 * 2**10
"""Size below which latency dominates: 128 KiB take 30 us at 4 GB/s, about the cost of any message."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Module whose parameters are gathered together, and freed together."""

    name: str
    module: nn.Module

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        return parameter_bytes(self.module)

    @property
    def has_batchnorm(self) -> bool:
        """Return whether it has a BatchNorm, which counts a recomputed batch twice and needs float32 parameters."""
        return has_batchnorm(self.module)


class UnitCalls:
    """Order of a step's calls of units, which ranks compare.

    One that gathers another unit than the others, of the same size, would get wrong weights unnoticed.
    """

    def __init__(self, units: Sequence[Unit], group: Group) -> None:
        """Register hooks on the units of all ranks of a group."""
        self._group = group
        self._digest = 0
        for number, unit in enumerate(units):
            unit.module.register_forward_pre_hook(self._noting(number))

    def _noting(self, number: int) -> Callable[..., None]:
        def note(*_: object) -> None:
            self._digest = (self._digest * 31 + number + 1) % _UNIT_MODULUS

        return note

    def begin_step(self) -> None:
        """Forget the calls of evaluations."""
        self._digest = 0

    def fingerprint(self) -> float:
        """Return a fingerprint of this step's calls, weighted so that equal ones of all ranks sum to 0."""
        if self._group.rank:
            return float(self._digest * _weight(self._group.rank))
        return -float(self._digest * sum(map(_weight, range(1, self._group.world_size))))

    @staticmethod
    def check(totals: Sequence[float]) -> None:
        """Raise on all ranks if some have called other units than others, or in another order.

        Args:
            totals: Sum of all ranks' fingerprints.

        Raises:
            TaskInvalid: They have.
        """
        if any(totals):
            raise TaskInvalid(
                "ranks called different units of the model in a step, or the same ones in another order, by chance or "
                "depending on data, but all must gather the same ones at the same time: leave out --fsdp.units, or use "
                "ddp"
            )


def _weight(rank: int) -> int:
    """Return the weight of a rank's fingerprint: others for other ranks, so that differences do not add up to 0."""
    return 1 + rank * 37 % 61


def parameter_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters of a module."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def has_batchnorm(module: nn.Module) -> bool:
    """Return whether a module contains a BatchNorm."""
    return any(isinstance(inner, BatchNorm) for inner in module.modules())


def find_units(model: nn.Module, patterns: str | None) -> list[Unit]:
    """Return the units without the model itself, outer ones before those inside them.

    Units are the children of lists and sequences that are large enough: blocks, of which only the active one need be
    whole. A block that shares a parameter with anything outside itself is no unit, because it would be freed too early.

    Args:
        model: Model that is not yet sharded.
        patterns: `blocks.*,head`: replaces the search.
    """
    if patterns is not None:
        named = {name: module for pattern in patterns.split(",") for name, module in matching(model, pattern)}
        # named_modules lists outer modules first
        return [Unit(name, module) for name, module in model.named_modules() if name in named]
    found = [Unit(name, module) for name, module in _blocks(model, "") if parameter_bytes(module) >= _LEAST_BYTES]
    return [unit for unit in found if not shared_parameters(model, unit.module)]


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if type(module) in _CONTAINERS and type(child) not in _CONTAINERS:
            yield prefix + name, child
        else:
            yield from _blocks(child, f"{prefix}{name}.")


def shared_parameters(model: nn.Module, module: nn.Module) -> list[str]:
    """Return the names, inside the module, of parameters that are also used outside it."""
    inside = set(module.modules())
    outside = {
        id(parameter)
        for other in model.modules()
        if other not in inside
        for parameter in other.parameters(recurse=False)
    }
    return [name for name, parameter in module.named_parameters() if id(parameter) in outside]


def unit_faults(model: nn.Module, patterns: str) -> Iterator[str]:
    """Yield the reasons why modules named by patterns cannot be units, one sentence each."""
    for pattern in patterns.split(","):
        found = list(matching(model, pattern))
        if not found:
            known = ", ".join(name for name, _ in model.named_children())
            yield f"units names {pattern.strip()}, which fits no module of the model: its own are {known}"
        for name, module in found:
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                yield f"units names {name}, a {type(module).__name__}, which is never called: name {name}.*"
            elif shared := shared_parameters(model, module):
                yield (
                    f"units names {name}, whose {shared[0]} is shared with a module outside it and would be freed "
                    "while that needs it: leave it out, then it is gathered with the whole model"
                )
