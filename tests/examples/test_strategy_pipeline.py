import re

import pytest

from tests.examples.scripts import run_example

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
def test_pipeline_script_gives_one_loss_in_every_layout_and_more_bytes_when_interleaved(prewarmed, tmp_path):
    out = run_example(prewarmed, "strategy_pipeline.py", tmp_path)
    losses = re.findall(r"loss ([\d.]+),", out)
    assert len(losses) == 4
    assert len(set(losses)) == 1
    sent = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes", out)]
    activations = 16 * 64 * 48 * 4  # samples, characters, width: over one cut forward, or back
    assert sent == [activations, activations, activations, 3 * activations]
    assert all(0 <= int(percent) < 100 for percent in re.findall(r"(\d+)% idle", out))
