"""Strategies from installed packages, found by entry points of the group `dure.strategies`.

An entry has the name of its strategy and refers to its row, a `StrategyInfo`, or a function that returns one:

    [project.entry-points."dure.strategies"]
    my_strategy = "my_package.row:INFO"

The module of the row, and that of its options, should not import torch: `dure strategies` and `--help` read them.
"""

import functools
import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Mapping

from dure.spec import SETTINGS, RunSpec, StrategyOptions, StrategyTable
from dure.strategies.contract.info import StrategyInfo

GROUP = "dure.strategies"
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_MORE_ARGUMENTS = ("resume", "config", "which", "task")


class Strategies(StrategyTable[StrategyInfo]):
    """All strategies by name: dure's own, then those of installed packages, which are searched on first use."""

    def __init__(self, own: Iterable[StrategyInfo]) -> None:
        self._own = {info.name: info for info in own}

    def __getitem__(self, name: str) -> StrategyInfo:
        return self._own[name] if name in self._own else self._found[0][name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._own, *self._found[0]))

    def __len__(self) -> int:
        return len(self._own) + len(self._found[0])

    @property
    def own(self) -> tuple[str, ...]:
        """Names of dure's own strategies."""
        return tuple(self._own)

    @property
    def faults(self) -> Mapping[str, str]:
        """Messages about unusable entries, by their names."""
        return self._found[1]

    @functools.cached_property
    def _found(self) -> tuple[dict[str, StrategyInfo], dict[str, str]]:
        rows: dict[str, StrategyInfo] = {}
        faults: dict[str, str] = {}
        packages: dict[str, str] = {}
        for entry in importlib.metadata.entry_points(group=GROUP):
            package = _package(entry)
            cure = f"update or uninstall {package}"
            if entry.name in packages:
                both = f"{packages[entry.name]} and {package}"
                faults[entry.name] = f"{both} bring a strategy {entry.name} each: uninstall one of them"
                rows.pop(entry.name, None)
            elif entry.name in self._own:
                faults[entry.name] = f"{package} brings a strategy {entry.name}, which is dure's own name: {cure}"
            else:
                try:
                    rows[entry.name] = _row(entry)
                except Exception as error:  # a package's module may raise anything when it is imported
                    reason = str(error).split("\n")[0] or type(error).__name__
                    faults[entry.name] = f"strategy {entry.name} of {package} cannot be used ({reason:.300}): {cure}"
            packages.setdefault(entry.name, package)
        return rows, faults


def _package(entry: importlib.metadata.EntryPoint) -> str:
    return "a package without a name" if entry.dist is None else f"the package {entry.dist.name}"


def _row(entry: importlib.metadata.EntryPoint) -> StrategyInfo:
    """Import the row of an entry.

    Raises:
        ValueError: It is not a row, or has invalid values.
    """
    info = entry.load()
    if callable(info) and not isinstance(info, type):
        info = info()
    if not isinstance(info, StrategyInfo):
        kind = info.__name__ if isinstance(info, type) else type(info).__name__
        raise ValueError(f"{entry.value} gives a {kind}, and not a StrategyInfo or a function that returns one")
    if info.name != entry.name:
        raise ValueError(f"its row is called {info.name}")
    if not _NAME.fullmatch(info.name) or info.name in (*RunSpec.model_fields, *_MORE_ARGUMENTS):
        raise ValueError("its name is that of a setting, or not made of lower-case letters, digits and single _")
    unknown = [name for name in info.settings if name not in SETTINGS]
    if unknown:
        raise ValueError(f"its row names {unknown[0]} as a setting, which is none")
    options = info.option_class()
    if not (isinstance(options, type) and issubclass(options, StrategyOptions)):
        raise ValueError(f"{info.options} is no class of dure.spec.StrategyOptions")
    return info
