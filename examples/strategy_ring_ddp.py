"""ring_ddp: ddp with a reducer that can be looked into. The same result whichever way the gradients travel.

python examples/strategy_ring_ddp.py
"""

import json
from pathlib import Path

from digits import Digits

import dure

if __name__ == "__main__":
    for algorithm in ("naive", "star", "ring", "shm"):
        summary = dure.train(Digits(), strategy="ring_ddp", nproc=3, comm=algorithm, epochs=2, device="cpu", quiet=True)
        ranks = [Path(summary.run, f"rank{rank}.jsonl").read_text().splitlines()[-1] for rank in range(3)]
        sent = [json.loads(line)["sent_bytes"] for line in ranks]
        print(f"{algorithm}: loss {summary.final_loss:.6f}, bytes per step {', '.join(f'{count:,}' for count in sent)}")
