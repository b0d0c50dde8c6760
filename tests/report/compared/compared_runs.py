"""Rows of a comparison for tests of its page."""

from dure.report.comparison import MeasuredRun, Row, compare

HOSTILE = "</script><script>document.title = 'taken'</script>\x1b[2J"


def measured_run(
    rate: float, *, ranks: int = 1, not_preserved: tuple[str, ...] = (), slope: float = 1.0
) -> MeasuredRun:
    """Return a run of 40 steps of 8 samples."""
    seconds = 8 / rate
    parts = {"data": 0.1, "forward_backward": 0.5, "sync": 0.2, "optimizer": 0.1, "other": 0.1}
    return MeasuredRun(
        samples_per_second=rate,
        step_seconds=seconds,
        part_seconds={part: fraction * seconds for part, fraction in parts.items()},
        sent_bytes=1e6 * (ranks - 1),
        peak_bytes=300 * 2**20,
        losses=tuple((seconds * step, 2.0 / (1 + slope * step / 10)) for step in range(1, 41)),
        not_preserved=not_preserved,
        samples=tuple(8.0 * step for step in range(1, 41)),
        rank_peak_bytes={rank: (300 - 20 * rank) * 2**20 for rank in range(ranks)},
    )


def strategies() -> tuple[list[Row], dict[tuple[str, int], list[MeasuredRun]]]:
    """Return a comparison of strategies, one of which could not be measured."""
    declared = ("staleness: pushes are applied to weights of later steps", HOSTILE)
    runs = {
        ("single", 1): [measured_run(100.0), measured_run(110.0)],
        ("ddp", 2): [measured_run(170.0, ranks=2), measured_run(150.0, ranks=2)],
        ("averaging", 2): [measured_run(190.0, ranks=2, not_preserved=declared, slope=0.7)] * 2,
        ("fsdp", 2): [],
    }
    return compare(runs, {("fsdp", 2): f"no space left {HOSTILE}"}), runs


def scaling() -> tuple[list[Row], dict[tuple[str, int], list[MeasuredRun]]]:
    """Return a comparison of numbers of processes."""
    rates = {1: (100.0, 104.0), 2: (180.0, 170.0), 4: (210.0, 230.0)}
    runs = {("ddp", count): [measured_run(rate, ranks=count) for rate in each] for count, each in rates.items()}
    return compare(runs, {}), runs
