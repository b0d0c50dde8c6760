"""fsdp: of P ranks each keeps 1/P of the weights, gradients and optimiser state, and borrows the rest block by block.

python examples/strategy_fsdp.py
"""

import json
from pathlib import Path

from char_gpt import CharGPT

import dure

TASK = CharGPT(layers=2, width=64, context=32)


def held_bytes(run: Path) -> dict[str, int]:
    """Every rank writes what it holds: its shards. Under ddp all hold all, and rank 0 writes."""
    newest = max((run / "checkpoints").glob("samples-*"))
    return {file.name: file.stat().st_size for file in sorted(newest.glob("*.safetensors")) if "rank" not in file.name}


if __name__ == "__main__":
    for name, options in {
        "ddp": {},
        "fsdp": {},  # blocks are freed after forward and gathered again for backward: ZeRO stage 3
        "fsdp, kept": {"reshard_after_forward": False},  # and here they stay until then: a third less is sent
        "fsdp, twice": {"activation_checkpointing": True},  # nor are activations kept: forward is computed twice
    }.items():
        strategy = name.partition(",")[0]
        summary = dure.train(
            TASK, strategy=strategy, nproc=2, samples=320, device="cpu", quiet=True, **{strategy: options}
        )
        run = Path(summary.run)
        sent = json.loads((run / "rank0.jsonl").read_text().splitlines()[-1])["sent_bytes"]
        print(f"{name}: {summary.metrics['bits_per_character'].value:.4f} bits per character, {sent:,} bytes a step")
        for file, num_bytes in held_bytes(run).items():
            print(f"  {file} {num_bytes:,} bytes")
