"""The campaign of random faults, shortened: some cases, in each part of CI others, in which every promise is kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "campaign.py"
NUM_CASES = 3
SEEDS = (68, 69, 70)
"""Seeds, as many as the parts into which CI divides the fault tests, so that each of its runs has some cases."""


@pytest.mark.faults
@pytest.mark.parametrize("seed", SEEDS)
def test_runs_when_a_random_fault_happens_to_each_then_no_promise_is_broken(seed, tmp_path):
    options = ["--cases", str(NUM_CASES), "--seed", str(seed), "--results", str(tmp_path)]
    command = [sys.executable, str(CAMPAIGN), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "campaign.json").read_text())
    assert record["counts"]["cases"] == NUM_CASES
    assert record["counts"]["faults that came in time"] >= NUM_CASES // 2
