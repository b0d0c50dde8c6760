import re

import pytest

from tests.examples.scripts import run_example

pytestmark = pytest.mark.slow


def test_rpc_model_script_gives_one_loss_on_any_number_of_sections(prewarmed, tmp_path):
    out = run_example(prewarmed, "strategy_rpc_model.py", tmp_path)
    losses = re.findall(r"(\d) section\(s\): loss ([\d.]+)", out)
    assert [number for number, _ in losses] == ["1", "2", "3"]
    assert len({loss for _, loss in losses}) == 1
    sent = [int(number.replace(",", "")) for number in re.findall(r"sends ([\d,]+) bytes", out)]
    batch, first, second, output = (64 * 4 * size for size in (64, 32 * 64, 64 * 16, 10))
    assert sent == [
        0,
        batch + first + output,
        output + first,
        2 * batch + first + output,
        second + first,
        output + second,
    ]
