"""Options of the chosen strategy, from all sources; options of other strategies are refused, or ignored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from dure.spec.fields import RunSpec, is_bool_for_number, requirement_of, shown
from dure.spec.names import unknown_name
from dure.spec.old_names import STRATEGIES_WITH, WITHOUT_EFFECT, given_twice, note, option_name
from dure.spec.sources import Source
from dure.spec.strategy_traits import StrategyTraits, option_names, strategies_with


@dataclass(kw_only=True)
class OwnOptions:
    """Options of one strategy before they are in a spec."""

    strategy: str
    strategies: Mapping[str, StrategyTraits]
    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    """Source of each option, by its name without the strategy's."""
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cls = self.strategies[self.strategy].option_class()

    def take_over(self, base: RunSpec) -> None:
        """Start with the resumed run's options, as far as this strategy has them."""
        for name, value in base.options.items():
            if name in self.cls.model_fields and value is not None:
                self._set(name, value, "the resumed run")

    def lay_over(self, source: Source) -> None:
        """Override options of lower sources by those of this one."""
        tables = {name: table for name, table in source.values.items() if name in self.strategies}
        for strategy, table in tables.items():
            if not isinstance(table, Mapping):
                continue  # it is an unknown setting
            if strategy == self.strategy:
                self._take_table(source, table)
            elif source.is_for_one_strategy:
                self.faults += [self._fault_of_another(source, strategy, option) for option in table]
        own = tables.get(self.strategy)
        for old in STRATEGIES_WITH:
            if source.values.get(old) is not None:
                self._take_old(source, old, own if isinstance(own, Mapping) else {})

    def _take_table(self, source: Source, table: Mapping[str, Any]) -> None:
        for option, value in table.items():
            name = f"{self.strategy}.{option}"
            if option not in self.cls.model_fields:
                known = map(source.spell, option_names(self.strategies, [self.strategy]))
                fault = unknown_name("option", source.spell(name), known)
                others = strategies_with(option, self.strategies)
                also = f"; {option} is an option of {_listed(others)}" if others else ""
                self.faults.append(f"{source.origin_of(name)}: {fault}{also}")
            elif value is not None:
                self._set(option, value, source.origin_of(name))

    def _fault_of_another(self, source: Source, strategy: str, option: str) -> str:
        where, able = source.origin_of(f"{strategy}.{option}"), strategies_with(option, self.strategies)
        if self.strategy in able:
            own = source.spell(f"{self.strategy}.{option}")
            return f"{where}: the strategy is {self.strategy}: write {own}, or choose --strategy {strategy}"
        if strategy not in able:
            known = map(source.spell, option_names(self.strategies, [strategy]))
            return f"{where}: {unknown_name('option', source.spell(f'{strategy}.{option}'), known)}"
        return f"{where}: {self._refusal(option, able)}"

    def _refusal(self, option: str, able: Sequence[str]) -> str:
        return f"strategy {self.strategy} has no option {option}: choose --strategy {_listed(able)}, or leave it out"

    def _take_old(self, source: Source, old: str, table: Mapping[str, Any]) -> None:
        option, value, where = option_name(old), source.values[old], source.origin_of(old)
        if option not in self.cls.model_fields or self.strategy not in STRATEGIES_WITH[old]:
            if old not in WITHOUT_EFFECT and not self._is_default(old, value):
                self.faults.append(f"{where}: {self._refusal(option, STRATEGIES_WITH[old])}")
            return
        name = f"{self.strategy}.{option}"
        if option in table:
            self.faults.append(given_twice(source, old, name))
            return
        self._set(option, value, where)
        self.notes.append(note(source, old, name))

    def _is_default(self, old: str, value: Any) -> bool:
        """Return whether an old name has its default value, which no strategy refused."""
        cls = self.strategies[STRATEGIES_WITH[old][0]].option_class()
        try:
            return bool(cls.model_validate({option_name(old): value}) == cls())
        except ValidationError:
            return False

    def _set(self, option: str, value: Any, origin: str) -> None:
        self.values[option], self.origin[option] = value, origin

    def validated(self) -> tuple[dict[str, Any], set[str]]:
        """Return every option with its value, or its default if no valid one was given, and the options at fault."""
        fields = self.cls.model_fields
        bad = {name for name, value in self.values.items() if is_bool_for_number(fields[name], value)}
        try:
            self.cls.model_validate(self.values)
        except ValidationError as error:
            bad |= {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
        self.faults += [
            f"{self.origin[name]}: {name} is {shown(value)} but must be {requirement_of(fields[name])}"
            for name, value in self.values.items()
            if name in bad
        ]
        sound = self.cls.model_validate({name: value for name, value in self.values.items() if name not in bad})
        return sound.model_dump(mode="json"), bad


def _listed(names: Sequence[str]) -> str:
    first, *others = names
    return f"{first} (or {', '.join(others)})" if others else first
