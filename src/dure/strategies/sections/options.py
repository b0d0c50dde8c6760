"""Options of the strategies that cut a model into sections."""

from pydantic import Field

from dure.spec.options import StrategyOptions


class SectionOptions(StrategyOptions):
    """Option of all strategies that cut a model."""

    cuts: str | None = Field(None, description="modules that begin a section, as layers.4,layers.8 (default: found)")
