"""The table of verdicts as data, and the page that is made from it.

python -m tests.conformance.zoo.table            # run every cell, write verdicts.json and docs/what-works.md
python -m tests.conformance.zoo.table --page     # only make the page anew
"""

import argparse
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from dure.strategies.table import STRATEGIES
from tests.conformance.zoo import (  # noqa: F401 - each registers its features
    elsewhere,
    gradients_and_weights,
    later,
    libraries,
    optimizers,
    outputs_and_batches,
    schedules,
    state_and_randomness,
    usual_trainings,
    views_of_ranks,
)
from tests.conformance.zoo.cell import WAYS, Verdict, reference_of, run_cell
from tests.conformance.zoo.feature import FEATURES, Feature

VERDICTS = Path(__file__).with_name("verdicts.json")
PAGE = Path(__file__).parents[3] / "docs" / "what-works.md"
MARKS = {"exact": "✓", "declared": "≈", "refused": "✗"}

Row = dict[str, dict[str, str]]
"""Kind of verdict and its sentence, for each strategy."""

_INTRODUCTION = """# What works

Each row is a trait that a model or a task may have, each column a strategy, on two devices. A small task with that
trait is trained in float64 under the strategy, in some cells with a rank killed on the way, in the others stopped and
resumed. Its weights are compared with those of the undisturbed run of one process:

- ✓ **exact**: the same weights, to rounding (1e-10);
- ≈ **declared**: other weights, and the run's record says what differs and why (`not_preserved` in `summary.json`,
  shown at the end of `dure train`);
- ✗ **refused**: one sentence that says why and what to do instead, and exit code 2.

There is nothing else: no task is trained to other weights without a word. A trait that is not in this table is looked
for by trying the loss on a few samples before training, and is declared or refused just the same.

Find your model in the first table; then look for what is unusual about your loss, data or optimiser. Below each
table sentences say what differs, or what to do instead. `averaging` and `diloco` declare another trajectory
for every task. This page is generated (`python -m tests.conformance.zoo.table`), and `make zoo` runs every cell of it.
"""

_GROUPS = {
    "Architectures": "Models as libraries make them",
    "Outputs": "Outputs of the model",
    "Batches": "Batches",
    "Calls": "The loss, and how it calls the model",
    "Random numbers": "Random numbers",
    "Optimisers": "Optimisers",
    "Gradients": "Gradients",
    "Weights": "Weights that change otherwise than by the optimiser",
    "State": "State of the model and the task",
    "State elsewhere": "State and settings in other places",
    "Later": "Traits that show only after some steps or samples",
    "Ranks and copies": "Ranks, copies of the model, and hooks that come late",
}
"""Groups of features in the order of the page, and their headings."""


def is_available(feature: Feature) -> bool:
    """Return whether the library that a feature needs is installed."""
    return not feature.needs or importlib.util.find_spec(feature.needs) is not None


def ways_of(feature: Feature, strategy: str) -> tuple[str, ...]:
    """Return the ways in which a cell is run when all cells are.

    A run that was killed, or resumed, and comes to the undisturbed weights shows as much as an undisturbed one; of the
    two, cells take turns.
    """
    number = list(FEATURES).index(feature.name) + list(STRATEGIES).index(strategy)
    return (WAYS[1 + number % 2],)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict that says most against a cell."""
    order = ("exact", "declared", "refused", "wrong")
    return max(verdicts, key=lambda verdict: order.index(verdict.kind))


def read_verdicts() -> dict[str, Row]:
    """Return the table as it was last written."""
    return dict(json.loads(VERDICTS.read_text()))


def page(table: dict[str, Row]) -> str:
    """Return the page as Markdown."""
    parts = [_INTRODUCTION]
    for group, heading in _GROUPS.items():
        features = [feature for feature in FEATURES.values() if feature.group == group and feature.name in table]
        parts.append(f"\n## {heading}\n\n| | {' | '.join(STRATEGIES)} |\n|---|{'---|' * len(STRATEGIES)}\n")
        for feature in features:
            marks = (MARKS[table[feature.name][strategy]["kind"]] for strategy in STRATEGIES)
            parts.append(f"| {feature.title} | {' | '.join(marks)} |\n")
        notes = [_notes(feature, table[feature.name]) for feature in features]
        if any(notes):
            summary = "<summary>What is declared (≈) or refused (✗), and what to do instead</summary>"
            parts.append(f"\n<details>\n{summary}\n\n{''.join(notes)}\n</details>\n")
    return "".join(parts)


def _notes(feature: Feature, row: Row) -> str:
    """Return what is declared or refused in a row, each sentence once with the strategies that say it."""
    said: dict[tuple[str, str], list[str]] = {}
    for strategy in STRATEGIES:
        cell = row[strategy]
        if cell["kind"] != "exact" and (STRATEGIES[strategy].is_exact or cell["kind"] == "refused"):
            said.setdefault((cell["kind"], re.sub(rf"\b{strategy}\b", "…", cell["detail"])), []).append(strategy)
    lines = [f"  - {MARKS[kind]} {', '.join(names)}: {_escaped(text)}\n" for (kind, text), names in said.items()]
    return f"- *{feature.title}*\n{''.join(lines)}" if lines else ""


def _escaped(text: str) -> str:
    return text.splitlines()[0].replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def main() -> int:
    """Run all cells, or those asked for, and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--page", action="store_true", help="run nothing, make the page from the verdicts that are there"
    )
    parser.add_argument("--features", help="only these rows, by comma")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="only these columns, by comma")
    parser.add_argument("--every-way", action="store_true", help="undisturbed, killed and resumed for every cell")
    asked = parser.parse_args()
    table = read_verdicts() if VERDICTS.exists() else {}
    num_wrong = 0
    for name in [] if asked.page else (asked.features or ",".join(FEATURES)).split(","):
        feature = FEATURES[name]
        if not is_available(feature):
            print(f"{name}: {feature.needs} is not installed", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            reference = reference_of(feature, Path(folder))
            for strategy in asked.strategies.split(","):
                ways = WAYS if asked.every_way else ways_of(feature, strategy)
                verdict = worst(run_cell(feature, strategy, way, reference, Path(folder)) for way in ways)
                if verdict.kind == "wrong":
                    num_wrong += 1
                    print(f"{name} under {strategy}: {verdict}", flush=True)
                else:
                    table.setdefault(name, {})[strategy] = {"kind": verdict.kind, "detail": verdict.detail}
        _write(table)
    _write(table)
    return min(num_wrong, 1)


def _write(table: dict[str, Row]) -> None:
    ordered = {name: {s: table[name][s] for s in STRATEGIES if s in table[name]} for name in FEATURES if name in table}
    VERDICTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    if all(set(row) == set(STRATEGIES) for row in ordered.values()):
        PAGE.write_text(page(ordered))


if __name__ == "__main__":
    sys.exit(main())
