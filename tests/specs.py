"""Specs and settings of tests, where the options of a strategy stand among the other settings."""

from collections.abc import Mapping
from typing import Any

from dure.spec import RunSpec
from dure.strategies.table import STRATEGIES


def grouped(strategy: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those that are options of the strategy in a table under its name, as users give them."""
    own = STRATEGIES[strategy or "single"].option_class().model_fields
    options = {name: value for name, value in settings.items() if name in own}
    others = {name: value for name, value in settings.items() if name not in own}
    return {**others, **({str(strategy): options} if options else {})}


def spec_of(strategy: str = "single", **settings: Any) -> RunSpec:
    """Return the spec of a run of no task, with options of its strategy among the settings."""
    own = STRATEGIES[strategy].option_class()
    options = {name: value for name, value in settings.items() if name in own.model_fields and value is not None}
    others = {name: value for name, value in settings.items() if name not in own.model_fields}
    return RunSpec(task="-:-", strategy=strategy, options=own(**options).model_dump(mode="json"), **others)
