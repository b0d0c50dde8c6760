"""pipeline: a GPT in stages. While one rank works on a microbatch, the other works on the one before it.

python examples/strategy_pipeline.py

Its price is the bubble, the time in which a rank waits: (P-1)/(V M + P-1) of a step with P ranks, V stages on each and
M microbatches, and what sending takes. More microbatches make it smaller, and interleaved stages, for more bytes.
"""

import json
from pathlib import Path
from statistics import median

from char_gpt import CharGPT
from torch import nn

import dure


class UntiedGPT(CharGPT):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        # one weight of the first block and the last could not be in two stages
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return model


if __name__ == "__main__":
    settings = {"nproc": 2, "device": "cpu", "global_batch_size": 16, "samples": 80, "quiet": True}
    for size, layout in (
        (16, {"schedule": "gpipe"}),
        (4, {"schedule": "gpipe"}),
        (4, {"schedule": "1f1b", "cuts": "blocks.3"}),
        (4, {"schedule": "interleaved"}),
    ):
        summary = dure.train(
            UntiedGPT(layers=4, width=48), strategy="pipeline", pipeline=layout, microbatch_size=size, **settings
        )
        steps = [json.loads(line) for line in Path(summary.run, "rank1.jsonl").read_text().splitlines()]
        idle = median(step["measured"]["bubble_fraction"] for step in steps)
        loss, sent = summary.metrics["loss"].value, steps[0]["sent_bytes"]
        print(f"{layout}, {size} at a time: loss {loss:.4f}, {idle:.0%} idle, {sent:,} bytes")
