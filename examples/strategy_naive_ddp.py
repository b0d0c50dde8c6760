"""naive_ddp: data parallelism with nothing clever in it, to read and to check the clever ones against.

python examples/strategy_naive_ddp.py
"""

from digits import Digits

import dure

if __name__ == "__main__":
    losses = {}
    for strategy in ("naive_ddp", "ddp"):
        summary = dure.train(Digits(), strategy=strategy, nproc=2, epochs=2, device="cpu", quiet=True)
        losses[strategy] = summary.final_loss
        waited = summary.seconds["sync"] / summary.steps
        print(f"{strategy}: loss {summary.final_loss:.6f}, {waited * 1e3:.2f} ms per step spent waiting for gradients")
    print(f"the losses differ by {abs(losses['naive_ddp'] - losses['ddp']):.1e}")
