"""ddp: the first thing to try when the model fits one device. One process, two, three: the same result.

python examples/strategy_ddp.py
"""

from digits import Digits

import dure

if __name__ == "__main__":
    for num_processes in (1, 2, 3):
        summary = dure.train(Digits(), strategy="ddp", nproc=num_processes, epochs=3, device="cpu", quiet=True)
        print(
            f"{num_processes} process(es): loss {summary.final_loss:.6f}, "
            f"accuracy {summary.metrics['accuracy'].value:.4f}, {summary.samples_per_second:,.0f} samples/s"
        )
