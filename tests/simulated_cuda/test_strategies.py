"""Strategies on simulated devices: the weights of the CPU's one-process run, undisturbed, killed, resumed."""

from pathlib import Path

import pytest

import dure
from dure.errors import WorkerFailed
from dure.strategies.table import STRATEGIES
from tests.conformance.cases import TO_ROUNDING, is_layered, largest_difference, train_case, weights_of
from tests.conformance.tasks import Regression

pytestmark = pytest.mark.simulated

STEPS = {"global_batch_size": 7, "samples": 70, "clip_norm": 0.4, "seed": 5}
EXACT = [name for name, info in STRATEGIES.items() if info.is_exact]


def check_weights(folder: Path, strategy: str, way: str) -> None:
    """Train on devices with a rank killed in the sixth step, and compare with an undisturbed process on the CPU."""
    layered = is_layered(strategy)
    task = Regression(kind="tokens", optimizer="adamw", layered=layered)
    expected = weights_of(train_case(folder, task, **STEPS))
    nproc = 2 if STRATEGIES[strategy].many_devices else 1
    faults = folder / "faults.toml"
    rank = 0 if STRATEGIES[strategy].one_process else nproc - 1
    faults.write_text(f'[[fault]]\nrank = {rank}\nstep = 6\nkind = "kill"\n')
    settings = {"device": "cuda", "num_workers": 1, "microbatch_size": 2, "faults": faults, **STEPS}
    if way == "restarted":
        run = train_case(folder, task, strategy, nproc, snapshot_every=1, max_restarts=3, **settings)
    else:
        runs = folder / "stopped"
        with pytest.raises(WorkerFailed, match="was killed"):
            train_case(runs, task, strategy, nproc, checkpoint={"every_samples": 7}, **settings)
        [stopped] = runs.iterdir()
        run = Path(dure.train(task, resume=stopped, device="cpu", quiet=True).run)
    assert largest_difference(weights_of(run), expected) < TO_ROUNDING


@pytest.mark.parametrize("way", ["restarted", "resumed on the CPU"])
@pytest.mark.parametrize("strategy", EXACT)
def test_weights_on_devices_are_those_of_the_cpu(strategy, way, simulated_devices, tmp_path):
    simulated_devices.call(check_weights, tmp_path, strategy=strategy, way=way)
