"""tensor_parallel: the layers themselves are divided, over ranks that work on the same samples.

python examples/strategy_tensor_parallel.py
"""

import json
from pathlib import Path

from char_gpt import CharGPT

import dure
from dure.training.checkpoints.reader import verify

TASK = CharGPT(layers=1, width=48, context=32)

if __name__ == "__main__":
    for nproc, mesh in ((1, "tensor=1"), (2, "tensor=2"), (4, "data=2,tensor=2")):
        summary = dure.train(
            TASK, strategy="tensor_parallel", nproc=nproc, mesh=mesh, samples=320, device="cpu", quiet=True
        )
        run = Path(summary.run)
        sent = json.loads((run / "rank0.jsonl").read_text().splitlines()[-1])["sent_bytes"]
        bits = summary.metrics["bits_per_character"].value
        print(f"{mesh}: {bits:.4f} bits per character, {sent:,} bytes a step from rank 0")
        for name, tensor in verify(max((run / "checkpoints").glob("samples-*"))).model.items():
            # one piece for each rank of a tensor group; what has no rule (norms) and the biases that are added last
            # are whole on all of them
            print(f"  {name} {tensor.shape}: {' + '.join(str(piece.sizes) for piece in tensor.pieces)}")
