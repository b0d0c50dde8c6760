"""single: what every other strategy is held to. The same run with smaller microbatches ends with the same weights.

python examples/strategy_single.py
"""

from digits import Digits

import dure

if __name__ == "__main__":
    for microbatch_size in (None, 8):
        summary = dure.train(
            Digits(), strategy="single", epochs=3, microbatch_size=microbatch_size, device="cpu", quiet=True
        )
        at_once = "64 samples at once" if microbatch_size is None else f"{microbatch_size} samples at a time"
        print(f"{at_once}: loss {summary.final_loss:.6f}, accuracy {summary.metrics['accuracy'].value:.4f}")
