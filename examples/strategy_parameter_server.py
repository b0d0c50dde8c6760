"""parameter_server: for workers of uneven speed. In step all wait for the slowest; at their own pace none does.

python examples/strategy_parameter_server.py

The price is staleness: a gradient is of weights that others have changed meanwhile. The option `staleness` bounds it.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from digits import Digits
from torch import Tensor, nn

import dure


class Uneven(Digits):
    """Worker 1 has the slower machine."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.02 if os.environ.get("RANK") == "1" else 0.005)
        return super().loss(model, batch)


if __name__ == "__main__":
    for pace, chosen in (("in step", {}), ("own pace", {"sync": False}), ("bounded", {"sync": False, "staleness": 3})):
        options = {"servers": 1, **chosen}
        summary = dure.train(
            Uneven(), strategy="parameter_server", parameter_server=options, nproc=2, epochs=4, device="cpu", quiet=True
        )
        steps = [json.loads(line) for line in Path(summary.run, "rank0.jsonl").read_text().splitlines()]
        waited = sum(step["sync_seconds"] + step["optimizer_seconds"] for step in steps)
        waited /= sum(step["wall_seconds"] for step in steps)
        ahead = max(step.get("measured", {}).get("steps_ahead", 0.0) for step in steps)
        print(
            f"{pace}: accuracy {summary.metrics['accuracy'].value:.3f}, the fast worker waited "
            f"{waited:.0%} of the time and was up to {ahead:.0f} steps ahead"
        )
