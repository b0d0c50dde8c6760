"""averaging (local SGD): for a slow link. Ranks train by themselves and talk every 16 steps instead of every step.

python examples/strategy_averaging.py
"""

import json
from pathlib import Path

from digits import Digits

import dure

if __name__ == "__main__":
    for strategy, options in (("ddp", {}), ("averaging", {"average_every": 16, "warmup_steps": 23})):
        summary = dure.train(
            Digits(), strategy=strategy, nproc=2, epochs=8, device="cpu", quiet=True, **{strategy: options}
        )
        lines = Path(summary.run, "rank0.jsonl").read_text().splitlines()
        sent = [json.loads(line)["sent_bytes"] for line in lines]
        print(
            f"{strategy}: accuracy {summary.metrics['accuracy'].value:.3f}, "
            f"{sum(sent) / 2**20:.1f} MiB sent by rank 0 in its steps, nothing in {sent.count(0)} of {len(sent)} steps"
        )
    # (an evaluation or a checkpoint, here once an epoch, averages too)
    # another trajectory than one device's: what that means stands in every summary
    print("\n".join(f"not preserved: {text}" for text in summary.not_preserved))
