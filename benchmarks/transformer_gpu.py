"""Words per second of a GPT's training on one GPU: dure beside a hand-tuned loop.

    python benchmarks/transformer_gpu.py
    python benchmarks/transformer_gpu.py --width 2048 --batch 8 --compile --no-repeat    # 1.3 billion parameters

Both take the same words from host memory, alternately in one process. Writes transformer_gpu.md and .json, of compiled
models transformer_gpu_compiled.md and .json, to benchmarks/results, or to $OUT. Exits 3 where there is no CUDA device,
1 where dure is below 0.98 of the hand-tuned loop.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import transformer_task
from paired import HERE, compare, describe_surroundings, surroundings, write_results
from resnet50_gpu import AGAIN, HAND, LEAST_RATIO, Rates, alternate, copied_ahead, num_steps, table
from torch import Tensor, nn
from transformer_task import GPT

from dure.spec import RunSpec


def hand_tuned(words: Tensor, options: argparse.Namespace, device: torch.device) -> Callable[[int], None]:
    """bf16 autocast, fused AdamW, batches pinned and copied ahead in a stream of their own."""
    torch.manual_seed(0)
    model: nn.Module = GPT(options.width, options.layers, options.heads, options.context, options.vocabulary).to(device)
    optimizer = transformer_task.build_optimizer(model)
    if options.compile:
        model.compile()
    batches = copied_ahead(_batches(words, options.batch), device)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            (batch,) = next(batches)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = transformer_task.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def _batches(words: Tensor, batch_size: int) -> Iterator[tuple[Tensor]]:
    while True:
        for rows in torch.randperm(len(words)).split(batch_size):
            yield (words.index_select(0, rows),)


def measure(options: argparse.Namespace, folder: Path) -> Rates:
    """Measure each candidate's words per second."""
    sizes = {name: getattr(options, name) for name in ("width", "layers", "heads", "context", "vocabulary")}
    samples = num_steps(options) * options.batch
    spec = RunSpec(
        task=f"{HERE / 'transformer_task.py'}:Text",
        task_options={**sizes, "rows": samples + 1},
        samples=samples,
        global_batch_size=options.batch,
        strategy="single",
        device=options.device,
        precision="bf16",
        compile=options.compile,
        quiet=True,
    )

    def candidates(device: torch.device) -> dict[str, Callable[[int], None]]:
        words = transformer_task.random_words(samples, options.context, options.vocabulary)
        return {name: hand_tuned(words, options, device) for name in (HAND, AGAIN)[: options.loops]}

    return alternate(spec, options.batch * options.context, candidates, options, folder)


def parser() -> argparse.ArgumentParser:
    """Return the options; the defaults are for a GPU with 40 GiB or more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("batch", 16), ("width", 1024), ("layers", 24), ("heads", 16), ("context", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", type=int, default=10, help="steps of a block")
    parser.add_argument("--compile", action="store_true", help="both compile the model")
    parser.add_argument(
        "--no-repeat", dest="loops", action="store_const", const=1, default=2,
        help="leave out the second hand-tuned loop, which takes as much memory as the first",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda", help="cpu only tries the script out")
    parser.add_argument("--results", type=Path, default=Path(os.environ.get("OUT") or HERE / "results"))
    return parser


def run(arguments: list[str] | None = None) -> int:
    """Measure and write the page; return the exit code."""
    options = parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("transformer_gpu: there is no CUDA device here", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory(prefix="dure-transformer-") as folder:
        rates = measure(options, Path(folder))
    rows = {row.name: row for row in compare(rates.per_second, HAND)}
    is_fast = rows["dure"].ratio >= LEAST_RATIO
    record = {**surroundings(), "rows": [asdict(row) for row in rows.values()], "cores": rates.cores}
    page = (
        f"# A {'compiled ' if options.compile else ''}GPT on one GPU\n\n{describe_surroundings(record)}\n\n"
        f"{options.layers} blocks of width {options.width}, batches of {options.batch} rows of {options.context} "
        f"words, {options.rounds} rounds of {options.block} steps each in random order. dure at least {LEAST_RATIO} of "
        f"the hand-tuned loop: {'yes' if is_fast else 'NO'}.\n\n"
        f"{table(rows.values(), rates.cores, 'words/s')}"
    )
    write_results(options.results, f"transformer_gpu{'_compiled' if options.compile else ''}", record, page)
    return 0 if is_fast else 1


if __name__ == "__main__":
    sys.exit(run())
