import re

import pytest

from tests.examples.scripts import run_example

pytestmark = pytest.mark.slow


def test_zero1_script_shows_that_each_rank_holds_about_half_of_what_ddp_holds(prewarmed, tmp_path):
    out = run_example(prewarmed, "strategy_zero1.py", tmp_path)
    ddp, zero1 = out.split("zero1:")
    (whole,) = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes", ddp)]
    parts = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes", zero1)]
    assert len(parts) == 2
    # the largest of six tensors is two thirds of the model: whole tensors are dealt out
    assert max(parts) < 0.7 * whole
    assert ddp.splitlines()[0].removeprefix("ddp") == f":{zero1.splitlines()[0]}"
