"""Cost of a snapshot in memory after every step, as a part of the step: with and without, in turns within one run.

    python benchmarks/snapshots.py                      two ranks, the tiny and the deep model; about nine minutes
    python benchmarks/snapshots.py --model tiny         steps of 20 ms alone; two minutes

Turns of some steps each come in random order, the same on both ranks: with a snapshot after each step, without, and
without once more (the A/A pair that shows the noise). A turn lasts from one boundary between steps to another.

Both models wait 18 ms before each batch. The tiny one's step takes 20 ms then, for which the bound is; the deep one's
is longer.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paced import Paced
from paired import HERE, compare, describe_surroundings, random_rounds, surroundings, write_results

import dure
from dure.training.run_state.snapshot_policy import MemorySaver

PLAIN, AGAIN, SNAPSHOTS = "no snapshots", "no snapshots, once more", "a snapshot after each step"
BATCH = 128
WARM_UP = 30
BOUND_FRACTION = 0.02
"""Fraction of a step of 20 ms (the tiny model's) that a snapshot may take."""
HEAD = "| | ms per step | difference, us | ratio, median | ratio, middle half |\n|---|---|---|---|---|\n"


def main() -> None:
    """Measure each model, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", "deep"], action="append")
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--block", type=int, default=20, help="steps of a turn")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    record: dict[str, Any] = {**surroundings(), "rounds": options.rounds, "block": options.block, "models": {}}
    page = [f"# Snapshots in memory\n\n{describe_surroundings(record)}\n"]
    for model in options.model or ["tiny", "deep"]:
        values, taking = measured(model, options.rounds, options.block)
        rows = [asdict(row) for row in compare(values, PLAIN)]
        record["models"][model] = {"rows": rows, "take_us": taking}
        lines = [
            f"| {row['name']} | {1e3 * row['median']:.2f} | {1e6 * row['difference']:+.0f} | {row['ratio']:.4f} | "
            f"{row['ratio_low']:.4f} to {row['ratio_high']:.4f} |\n"
            for row in rows
        ]
        page.append(
            f"The {model} model, two ranks under ddp, {options.rounds} rounds of turns of {options.block} steps. "
            f"Taking one lasts {taking:.0f} us on the first rank (median).\n\n{HEAD}{''.join(lines)}"
        )
        if model == "tiny":
            cost = next(row["ratio"] for row in rows if row["name"] == SNAPSHOTS) - 1
            verdict = "kept" if cost <= BOUND_FRACTION else "not kept"
            page.append(f"The bound of {BOUND_FRACTION:.0%} of this step is {verdict}: {cost:.2%}.\n")
    write_results(options.results, "snapshots", record, "\n".join(page))


def measured(model: str, num_rounds: int, block: int) -> tuple[dict[str, list[float]], float]:
    """Return each turn's seconds per step by its name, on the first rank, and the median microseconds of a snapshot."""
    with tempfile.TemporaryDirectory(prefix="dure-snapshots-") as name:
        folder = Path(name)
        is_due, take = MemorySaver.is_due, MemorySaver.take
        turns = Turns(num_rounds, block, is_due, take, folder / "turns.json")
        MemorySaver.is_due, MemorySaver.take = turns.is_due, turns.take  # type: ignore[method-assign]
        try:
            steps = WARM_UP + (3 * num_rounds + 1) * block
            dure.train(
                Paced(model=model), strategy="ddp", nproc=2, global_batch_size=BATCH, samples=steps * BATCH,
                snapshot_every=1, start="fork", device="cpu", threads=1, quiet=True, runs_dir=folder, name="run",
                eval_every_epochs=1e6,
            )  # fmt: skip
        finally:
            MemorySaver.is_due, MemorySaver.take = is_due, take  # type: ignore[method-assign]
        found = json.loads((folder / "turns.json").read_text())
    return found["seconds"], found["take_us"]


class Turns:
    """Decides at each boundary, instead of the saver, whether there is a snapshot; inherited by the forked ranks."""

    def __init__(
        self,
        num_rounds: int,
        block: int,
        asks: Callable[[MemorySaver], bool],
        takes: Callable[[MemorySaver, Callable[[], None]], None],
        out: Path,
    ) -> None:
        self._turns = [name for _, name in random_rounds([PLAIN, AGAIN, SNAPSHOTS], num_rounds, seed=0)]
        self._block, self._asks, self._takes, self._out = block, asks, takes, out
        self._count = 0
        self._begun = 0.0
        self._seconds: dict[str, list[float]] = {PLAIN: [], AGAIN: [], SNAPSHOTS: []}
        self._taking: list[float] = []

    @property
    def is_due(self) -> Callable[[MemorySaver], bool]:
        """A method in the place of the saver's."""
        return lambda saver: self._is_due(saver)

    @property
    def take(self) -> Callable[[MemorySaver, Callable[[], None]], None]:
        """A method in the place of the saver's."""
        return lambda saver, settle: self._take(saver, settle)

    def _is_due(self, saver: MemorySaver) -> bool:
        number, step_of_turn = divmod(self._count - WARM_UP, self._block)
        self._count += 1
        if number < 0:
            return self._asks(saver)
        if step_of_turn == 0:
            now = time.perf_counter()
            if number > 0 and number <= len(self._turns):
                self._seconds[self._turns[number - 1]].append((now - self._begun) / self._block)
            self._begun = now
            if number == len(self._turns) and saver.session.group.rank == 0:
                found = {"seconds": self._seconds, "take_us": 1e6 * statistics.median(self._taking)}
                self._out.write_text(json.dumps(found))
        return number < len(self._turns) and self._turns[number] == SNAPSHOTS and self._asks(saver)

    def _take(self, saver: MemorySaver, settle: Callable[[], None]) -> None:
        begun = time.perf_counter()
        self._takes(saver, settle)
        self._taking.append(time.perf_counter() - begun)


if __name__ == "__main__":
    main()
