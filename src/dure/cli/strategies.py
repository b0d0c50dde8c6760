"""`dure strategies`: the table of strategies."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from dure.cli.output import JsonFlag, print_json, show
from dure.errors import Misuse
from dure.report.end_table import add_row
from dure.spec import unknown_name

if TYPE_CHECKING:
    from dure.strategies import StrategyInfo

NARROW_COLUMNS = 60

ROWS = {
    "divides": "divides",
    "synchronises": "waits",
    "preserves": "preserves",
    "does_not_preserve": "not preserved",
    "needs": "needs",
    "sent_bytes": "sends",
    "memory": "memory",
    "right_when": "right when",
}
"""What is said of a strategy, and the label it is said under."""

_LEGEND = "P ranks or devices, b samples; bytes: W parameters, G gradients, S optimiser state, A(b) activations"


def command() -> Callable[..., None]:
    """Build the verb."""
    return strategies


def strategies(
    name: Annotated[str | None, Parameter(help="only this strategy", show_default=False)] = None,
    /,
    *,
    json: JsonFlag = False,
) -> None:
    """Show the strategies: what each divides, what it preserves of the one-device run, what it needs.

    P is the number of ranks or devices, G the bytes of the gradients, W those of the parameters, S those of the
    optimiser's state, A those of the activations.
    """
    from dure.strategies import STRATEGIES

    if name is not None and name not in STRATEGIES:
        raise Misuse(unknown_name("strategy", name, STRATEGIES))
    chosen = [STRATEGIES[name]] if name is not None else list(STRATEGIES.values())
    if json:
        print_json({"strategies": [info.to_json() for info in chosen]})
    else:
        show(_StrategyTable(chosen))
        show(Text(_LEGEND, style="dim"))


class _StrategyTable:
    """A block per strategy: the sentences are too long for columns side by side."""

    def __init__(self, infos: Sequence["StrategyInfo"]) -> None:
        self.infos = infos

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        is_narrow = options.max_width < NARROW_COLUMNS
        for position, info in enumerate(self.infos):
            if position:
                yield Text()
            yield Text.assemble((info.name, "bold cyan"), f"  {info.summary}")
            block = Table.grid(padding=(0, 2, 0, 0))
            block.add_column(width=1 if is_narrow else 2)
            block.add_column(no_wrap=True, style="bold")
            block.add_column(overflow="fold")
            for field, label in ROWS.items():
                value = getattr(info, field)
                text = "\n".join(value) if isinstance(value, tuple) else str(value)
                add_row(block, "", label, text or "-")
            yield block
