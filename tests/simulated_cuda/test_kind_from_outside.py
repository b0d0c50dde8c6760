"""Strategies on devices of a kind from outside torch: the weights of the CPU's one-process run, or one sentence."""

from pathlib import Path

import pytest

import dure
from dure.errors import WorkerFailed
from dure.strategies.table import STRATEGIES
from tests.conformance.cases import TO_ROUNDING, is_layered, largest_difference, train_case, weights_of
from tests.conformance.tasks import Regression
from tests.simulated_cuda.devices import BUILD_SECONDS

pytestmark = [pytest.mark.simulated, pytest.mark.timeout(BUILD_SECONDS)]

KIND = "fieldgpu"
STEPS = {"global_batch_size": 7, "samples": 70, "clip_norm": 0.4, "seed": 5}
EXACT = [name for name, info in STRATEGIES.items() if info.is_exact]


def killed_at(folder: Path, rank: int) -> Path:
    """Write the file of a fault in the sixth step."""
    faults = folder / f"faults{rank}.toml"
    faults.write_text(f'[[fault]]\nrank = {rank}\nstep = 6\nkind = "kill"\n')
    return faults


def check_weights(folder: Path, strategy: str, way: str) -> None:
    """Train on devices with a rank killed, and compare with an undisturbed process on the CPU."""
    task = Regression(kind="tokens", optimizer="adamw", layered=is_layered(strategy))
    expected = weights_of(train_case(folder, task, **STEPS))
    nproc = 2 if STRATEGIES[strategy].many_devices else 1
    faults = killed_at(folder, 0 if STRATEGIES[strategy].one_process else nproc - 1)
    settings = {"num_workers": 1, "microbatch_size": 2, "faults": faults, **STEPS}
    devices = {"restarted": KIND, "to the CPU": KIND, "from the CPU": "cpu"}
    if way == "restarted":
        run = train_case(folder, task, strategy, nproc, snapshot_every=1, max_restarts=3, device=KIND, **settings)
    else:
        runs = folder / "stopped"
        settings |= {"device": devices[way], "checkpoint": {"every_samples": 7}}
        with pytest.raises(WorkerFailed, match="was killed"):
            train_case(runs, task, strategy, nproc, **settings)
        [stopped] = runs.iterdir()
        then = "cpu" if devices[way] == KIND else KIND
        run = Path(dure.train(task, resume=stopped, device=then, quiet=True).run)
    assert largest_difference(weights_of(run), expected) < TO_ROUNDING


@pytest.mark.parametrize("way", ["restarted", "to the CPU", "from the CPU"])
@pytest.mark.parametrize("strategy", EXACT)
def test_weights_on_devices_from_outside_are_those_of_the_cpu(strategy, way, devices_from_outside, tmp_path):
    devices_from_outside.call(check_weights, tmp_path, strategy=strategy, way=way)
