"""Part of a strategy's row in the table that a spec needs, and the options of all strategies by name."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from dure.spec.options import StrategyOptions


class StrategyTraits(Protocol):
    """Part of a strategy's row in the table that a spec needs."""

    @property
    def many_devices(self) -> bool: ...

    @property
    def default_for(self) -> str:
        """`one` or `many` devices for which it is the default; empty for neither."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings that this strategy honours but some others do not."""

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Axes that `mesh` may name."""

    @property
    def main_axis(self) -> str | None:
        """Axis that has all devices without `mesh`; None for the last one."""

    @property
    def alike_axes(self) -> tuple[str, ...]:
        """Axes along which all devices work on the same samples."""

    def option_class(self) -> type[StrategyOptions]:
        """Return the model of its own options."""


_Row = TypeVar("_Row", bound=StrategyTraits, covariant=True)


class StrategyTable(Mapping[str, _Row]):
    """Rows of all strategies by name."""

    @property
    @abstractmethod
    def faults(self) -> Mapping[str, str]:
        """Messages about installed strategies that cannot be used, by their names."""


def strategies_with(option: str, strategies: Mapping[str, StrategyTraits]) -> list[str]:
    """Return the strategies that have an option of this name."""
    return [name for name, row in strategies.items() if option in row.option_class().model_fields]


def option_names(strategies: Mapping[str, StrategyTraits], names: Iterable[str] | None = None) -> list[str]:
    """Return the options of these strategies (all by default), after the strategies' names: `fsdp.units`."""
    return [
        f"{name}.{option}"
        for name in (strategies if names is None else names)
        for option in strategies[name].option_class().model_fields
    ]
