"""A training step at world 2, gradients by shared memory, beside a flat gloo loop by hand and torch's DDP.

    python benchmarks/training_step.py                three models, about six minutes

Writes benchmarks/results/training_step.md and .json. Bounds: 0.50, 0.80 and 0.75 of the loop by hand on the tiny, the
102-tensor and the 6-million-parameter model, and below torch's DDP (bucket view, static graph) in all three.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import step_models
import step_overhead
from paired import HERE, compare, describe_surroundings, surroundings, write_results

HEAD = "| | us per step | ratio to the loop by hand, median | middle half |\n|---|---|---|---|\n"
BLOCKS = {"tiny": 50, "deep": 10, "wide": 5}
"""Steps of a turn: about 30 ms of each."""


def main() -> None:
    """Measure what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=step_models.NAMES, action="append")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    record: dict[str, Any] = {**surroundings(), "rounds": options.rounds, "parts": {}}
    page = [f"# A training step at world 2\n\n{describe_surroundings(record)}\n"]
    for model in options.only or step_models.NAMES:
        values = step_overhead.measure(
            2, num_rounds=options.rounds, block=BLOCKS[model], model=model, strategy="ring_ddp"
        )
        rows = [asdict(row) for row in compare(values, step_overhead.BASELINE)]
        record["parts"][model] = {"rows": rows}
        lines = [
            f"| {'dure, ring_ddp over shm' if row['name'] == 'dure' else row['name']} | {row['median']:.0f} | "
            f"{row['ratio']:.3f} | {row['ratio_low']:.3f} to {row['ratio_high']:.3f} |\n"
            for row in sorted(rows, key=lambda row: row["ratio"])
        ]
        count = len(list(step_models.build_model(model).parameters()))
        page.append(f"## {model}: {count} tensors\n\n{HEAD}{''.join(lines)}")
    write_results(options.results, "training_step", record, "\n".join(page))


if __name__ == "__main__":
    main()
