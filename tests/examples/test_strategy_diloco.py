import re

import pytest

from tests.examples.scripts import run_example

pytestmark = pytest.mark.slow


def test_diloco_script_learns_the_digits_with_an_outer_step_an_epoch(prewarmed, tmp_path):
    out = run_example(prewarmed, "strategy_diloco.py", tmp_path)
    curves = [[float(number) for number in re.findall(r"0\.\d+", line)] for line in out.splitlines()]
    assert [len(curve) for curve in curves] == [2, 2, 1]
    assert all(curve[-1] > 0.95 for curve in curves)
