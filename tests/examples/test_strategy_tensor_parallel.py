import re

import pytest

from tests.examples.scripts import run_example

pytestmark = pytest.mark.slow


def test_tensor_parallel_script_shows_the_same_result_from_parts_of_layers(prewarmed, tmp_path):
    out = run_example(prewarmed, "strategy_tensor_parallel.py", tmp_path)
    bits = [float(value) for value in re.findall(r"([\d.]+) bits per character", out)]
    assert len(bits) == 3
    assert max(bits) - min(bits) < 1e-3  # float32 in another order, over ten steps
    alone, two, four = out.split("tensor=")[1:]
    assert "blocks.0.mlp_in.weight (192, 48): (192, 48)\n" in alone
    for shared in (two, four):
        assert "blocks.0.mlp_in.weight (192, 48): (96, 48) + (96, 48)\n" in shared
        assert "blocks.0.mlp_out.weight (48, 192): (48, 96) + (48, 96)\n" in shared
        assert "blocks.0.mlp_norm.weight (48,): (48,)\n" in shared
