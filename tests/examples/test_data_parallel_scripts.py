"""The scripts of the strategies that divide the batch: each prints the same loss for every way it shows."""

import functools
import re

import pytest

from tests.examples.scripts import run_example

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def printed(prewarmed, tmp_path_factory):
    return functools.cache(lambda name: run_example(prewarmed, f"strategy_{name}.py", tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", ["single", "dp", "balanced_dp", "ddp", "ring_ddp"])
def test_script_shows_the_same_loss_however_the_batch_is_divided(printed, name):
    losses = [float(number) for number in re.findall(r"loss ([\d.]+),", printed(name))]
    assert len(losses) >= 2
    # float32 sums in another order, amplified by seventy steps of AdamW
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-4)


def test_ring_ddp_script_shows_what_each_algorithm_sends(printed):
    sent = {
        line.partition(":")[0]: [int(n.replace(",", "")) for n in line.partition("per step ")[2].split(", ")]
        for line in printed("ring_ddp").splitlines()
    }
    assert sum(sent["naive"]) == 6 * sent["star"][1]
    assert sum(sent["star"]) == sum(sent["ring"]) == 4 * sent["star"][1]
    assert max(sent["ring"]) < max(sent["star"])


def test_naive_ddp_script_shows_that_it_computes_what_ddp_does(prewarmed, tmp_path):
    out = run_example(prewarmed, "strategy_naive_ddp.py", tmp_path)
    assert float(out.rpartition("differ by ")[2]) < 1e-4
