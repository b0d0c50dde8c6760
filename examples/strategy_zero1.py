"""zero1: AdamW's state is twice the size of the weights, and of P ranks each needs to keep only 1/P of it.

python examples/strategy_zero1.py
"""

from pathlib import Path

from digits import Digits

import dure

if __name__ == "__main__":
    for strategy in ("ddp", "zero1"):
        summary = dure.train(Digits(), strategy=strategy, nproc=2, epochs=3, device="cpu", quiet=True)
        # every rank writes the part of the optimiser's state that it holds; under ddp all hold all, and rank 0 writes
        newest = max(Path(summary.run, "checkpoints").glob("samples-*"))
        held = {file.name: file.stat().st_size for file in sorted(newest.glob("optimizer*.safetensors"))}
        print(f"{strategy}: accuracy {summary.metrics['accuracy'].value:.3f}")
        for name, num_bytes in held.items():
            print(f"  {name} {num_bytes:,} bytes")
