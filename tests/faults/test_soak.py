"""The soak, shortened: faults one after another, and the run is as if there had been none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.faults
def test_run_when_ranks_fail_again_and_again_then_nothing_is_lost_and_nothing_is_left(tmp_path):
    command = [sys.executable, str(SOAK), "--seconds", "12", "--every", "2.5", "--results", str(tmp_path)]
    # how much of the time trains is for `make soak` to say: a machine with other work on it is slower
    run = subprocess.run([*command, "--least-effective", "0"], capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads((tmp_path / "soak.json").read_text())
    assert sum(record["faults"].values()) >= 3
    assert record["same_weights"]
