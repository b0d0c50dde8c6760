"""`dure strategies`: the table of strategies."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from dure.cli.output import JsonFlag
from dure.errors import Misuse
from dure.spec import flag_name, unknown_name
from dure.styled import Hanging, draw, joined, styled, styled_lines
from dure.terminal import print_json, print_status, print_text

if TYPE_CHECKING:
    from dure.strategies.contract.info import StrategyInfo

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
"""Fields of a strategy that are shown, with their labels."""

_LEGEND = "P ranks or devices, b samples; bytes: W parameters, G gradients, S optimiser state, A(b) activations"


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens and the verb."""
    return tokens, strategies


def strategies(
    name: Annotated[str | None, Parameter(help="only this strategy", show_default=False)] = None,
    /,
    *,
    json: JsonFlag = False,
    markdown: Annotated[
        bool, Parameter(name="--markdown", negative=(), show_default=False, help="print the table as a Markdown page")
    ] = False,
) -> None:
    """Show the strategies: what each divides, what it preserves of the one-device run, what it needs.

    P is the number of ranks or devices, G the bytes of the gradients, W those of the parameters, S those of the
    optimiser's state, A those of the activations.
    """
    from dure.strategies.table import STRATEGIES

    if name is not None and name not in STRATEGIES:
        raise Misuse(STRATEGIES.faults.get(name) or unknown_name("strategy", name, STRATEGIES))
    for fault in STRATEGIES.faults.values():
        print_status(fault)
    chosen = [STRATEGIES[name]] if name is not None else list(STRATEGIES.values())
    if json and markdown:
        raise Misuse("--json and --markdown are two forms of one answer: choose one")
    if markdown:
        print_text(markdown_page(chosen).removesuffix("\n"))
    elif json:
        print_json({"strategies": [info.to_json() for info in chosen]})
    else:
        draw(_StrategyTable(chosen))
        draw(styled(_LEGEND, "dim"))
        if name is None:
            draw("")
            draw(_overview(chosen))


def _overview(infos: Sequence["StrategyInfo"]) -> Table:
    """Return a line per strategy, to choose from; shown last, so that a terminal still displays it."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("strategy", no_wrap=True, style="bold cyan")
    table.add_column("exact", no_wrap=True)
    table.add_column("right when")
    for info in infos:
        table.add_row(info.name, "yes" if info.is_exact else "no", styled_lines(info.right_when))
    return table


def markdown_page(infos: Sequence["StrategyInfo"]) -> str:
    """Return the table as a Markdown page: an overview to choose from, then the details of each strategy."""
    head = [
        "# Strategies",
        "",
        "Made by `dure strategies --markdown` from the table that the tests walk; do not edit it by hand.",
        "",
        _LEGEND + ".",
        "",
        "| strategy | divides | exact | right when |",
        "|---|---|---|---|",
    ]
    overview = [
        f"| [`{info.name}`](#{info.name}) | {info.divides} | {'yes' if info.is_exact else 'no'} | {info.right_when} |"
        for info in infos
    ]
    return "\n".join([*head, *overview, *(line for info in infos for line in _markdown_section(info)), ""])


def _markdown_section(info: "StrategyInfo") -> list[str]:
    lines = ["", f"## {info.name}", "", f"{info.summary}.", ""]
    for field, label in ROWS.items():
        value = getattr(info, field)
        texts = value if isinstance(value, tuple) else (value,)
        lines += [f"- **{label}**: {text}" for text in texts] or [f"- **{label}**: nothing is lost"]
    if options := _option_flags(info):
        lines.append(f"- **options**: {', '.join(f'`{flag}`' for flag in options)}")
    if info.settings:
        lines.append(f"- **settings**: {', '.join(f'`{flag_name(name)}`' for name in info.settings)}")
    if len(info.mesh_axes) > 1:
        lines.append(f"- **mesh**: `--mesh {','.join(f'{axis}=…' for axis in info.mesh_axes)}`")
    return lines


def _option_flags(info: "StrategyInfo") -> list[str]:
    return [flag_name(f"{info.name}.{option}") for option in info.option_class().model_fields]


class _StrategyTable:
    """Block per strategy, because the sentences are too long for adjacent columns."""

    def __init__(self, infos: Sequence["StrategyInfo"]) -> None:
        self.infos = infos

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        is_narrow = options.max_width < NARROW_COLUMNS
        for position, info in enumerate(self.infos):
            if position:
                yield ""
            indentation = 2 if is_narrow else len(info.name) + 2
            yield Hanging(joined((info.name, "bold cyan"), f"  {info.summary}"), indentation)
            block = Table.grid(padding=(0, 2, 0, 0))
            block.add_column(width=1 if is_narrow else 2)
            block.add_column(no_wrap=True, style="bold")
            block.add_column(overflow="fold")
            for field, label in ROWS.items():
                value = getattr(info, field)
                text = "\n".join(value) if isinstance(value, tuple) else str(value)
                block.add_row("", label, styled_lines(text or "-"))
            if flags := _option_flags(info):
                block.add_row("", "options", styled_lines(", ".join(flags)))
            yield block
