"""`dure train --show-spec`: every setting, its value, and the source of the value."""

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from dure.spec import GROUPS, ResolvedSpec
from dure.styled import draw, styled
from dure.terminal import print_json

NARROW_COLUMNS = 60


def print_spec(resolved: ResolvedSpec, *, as_json: bool) -> None:
    """Print a resolved spec; with `as_json` as `{"spec": ..., "origin": ...}`."""
    if as_json:
        print_json({"spec": resolved.spec.model_dump(mode="json"), "origin": resolved.origin})
    else:
        draw(_SpecTable(resolved))


class _SpecTable:
    """Table with a row per setting, by group; in a narrow terminal lines, with the source unless it is the default."""

    def __init__(self, resolved: ResolvedSpec) -> None:
        self.resolved = resolved

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        is_narrow = options.max_width < NARROW_COLUMNS
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("setting", no_wrap=True)
        table.add_column("value", overflow="fold")
        table.add_column("from", overflow="fold")
        strategy, own = self.resolved.spec.strategy, self.resolved.spec.options
        groups = {**GROUPS, f"Options of strategy {strategy}": tuple(f"{strategy}.{name}" for name in own)}
        for title, names in groups.items():
            if not names:
                continue
            table.add_row(styled(title, "bold"))
            lines = [styled(title, "bold")]
            for label, value, origin in (row for name in names for row in self._rows(name)):
                is_default = origin.startswith("default")
                table.add_row(f"  {label}", value, origin, style="dim" if is_default else None)
                source = "" if is_default else f" ({origin})"
                lines.append(styled(f"  {label}: {value}{source}", overflow="fold"))
            if is_narrow:
                yield from lines
        if not is_narrow:
            yield table

    def _rows(self, name: str) -> list[tuple[str, str, str]]:
        spec, origin = self.resolved.spec, self.resolved.origin
        if name == "task_options" and spec.task_options:
            items = spec.task_options.items()
            return [(f"task.{key}", str(value), origin.get(f"task_options.{key}", "default")) for key, value in items]
        strategy, _, option = name.partition(".")
        is_option = strategy == spec.strategy
        value = spec.options[option] if is_option else spec.setting(name)
        shown = "-" if value is None or value == {} else _shown(value)
        return [(name, shown, origin[f"options.{option}" if is_option else name])]


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
