"""balanced_dp: dp whose first device, which also holds the optimiser's state, gets a smaller share of each batch.

python examples/strategy_balanced_dp.py
"""

from digits import Digits

import dure

if __name__ == "__main__":
    for share in (0.5, 0.25):
        summary = dure.train(
            Digits(),
            strategy="balanced_dp",
            balanced_dp={"device0_share": share},
            nproc=2,
            epochs=3,
            device="cpu",
            quiet=True,
        )
        print(
            f"{share:.0%} of each batch on device 0: loss {summary.final_loss:.6f}, "
            f"accuracy {summary.metrics['accuracy'].value:.4f}"
        )
