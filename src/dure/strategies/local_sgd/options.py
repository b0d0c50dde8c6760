"""Options of averaging and diloco."""

from pydantic import Field

from dure.spec.options import StrategyOptions


class AveragingOptions(StrategyOptions):
    """Interval of averagings, and warm-up."""

    average_every: int = Field(16, gt=0, description="steps from one averaging to the next")
    warmup_steps: int = Field(0, ge=0, description="synchronous steps at the start of the run")


class DiLoCoOptions(AveragingOptions):
    """Settings of the outer optimiser."""

    outer_lr: float = Field(0.7, gt=0, description="learning rate of the outer step")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of the outer step")
