import re

import pytest

from tests.examples.scripts import run_example

pytestmark = pytest.mark.slow


def test_averaging_script_learns_as_ddp_does_with_a_tenth_of_the_bytes(prewarmed, tmp_path):
    out = run_example(prewarmed, "strategy_averaging.py", tmp_path)
    found = re.findall(r"(\w+): accuracy ([\d.]+), ([\d.]+) MiB .* nothing in (\d+) of (\d+) steps", out)
    (_, by_ddp, ddp_sent, _, _), (_, averaged, sent, silent, steps) = found
    assert float(averaged) > 0.95
    assert float(by_ddp) > 0.95
    assert float(sent) < 0.2 * float(ddp_sent)
    # 23 steps in sync; of the 161 others every sixteenth averages
    assert (int(silent), int(steps)) == (161 - 10, 184)
    assert "not preserved: the trajectory" in out
