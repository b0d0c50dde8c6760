import re

import pytest

from tests.examples.scripts import run_example

pytestmark = pytest.mark.slow


def test_parameter_server_script_learns_at_either_pace_and_waits_less_at_its_own(prewarmed, tmp_path):
    out = run_example(prewarmed, "strategy_parameter_server.py", tmp_path)
    found = re.findall(r"([\w ]+): accuracy ([\d.]+), the fast worker waited (\d+)% .* up to (\d+) steps ahead", out)
    in_step, own_pace, bounded = ((float(right), int(waited), int(ahead)) for _, right, waited, ahead in found)
    assert min(in_step[0], own_pace[0], bounded[0]) > 0.9
    assert in_step[1] > own_pace[1]
    assert (in_step[2], bounded[2]) == (0, 3)
    assert own_pace[2] > 3
