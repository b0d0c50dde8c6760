"""Row and options of a strategy that a package of somebody else brings; torch is not imported here."""

from dataclasses import replace

from pydantic import Field

from dure.spec import StrategyOptions
from dure.strategies.contract.info import StrategyInfo


class ToyOptions(StrategyOptions):
    """Option of the toy."""

    pieces: int = Field(1, gt=0, description="pieces in which each gradient is sent")


INFO = StrategyInfo(
    name="toy",
    implementation="toy_strategy:Toy",
    options="toy_options:ToyOptions",
    summary="data parallelism that sends each gradient in pieces",
    divides="each global batch over the ranks",
    synchronises="every step after backward, once for each piece of a gradient",
    preserves="weights after every step (to rounding), sample order, evaluation",
    does_not_preserve=(),
    needs="a model that fits one device",
    sent_bytes="every rank: 2 (P-1)/P G per step",
    memory="W + G + S + A(microbatch)",
    right_when="a test needs a strategy from outside",
    one_process=False,
    settings=("on_nonfinite",),
)


def row() -> StrategyInfo:
    """Return the row, as an entry may."""
    return INFO


# rows that cannot be
NUMBER = 3
OTHER_NAME = replace(INFO, name="another")
SEED = replace(INFO, name="seed")
UNKNOWN_SETTING = replace(INFO, settings=("no_such",))
NO_OPTIONS = replace(INFO, options="toy_options:NUMBER")
