"""`dure bench`: cost of collectives on this machine, and messages of an algorithm."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from cyclopts import Parameter
from rich.table import Table

from dure.cli.output import JsonFlag
from dure.errors import Misuse
from dure.host.devices import resolve_device
from dure.records.link_costs import LinkCost, default_path
from dure.styled import draw, styled, styled_lines
from dure.terminal import print_json, print_text

if TYPE_CHECKING:
    from dure.comm.algorithms.base import ReduceOp

_SIZE_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens and the verb."""
    return tokens, bench


def bench(
    *,
    nproc: Annotated[int, Parameter(name=("--nproc", "--nproc-per-node"), help="processes of this host")] = 2,
    collectives: Annotated[
        str, Parameter(help="all_reduce, all_gather, reduce_scatter, broadcast, send_recv, or all of them: `all`")
    ] = "all_reduce",
    algorithms: Annotated[
        str | None,
        Parameter(
            help="of all_reduce, separated by commas: backend, ring, shm, naive, star, ...; or `all`",
            show_default=lambda _: "backend, ring and, on the CPU, shm",
        ),
    ] = None,
    min_bytes: Annotated[str, Parameter(help="smallest message, as 8, 4K or 1M")] = "8",
    max_bytes: Annotated[str, Parameter(help="largest message")] = "256M",
    factor: Annotated[float, Parameter(help="each size is so many times the one before")] = 4.0,
    dtype: Annotated[str, Parameter(help="float32, float64, float16, bfloat16 or int64")] = "float32",
    op: Annotated[str, Parameter(help="sum, mean or max")] = "sum",
    warm_up: Annotated[int, Parameter(help="calls before each measurement")] = 2,
    device: Annotated[str, Parameter(help="auto, cpu, or the kind of torch's accelerator: cuda, xpu, ...")] = "auto",
    backend: Annotated[str, Parameter(help="auto, gloo, cpu:dure_shm, or that of the device, as nccl")] = "auto",
    explain: Annotated[
        str | None,
        Parameter(help="show message by message what an algorithm sends, and measure nothing", show_default=False),
    ] = None,
    elements: Annotated[int, Parameter(help="length of the vector that --explain sends")] = 8,
    record: Annotated[
        Path | None, Parameter(help="where costs are kept for planning", show_default=lambda _: str(default_path()))
    ] = None,
    no_record: Annotated[
        bool, Parameter(name="--no-record", negative=(), show_default=False, help="keep nothing")
    ] = False,
    plot: Annotated[
        Path | None, Parameter(help="draw bus bandwidth over size into an .svg, .png or .pdf", show_default=False)
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Measure collectives between processes of this host, and fit what a link costs.

    The columns are those of nccl-tests. Times are those of the slowest rank. algbw is bytes over time, busbw the
    bandwidth of each link, #wrong the number of incorrect elements. A line alpha + beta * bytes is fitted and kept for
    planning.
    """
    from dure.api import bench as library

    if explain is not None:
        library.check(library.BenchSettings(nproc=nproc, algorithms=(explain,), op=op))
        for line in library.explain(explain, world_size=nproc, num_elements=elements, op=cast("ReduceOp", op)):
            print_text(line)
        return
    if plot is not None:
        from dure.report.bench_plot import check_plot

        check_plot(plot)
    settings = library.BenchSettings(
        nproc=nproc,
        collectives=_listed(collectives, library.COLLECTIVES),
        algorithms=None if algorithms is None else _listed(algorithms, library.algorithms_of(resolve_device(device))),
        min_bytes=_size("--min-bytes", min_bytes),
        max_bytes=_size("--max-bytes", max_bytes),
        factor=factor,
        dtype=dtype,
        op=op,
        warm_up=warm_up,
        device=device,
        backend=backend,
    )
    path = None if no_record else record or default_path()
    try:
        result = library.bench(settings, record=path)
    except library.MeasurementFailed as failure:
        if failure.rows:
            draw(_table(failure.rows))
        raise
    if plot is not None:
        from dure.report.bench_plot import draw_plot

        draw_plot(plot, result.rows, result.costs)
    if json:
        print_json({**result.to_json(), "record": None if path is None else str(path)})
        return
    draw(_table(result.rows))
    draw(_costs(result.costs))
    if path is not None:
        draw(styled(f"kept in {path}", "dim"))


def _listed(words: str, known: Sequence[str]) -> tuple[str, ...]:
    return tuple(known) if words == "all" else tuple(word.strip() for word in words.split(",") if word.strip())


def _size(flag: str, text: str) -> int:
    number, unit = text.rstrip("kKmMgGbBi"), text.lower().rstrip("b").rstrip("i")[-1:]
    try:
        return int(float(number) * _SIZE_UNITS[unit if unit.isalpha() else ""])
    except (ValueError, OverflowError, KeyError):
        raise Misuse(f"{flag} is {text!r} but must be a number of bytes, such as 8, 4K or 256M") from None


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("collective", style="cyan", no_wrap=True, min_width=10)
    table.add_column("algorithm", style="cyan", no_wrap=True, min_width=7)
    for name in ("bytes", "count"):
        table.add_column(name, justify="right")
    table.add_column("type")
    table.add_column("redop")
    for name in ("time us", "algbw GB/s", "busbw GB/s", "#wrong"):
        table.add_column(name, justify="right")
    before = None
    for row in rows:
        if before is not None and (row["collective"], row["algorithm"]) != before:
            table.add_row()
        before = row["collective"], row["algorithm"]
        wrong = str(row["num_wrong"])
        table.add_row(
            row["collective"], row["algorithm"], f"{row['num_bytes']}", f"{row['count']}", row["dtype"], row["op"],
            f"{row['seconds'] * 1e6:.1f}", f"{row['algorithm_bytes_per_second'] / 1e9:.3f}",
            f"{row['bus_bytes_per_second'] / 1e9:.3f}", wrong if wrong == "0" else styled(wrong, "red"),
        )  # fmt: skip
    return table


def _costs(costs: Sequence[LinkCost]) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
        title=styled_lines("\nwhat a link costs: alpha + beta * bytes", "italic"),
    )
    table.title_justify = "left"
    for name, side in (
        ("link", "left"), ("collective", "left"), ("algorithm", "left"), ("ranks", "right"), ("alpha us", "right"),
        ("beta ns/KiB", "right"), ("1/beta GB/s", "right"), ("off by", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for cost in costs:
        beta = cost.beta_seconds_per_byte
        table.add_row(
            cost.link, cost.collective, cost.algorithm, str(cost.world_size), f"{cost.alpha_seconds * 1e6:.1f}",
            f"{beta * 1024e9:.1f}", "-" if beta == 0 else f"{1e-9 / beta:.2f}", f"{cost.relative_error:.0%}",
        )  # fmt: skip
    return table
