"""Cost of `dure run --record`, as a part of a script's step: recorded and not, in turns within one run.

    python benchmarks/recording.py     two ranks of DistributedDataParallel, steps of 20 ms; two minutes

Turns of some steps each come in random order, the same on both ranks: recorded, not recorded, and not recorded once
more (the A/A pair that shows the noise). In turns that are not recorded, torch's own functions are in place, and the
two hooks of the optimiser return at once.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paired import HERE, compare, describe_surroundings, random_rounds, surroundings, write_results

PLAIN, AGAIN, RECORDED = "not recorded", "not recorded, once more", "recorded"
BOUND_FRACTION = 0.02
"""Fraction of a step of 20 ms that recording may take."""
WARM_UP = 30
OUT = "DURE_BENCHMARK_OUT"
HEAD = "| | ms per step | difference, us | ratio, median | ratio, middle half |\n|---|---|---|---|---|\n"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--block", type=int, default=20, help="steps of a turn")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if OUT in os.environ:
        measure(options.rounds, options.block, Path(os.environ[OUT]))
        return
    with tempfile.TemporaryDirectory(prefix="dure-recording-") as name:
        sizes = ["--rounds", str(options.rounds), "--block", str(options.block)]
        command = [sys.executable, "-m", "dure", "run", "--nproc", "2", "--threads", "1", "--runs-dir", name]
        subprocess.run([*command, __file__, *sizes], check=True, env={**os.environ, OUT: name})
        seconds = json.loads((Path(name) / "seconds.json").read_text())
    rows = [asdict(row) for row in compare(seconds, PLAIN)]
    cost = next(row["ratio"] for row in rows if row["name"] == RECORDED) - 1
    record: dict[str, Any] = {**surroundings(), "rounds": options.rounds, "block": options.block, "rows": rows}
    lines = [
        f"| {row['name']} | {1e3 * row['median']:.2f} | {1e6 * row['difference']:+.0f} | {row['ratio']:.4f} | "
        f"{row['ratio_low']:.4f} to {row['ratio_high']:.4f} |\n"
        for row in rows
    ]
    verdict = "kept" if cost <= BOUND_FRACTION else "not kept"
    page = (
        f"# Recording the steps of a script\n\n{describe_surroundings(record)}\n"
        f"Two ranks of DistributedDataParallel with a DataLoader, {options.rounds} rounds of turns of {options.block} "
        f"steps.\n\n{HEAD}{''.join(lines)}\nThe bound of {BOUND_FRACTION:.0%} of this step is {verdict}: {cost:.2%}.\n"
    )
    write_results(options.results, "recording", record, page)


def measure(num_rounds: int, block: int, out: Path) -> None:
    """Train on one rank in turns, and write each turn's seconds per step on the first rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    from dure.measure.script_steps import ScriptSteps
    from dure.records.step_writer import RecordWriter

    dist.init_process_group("gloo")
    plain = patched_values()
    steps = ScriptSteps(RecordWriter(out / f"rank{dist.get_rank()}.jsonl"), dist.get_world_size())
    steps.install()
    recorded = patched_values()
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters())
    names = [PLAIN] * (WARM_UP // block + 1)
    names += [name for _, name in random_rounds([PLAIN, AGAIN, RECORDED], num_rounds, seed=0)]
    data = TensorDataset(torch.rand(len(names) * block * 32, 128))
    batches = iter(DataLoader(data, batch_size=32))
    seconds: dict[str, list[float]] = {PLAIN: [], AGAIN: [], RECORDED: []}
    for number, name in enumerate(names):
        put(recorded if name == RECORDED else plain)
        steps._is_off = name != RECORDED
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(block):
            (inputs,) = next(batches)
            time.sleep(0.012)
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if number > WARM_UP // block:
            seconds[name].append((time.perf_counter() - begun) / block)
    if dist.get_rank() == 0:
        (out / "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def places() -> list[tuple[Any, str]]:
    """Return what recording replaces."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import dataloader

    kinds: list[Any] = [dataloader._BaseDataLoaderIter, torch.autograd, dist.Work, torch]
    return list(zip(kinds, ["__next__", "backward", "wait", "save"], strict=True))


def patched_values() -> list[Callable[..., Any]]:
    """Return what stands in these places now."""
    return [getattr(kind, name) for kind, name in places()]


def put(values: list[Callable[..., Any]]) -> None:
    """Put functions into these places."""
    for (kind, name), value in zip(places(), values, strict=True):
        setattr(kind, name, value)


if __name__ == "__main__":
    main()
