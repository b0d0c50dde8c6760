import re

import pytest

from tests.examples.scripts import run_example

pytestmark = pytest.mark.slow


def test_fsdp_script_shows_that_each_rank_holds_half_and_what_the_settings_trade(prewarmed, tmp_path):
    out = run_example(prewarmed, "strategy_fsdp.py", tmp_path)
    found = re.findall(r"^(ddp|fsdp.*): ([\d.]+) bits per character, ([\d,]+) bytes a step", out, re.MULTILINE)
    bits = [float(value) for _, value, _ in found]
    assert max(bits) - min(bits) < 1e-3  # float32 in another order, over ten steps
    ddp, fsdp, kept, twice = (int(sent.replace(",", "")) for _, _, sent in found)
    assert ddp < fsdp == twice
    assert abs(kept - ddp) < 0.01 * ddp  # a gathering and a scattering are an all-reduce
    whole, *parts = ([int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes$", part, re.MULTILINE)]
                     for part in out.split("\nfsdp"))  # fmt: skip
    for held in parts:
        assert len(held) == 2 * len(whole)
        assert max(held) < 0.55 * max(whole)
