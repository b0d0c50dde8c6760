"""dp: one process, a thread per device. Nothing to launch; but parameters go out and outputs come back every microstep.

python examples/strategy_dp.py
"""

import json
from pathlib import Path

from digits import Digits

import dure

if __name__ == "__main__":
    for strategy in ("single", "dp"):
        num_devices = 1 if strategy == "single" else 2  # on a CPU the two are virtual
        summary = dure.train(Digits(), strategy=strategy, nproc=num_devices, epochs=3, device="cpu", quiet=True)
        step = json.loads(Path(summary.run, "rank0.jsonl").read_text().splitlines()[-1])
        print(
            f"{strategy} on {num_devices}: loss {summary.final_loss:.6f}, "
            f"accuracy {summary.metrics['accuracy'].value:.4f}, {step['sent_bytes']:,} bytes between devices in a step"
        )
