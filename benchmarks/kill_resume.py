"""Kill everything, again and again, and go on another way: is it as if nothing had happened?

    python benchmarks/kill_resume.py --seconds 240

Each run is killed (SIGKILL to all its processes) at four random moments and resumed each time on a strategy and number
of devices drawn at random; two of five keep the first. Then the records must show each sample of each epoch exactly
once, and the weights must equal an undisturbed run's: to the bit where nothing was changed, to 1e-10 (float64)
otherwise. The first that is not so ends this script with an error.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.commands import Prewarmed, RunFiles
from tests.faults.test_kill_and_resume import BASE, PACE, TOLERANCE, Way, check_every_sample_once, undisturbed, weights

WAYS = [
    *(Way("ddp", nproc) for nproc in (1, 2, 3)),
    Way("single", 1),
    Way("dp", 2),
    Way("dp", 3),
    Way("balanced_dp", 2),
]
NUM_KILLS = 4


class Stress:
    """Runs, and what was seen of them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.prewarmed = Prewarmed()
        self.expected: dict[Any, Any] = {}
        self.seen = {"runs": 0, "kills": 0, "kills inside a save": 0, "step records undone": 0, "bit-equal": 0}
        self.worst = 0.0

    def route(self) -> list[Way]:
        """Draw how each leg of a run is executed."""
        if self.chance.random() < 0.4:
            return [self.chance.choice(WAYS)] * (NUM_KILLS + 1)
        return [self.chance.choice(WAYS) for _ in range(NUM_KILLS + 1)]

    def leg(
        self, folder: Path, run: RunFiles, way: Way, options: tuple[Any, ...], *, is_first: bool, is_last: bool
    ) -> None:
        """Start or resume, and kill unless it is the last leg."""
        begin = (*BASE, *options, *PACE[:2]) if is_first else ("train", "--resume", run.path)
        every = ("--checkpoint-every-samples", self.chance.choice([8, 24, 40]))
        before = len(run.events("training"))
        command = self.prewarmed.start(folder, *begin, *every, *way.flags)
        if is_last:
            assert command.wait() == 0, command.err
            return
        command.wait_for(lambda: len(run.events("training")) > before, "training")
        time.sleep(self.chance.uniform(0.0, 0.25))
        if command.code is None:
            command.send_to_all(signal.SIGKILL)
        self.seen["kills"] += command.wait() == -signal.SIGKILL
        self.seen["kills inside a save"] += bool(list(run.path.glob("checkpoints/.writing-*")))

    def run(self, folder: Path) -> None:
        """Take one run from its beginning to its end, and judge it."""
        folder.mkdir()
        route = self.route()
        options = ("--task.adam", self.chance.choice(["true", "false"]))
        if (route[-1], options) not in self.expected:
            self.expected[route[-1], options] = undisturbed(self.prewarmed, folder / "undisturbed", route[-1], *options)
        run = RunFiles(folder / "runs/run")
        for number, way in enumerate(route):
            self.leg(folder, run, way, options, is_first=number == 0, is_last=number == NUM_KILLS)
        check_every_sample_once(run)
        expected = self.expected[route[-1], options]
        pairs = [(tensor, expected[name]) for name, tensor in weights(self.prewarmed, folder).items()]
        difference = max((one - other).abs().max().item() for one, other in pairs)
        assert difference <= (0.0 if len(set(route)) == 1 else TOLERANCE), (route, difference)
        self.worst = max(self.worst, difference)
        undone = run.path / "undone.jsonl"
        self.seen["step records undone"] += len(undone.read_text().splitlines()) if undone.exists() else 0
        self.seen["bit-equal"] += difference == 0.0
        self.seen["runs"] += 1


def main() -> None:
    """Go on for so many seconds, then print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--seed", type=int, default=11)
    arguments = parser.parse_args()
    stress, end = Stress(arguments.seed), time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            stress.run(Path(folder) / str(stress.seen["runs"]))
    stress.prewarmed.close()
    for name, number in stress.seen.items():
        print(f"| {name} | {number} |")
    print(f"| largest difference of a weight | {stress.worst:.1e} |")


if __name__ == "__main__":
    main()
