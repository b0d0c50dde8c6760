"""diloco: for ranks so far apart that they can talk but once in hundreds of steps; an outer momentum makes up for it.

python examples/strategy_diloco.py
"""

from digits import Digits

import dure

if __name__ == "__main__":
    # the first epoch in step, then outer steps as far apart as an epoch; an evaluation averages the ranks too
    apart = {"average_every": 23, "warmup_steps": 23}
    settings = {"nproc": 2, "epochs": 6, "device": "cpu", "quiet": True, "eval_every_epochs": 3}
    for strategy in ("averaging", "diloco"):
        summary = dure.train(Digits(), strategy=strategy, **{strategy: apart}, **settings)
        curve = ", ".join(f"{row.metrics['accuracy'].value:.3f}" for row in summary.rows)
        print(f"{strategy}: accuracy every three epochs {curve}")
    # the outer step's own rate and momentum; 1 and 0 would be averaging
    half = {"outer_lr": 0.5, "outer_momentum": 0.5}
    gentle = dure.train(Digits(), strategy="diloco", diloco={**apart, **half}, **settings)
    print(f"diloco with half of both: accuracy {gentle.metrics['accuracy'].value:.3f}")
