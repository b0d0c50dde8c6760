"""Verdicts of many cells at once, for whoever changes a strategy."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from dure.strategies.table import STRATEGIES
from tests.conformance.zoo.cell import reference_of, run_cell
from tests.conformance.zoo.feature import FEATURES
from tests.conformance.zoo.table import MARKS  # which registers all features


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--features", default=",".join(FEATURES))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--ways", default="straight")
    parser.add_argument("--all", action="store_true", help="show exact cells too")
    asked = parser.parse_args()
    for name in asked.features.split(","):
        feature = FEATURES[name]
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            try:
                reference = reference_of(feature, Path(folder))
            except Exception as error:
                print(f"{name} single: {str(error)[-600:]}", flush=True)
                continue
            marks = []
            for strategy in asked.strategies.split(","):
                for way in asked.ways.split(","):
                    verdict = run_cell(feature, strategy, way, reference, Path(folder))
                    marks.append({**MARKS, "exact": ".", "wrong": "W"}[verdict.kind])
                    if asked.all or verdict.kind == "wrong":
                        print(f"    {name} {strategy} {way}: {str(verdict)[:700]}", flush=True)
                    elif verdict.kind != "exact" and asked.ways == "straight":
                        print(f"    {name} {strategy} {way}: {str(verdict)[:150]}", flush=True)
                marks.append(" ")
            print(f"{name:24} {''.join(marks)} {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
