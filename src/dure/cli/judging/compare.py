"""`dure compare` and `dure scale`: short runs of a task in turns, measured side by side."""

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dure.cli.output import JsonFlag
from dure.errors import Misuse
from dure.terminal import one_line, print_json, print_status, print_text
from dure.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dure.report.comparison import MeasuredRun, Row

_OWN = (
    "--strategy",
    "--nproc",
    "--nproc-per-node",
    "--nnodes",
    "--name",
    "--runs-dir",
    "--resume",
    "--samples",
    "--json",
)
_MOST_FAULT = 300
_NUM_SHOWN = 3
_STOPPED = (129, 130, 143)
"""Exit codes of a run that was stopped, as by Ctrl-C, which reaches it too."""

Task = Annotated[str, Parameter(help="the task, as for `dure train`: FILE:CLASS")]
Rounds = Annotated[int, Parameter(help="runs of each kind, in turns")]
Samples = Annotated[int | None, Parameter(help="samples of each run; by default one epoch")]
RunsDir = Annotated[Path, Parameter(help="folder in which the runs are kept, in one of its own")]
Html = Annotated[Path | None, Parameter(help="a page to write too, which opens offline", show_default=False)]
Flags = Annotated[str, Parameter(help="settings of every run, after --", allow_leading_hyphen=True)]


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens and the verb."""
    return tokens, scale if tokens[0] == "scale" else compare


def compare(
    task: Task,
    /,
    *train_flags: Flags,
    strategies: Annotated[str, Parameter(help="names with commas between them: ddp,zero1,fsdp")] = "ddp,zero1,fsdp",
    nproc: Annotated[int, Parameter(help="processes of each of them")] = 2,
    rounds: Rounds = 3,
    samples: Samples = None,
    runs_dir: RunsDir = Path("runs"),
    html: Html = None,
    json: JsonFlag = False,
) -> None:
    """Compare strategies on a task by short runs in turns: speed, memory, bytes, losses, what is not preserved."""
    from dure.strategies.table import STRATEGIES

    names = [*dict.fromkeys(name for name in strategies.split(",") if name)]
    if unknown := [name for name in names if name not in STRATEGIES]:
        raise Misuse(f"--strategies has {unknown[0]}, which is no strategy: use some of {', '.join(STRATEGIES)}")
    if nproc < 1 or not names:
        raise Misuse("give at least one strategy, and at least one process: --strategies ddp,zero1 --nproc 2")
    kinds = [("single", 1), *((name, nproc) for name in names if name != "single")]
    _check(html)
    found, measured = _rows(task, train_flags, kinds, rounds, samples, runs_dir)
    _write(found, measured, html, f"{_task_name(task)} under several strategies")
    if json:
        print_json(_to_json(found))
        return
    _show(found, "strategy")
    for row in found:
        for text in () if row.result is None else row.result.not_preserved[:_NUM_SHOWN]:
            print_text(one_line(f"{row.name} does not preserve: {text}"))


def scale(
    task: Task,
    /,
    *train_flags: Flags,
    strategy: Annotated[str, Parameter(help="the strategy")] = "ddp",
    nproc: Annotated[str, Parameter(help="numbers of processes with commas between them")] = "1,2,4",
    rounds: Rounds = 3,
    samples: Samples = None,
    runs_dir: RunsDir = Path("runs"),
    html: Html = None,
    json: JsonFlag = False,
) -> None:
    """Measure a task on more and more processes: speed, what is lost to what, where to stop."""
    from dure.report.comparison import where_to_stop
    from dure.strategies.table import STRATEGIES

    if strategy not in STRATEGIES:
        raise Misuse(f"{strategy} is no strategy: use one of {', '.join(STRATEGIES)}")
    counts = [count for count in nproc.split(",") if count]
    if not counts or not all(count.isdecimal() and 0 < int(count) < 2**20 for count in counts):
        raise Misuse(f"--nproc is {nproc} but must be numbers with commas between them, such as 1,2,4")
    kinds = [(strategy, count) for count in sorted({1, *map(int, counts)})]
    _check(html)
    found, measured = _rows(task, train_flags, kinds, rounds, samples, runs_dir)
    stop = where_to_stop(found)
    _write(found, measured, html, f"{_task_name(task)} under {strategy} on more and more processes", stop)
    if json:
        print_json({**_to_json(found), "where_to_stop": stop})
        return
    _show(found, "processes")
    print_text(stop)


def _rows(
    task: str,
    flags: Sequence[str],
    kinds: Sequence[tuple[str, int]],
    rounds: int,
    samples: int | None,
    runs_dir: Path,
) -> "tuple[list[Row], Mapping[tuple[str, int], Sequence[MeasuredRun]]]":
    """Run all kinds in turns, and return their rows, and the runs of each."""
    from dure.records.run_dir import RunDir
    from dure.report.comparison import compare as compared
    from dure.report.comparison import measure

    own = [flag for flag in flags if flag.partition("=")[0].replace("_", "-") in _OWN]
    if own:
        raise Misuse(f"{own[0]} is set by this command for each run: leave it out")
    if rounds < 1:
        raise Misuse(f"--rounds is {rounds} but must be at least 1")
    folder = runs_dir / f"compared-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    measured: dict[tuple[str, int], list[MeasuredRun]] = {kind: [] for kind in kinds}
    faults: dict[tuple[str, int], str] = {}
    for number in range(1, rounds + 1):
        for kind in kinds:
            if kind in faults:
                continue
            strategy, nproc = kind
            print_status(f"round {number} of {rounds}: {strategy} x {nproc}")
            name = f"{strategy}-{nproc}-{number}"
            fault = _train(task, strategy, nproc, folder, name, samples, flags)
            if fault is None:
                measured[kind].append(measure(RunDir.open(folder / name)))
                continue
            if kind == kinds[0]:
                raise Misuse(f"the run on one device, with which the others are compared, ended: {fault}")
            faults[kind] = fault
    print_status(f"the runs are in {one_line(folder)}")
    return compared(measured, faults), measured


def _check(html: Path | None) -> None:
    """Refuse a page that cannot be written before minutes are spent on what it shows."""
    if html is not None:
        from dure.report.compared.page import check_page

        check_page(html)


def _write(
    rows: "Sequence[Row]",
    measured: "Mapping[tuple[str, int], Sequence[MeasuredRun]]",
    html: Path | None,
    title: str,
    stop: str | None = None,
) -> None:
    if html is not None:
        from dure.report.compared.page import write_comparison

        write_comparison(rows, measured, html, title=title, where_to_stop=stop)
        print_status(f"the page is {one_line(html)}")


def _task_name(task: str) -> str:
    return task.rpartition(":")[2] or task


def _train(
    task: str, strategy: str, nproc: int, folder: Path, name: str, samples: int | None, flags: Sequence[str]
) -> str | None:
    """Run `dure train`; return the last line that it wrote to stderr if it failed."""
    words = ["--strategy", strategy, "--nproc", str(nproc), "--runs-dir", str(folder), "--name", name, "--quiet"]
    words += [] if samples is None else ["--samples", str(samples)]
    command = [sys.executable, "-m", "dure", "train", task, *words, *flags]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode in _STOPPED:
        raise KeyboardInterrupt
    if done.returncode == 0:
        return None
    lines = [line.removeprefix("dure: ") for line in done.stderr.splitlines() if line.startswith("dure: ")]
    text = lines[-1] if lines else f"exit code {done.returncode}"
    return text if len(text) <= _MOST_FAULT else f"{text[:_MOST_FAULT]}…"


def _to_json(rows: "Sequence[Row]") -> Mapping[str, Any]:
    from dure.report.comparison import to_json

    return to_json(rows)


def _show(rows: "Sequence[Row]", kind: str) -> None:
    from dure.styled import draw

    draw(_table(rows, kind))
    for row in rows:
        if row.fault is not None:
            print_text(one_line(f"{row.name} x {row.num_devices} could not be measured: {row.fault}"))


def _table(rows: "Sequence[Row]", kind: str) -> "RenderableType":
    """Return the rows as a table."""
    from rich.table import Table

    from dure.styled import styled

    table = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
    table.add_column(kind, no_wrap=True)
    for title in ("samples/s", "", "of ideal", "waits", "sent/step", "peak", "loss", "same time"):
        # where the terminal is narrow, bytes and their unit may be on two lines
        table.add_column(title, justify="right", no_wrap=title not in ("of ideal", "sent/step", "peak", "same time"))
    for row in rows:
        name = row.name if kind == "strategy" else str(row.num_devices)
        table.add_row(styled(name), *(styled(cell) for cell in _cells(row)))
    return table


def _cells(row: "Row") -> Iterator[str]:
    found = row.result
    if found is None:
        return
    yield format_count(found.samples_per_second)
    yield f"±{(found.fastest - found.slowest) / 2 / found.samples_per_second:.0%}"
    yield f"{found.efficiency:.0%}"
    yield f"{found.exposed_fraction:.0%}"
    yield format_bytes(found.sent_bytes)
    yield "" if found.peak_bytes is None else format_bytes(found.peak_bytes)
    yield from ("" if math.isnan(loss) else f"{loss:.4g}" for loss in (found.loss, found.loss_at_equal_time))
