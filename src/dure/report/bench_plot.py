"""Plot of bus bandwidth and time over message size."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dure.errors import EnvironmentLacks, Misuse
from dure.records.link_costs import LinkCost

_COLORS = [f"tab:{name}" for name in ("blue", "orange", "green", "red", "purple", "brown", "pink", "gray", "olive")] + [
    *("tab:cyan", "black", "gold", "navy"),
]

FORMATS = (".svg", ".png", ".pdf")


def check_plot(path: Path) -> None:
    """Refuse, before anything is measured, a plot that could not be drawn.

    Raises:
        Misuse: The format is not supported, or the folder does not exist.
        EnvironmentLacks: matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise Misuse(f"--plot {path} has the ending {path.suffix or 'none'}: use one of {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise Misuse(f"--plot {path}: there is no folder {path.parent}; make it first")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise EnvironmentLacks(
            "matplotlib is not installed, but --plot draws with it: pip install 'dure[plot]'"
        ) from None


def draw_plot(path: Path, rows: Sequence[Mapping[str, Any]], costs: Sequence[LinkCost]) -> None:
    """Draw measured times with the fitted lines, and bus bandwidth, over message size.

    Args:
        path: Path of the plot; its suffix is the format.
        rows: Rows of `dure.api.bench.BenchResult`.
        costs: Fitted lines.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    times, speeds = figure.subplots(1, 2)
    for axes in (times, speeds):
        axes.set_prop_cycle(color=_COLORS)
    fitted = {(cost.collective, cost.algorithm): cost for cost in costs}
    names = list(dict.fromkeys((row["collective"], row["algorithm"]) for row in rows))
    for name in names:
        mine = [row for row in rows if (row["collective"], row["algorithm"]) == name]
        sizes = [row["num_bytes"] for row in mine]
        label = name[1] if name[0] == "all_reduce" else name[0]
        (line,) = times.loglog(sizes, [row["seconds"] * 1e6 for row in mine], "o", markersize=4, label=label)
        if name in fitted:
            cost = fitted[name]
            predicted = [(cost.alpha_seconds + cost.beta_seconds_per_byte * size) * 1e6 for size in sizes]
            times.loglog(sizes, predicted, "-", color=line.get_color(), linewidth=1)
        speeds.semilogx(sizes, [row["bus_bytes_per_second"] / 1e9 for row in mine], "o-", markersize=4, label=label)
    times.set(xlabel="bytes", ylabel="time, us (dots measured, lines fitted)")
    speeds.set(xlabel="bytes", ylabel="bus bandwidth, GB/s", ylim=(0, None))
    for axes in (times, speeds):
        axes.grid(visible=True, alpha=0.3)
    handles, labels = times.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.savefig(path)
