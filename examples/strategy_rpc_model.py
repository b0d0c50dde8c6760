"""rpc_model: a model in sections on several processes, run from one place like a model that is not.

python examples/strategy_rpc_model.py

Rank 0 has the data and calls the other sections by torch RPC; backward and the optimiser's step go to where the
parameters are. One section works at a time: `pipeline` is faster, and needs the data on every rank.
"""

import json
from pathlib import Path

from digits import Digits

import dure

if __name__ == "__main__":
    for cuts in (None, "2", "2,5"):
        num_ranks = 1 if cuts is None else 2 + cuts.count(",")
        summary = dure.train(
            Digits(),
            strategy="rpc_model",
            rpc_model={"cuts": cuts},
            nproc=num_ranks,
            epochs=1,
            device="cpu",
            quiet=True,
        )
        print(f"{num_ranks} section(s): loss {summary.metrics['loss'].value:.4f}")
        for rank in range(num_ranks):
            first = json.loads(Path(summary.run, f"rank{rank}.jsonl").read_text().splitlines()[0])
            print(f"  rank {rank} sends {first['sent_bytes']:,} bytes a step")
