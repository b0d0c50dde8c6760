"""Images per second of ResNet-50 training on one GPU: dure, a hand-tuned loop, and the usual article's program.

    python benchmarks/resnet50_gpu.py

All three take the same bytes from host memory, alternately in one process. Writes resnet50_gpu.md and .json to
benchmarks/results, or to $OUT. Exits 3 where there is no CUDA device, 1 where dure is below 0.98 of the hand-tuned
loop.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import images_task
import torch
from images_task import Images
from paired import HERE, Comparison, Turns, compare, describe_surroundings, surroundings, write_results
from resnet50 import build_resnet50
from torch import Tensor

from dure.cluster.rank import RankInfo
from dure.host.devices import count_cores
from dure.process.context import Place
from dure.records.run_dir import RunDir
from dure.spec import RunSpec
from dure.training.session.session import open_rank_group, open_session
from dure.training.session.stop_request import StopSignals
from dure.training.trainer import Trainer

HAND, AGAIN, ARTICLE = "hand-tuned", "hand-tuned, again (A/A)", "the article's program"
LEAST_RATIO = 0.98
Batch = tuple[Tensor, Tensor]


def hand_tuned(data: Images, batch_size: int, device: torch.device) -> Callable[[int], None]:
    """channels_last, bf16 autocast, fused Adam, batches pinned and copied ahead in a stream of their own."""
    torch.manual_seed(0)
    model = build_resnet50(images_task.NUM_CLASSES).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=images_task.LEARNING_RATE, fused=True)
    batches = copied_ahead(host_batches(data, batch_size), device)

    def run(num_steps: int) -> None:
        torch.backends.cudnn.benchmark = True
        for _ in range(num_steps):
            batch = next(batches)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = images_task.loss(model, batch, torch.channels_last)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def articles_program(data: Images, batch_size: int, device: torch.device) -> Callable[[int], None]:
    """fp32, plain Adam, blocking copies, and `.item()` of every batch's loss."""
    torch.manual_seed(0)
    model = build_resnet50(images_task.NUM_CLASSES).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=images_task.LEARNING_RATE)
    batches = host_batches(data, batch_size)

    def run(num_steps: int) -> None:
        torch.backends.cudnn.benchmark = False
        running_loss = 0.0
        for _ in range(num_steps):
            images, labels = next(batches)
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = images_task.loss(model, (images, labels), torch.contiguous_format)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()

    return run


def host_batches(data: Images, batch_size: int) -> Iterator[Batch]:
    """Yield batches in random order, for ever."""
    while True:
        for rows in torch.randperm(len(data)).split(batch_size):
            yield data.rows(rows)


def copied_ahead(host: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Pin the next batch and copy it in a stream of its own while the device computes on this one."""
    if device.type != "cuda":
        yield from host
    stream = torch.cuda.Stream(device)

    def copy() -> list[Tensor]:
        with torch.cuda.stream(stream):
            return [tensor.pin_memory().to(device, non_blocking=True) for tensor in next(host)]

    ahead = copy()
    while True:
        torch.cuda.current_stream().wait_stream(stream)
        for tensor in ahead:
            tensor.record_stream(torch.cuda.current_stream())
        batch = ahead
        ahead = copy()
        yield tuple(batch)
        del batch


class Rates(NamedTuple):
    """Rates of the candidates, and what they took of the processor; one value per round."""

    per_second: dict[str, list[float]]
    cores: dict[str, list[float]]


def measure(options: argparse.Namespace, folder: Path) -> Rates:
    """Measure each candidate's images per second."""
    num_samples = num_steps(options) * options.batch
    spec = RunSpec(
        task=f"{HERE / 'images_task.py'}:ResNet50",
        task_options={"num_samples": num_samples + 1, "image_size": options.image_size, "num_images": options.images},
        samples=num_samples,
        global_batch_size=options.batch,
        strategy="single",
        device=options.device,
        precision="bf16",
        quiet=True,
    )

    def candidates(device: torch.device) -> dict[str, Callable[[int], None]]:
        data = Images(num_samples, options.image_size, options.images)
        return {
            HAND: hand_tuned(data, options.batch, device),
            AGAIN: hand_tuned(data, options.batch, device),
            ARTICLE: articles_program(data, options.batch, device),
        }

    return alternate(spec, options.batch, candidates, options, folder, _use_tuned_convolutions)


def num_steps(options: argparse.Namespace) -> int:
    """Return the number of dure's steps in all rounds, the first of which warms up."""
    return int((options.rounds + 1) * options.block + 2)


def alternate(
    spec: RunSpec,
    items: int,
    candidates: Callable[[torch.device], dict[str, Callable[[int], None]]],
    options: argparse.Namespace,
    folder: Path,
    on_own_turn: Callable[[], None] = lambda: None,
) -> Rates:
    """Train by dure and let candidates run in between, in this process.

    Args:
        spec: Run of `num_steps` steps.
        items: What is counted, per step.
        candidates: Returns, by name, what runs a number of steps on a device.
        options: Rounds and steps of a block.
        folder: Folder for the run.
        on_own_turn: Called when dure's turn begins.

    Returns:
        Items per second of each candidate and of dure, without the first round.
    """
    place = Place(rank=RankInfo(), threads=count_cores(), is_supervised=False)
    group, devices = open_rank_group(spec, place)
    session = open_session(spec, place, group, devices)
    settle = torch.cuda.synchronize if devices[0].type == "cuda" else lambda: None
    turns = Turns(candidates(devices[0]), options.rounds + 1, options.block, before=settle, after=settle)
    turns.on_own_turn = on_own_turn
    run = RunDir.create(folder, "alternating")
    (run.path / "spec.json").write_text("{}")
    Trainer(session, run, StopSignals(is_supervised=False), turns).train()
    per_second = {name: [items / value for value in values[1:]] for name, values in turns.seconds.items()}
    return Rates(per_second, {name: values[1:] for name, values in turns.cores.items()})


def _use_tuned_convolutions() -> None:
    torch.backends.cudnn.benchmark = True  # as dure had it; the article's program changes it


def report(options: argparse.Namespace, rates: Rates) -> tuple[dict[str, Any], str, bool]:
    """Return the record, the page, and whether dure is fast enough."""
    rows = {row.name: row for row in compare(rates.per_second, HAND)}
    record = {
        **surroundings(),
        "batch": options.batch,
        "image_size": options.image_size,
        "rows": [asdict(row) for row in rows.values()],
        "images_per_second": {name: [round(value, 1) for value in column] for name, column in rates.per_second.items()},
        "cores": rates.cores,
    }
    is_fast = rows["dure"].ratio >= LEAST_RATIO
    page = (
        f"# ResNet-50 on one GPU\n\n{describe_surroundings(record)}\n\n"
        f"Batches of {options.batch} images of {options.image_size} pixels, {options.rounds} rounds of "
        f"{options.block} steps each in random order. dure at least {LEAST_RATIO} of the hand-tuned loop: "
        f"{'yes' if is_fast else 'NO'}.\n\n"
        f"{table(rows.values(), rates.cores, 'images/s')}"
    )
    return record, page, is_fast


def table(rows: Iterable[Comparison], cores: Mapping[str, Sequence[float]], unit: str) -> str:
    """Return the candidates' rates and their ratios to the hand-tuned loop as a Markdown table."""
    lines = [
        f"| {row.name} | {row.median:,.0f} | {row.ratio:.3f} | {row.ratio_low:.3f} to {row.ratio_high:.3f} "
        f"| {statistics.median(cores[row.name]):.2f} |\n"
        for row in rows
    ]
    return f"| | {unit} | ratio, median | ratio, middle half | cores |\n|---|---|---|---|---|\n{''.join(lines)}"


def parser() -> argparse.ArgumentParser:
    """Return the options; the defaults are for a GPU with 40 GiB or more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--images", type=int, default=images_task.NUM_IMAGES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", type=int, default=15, help="steps of a block")
    parser.add_argument("--device", default="cuda", help="cpu only tries the script out")
    parser.add_argument("--results", type=Path, default=Path(os.environ.get("OUT") or HERE / "results"))
    return parser


def run(arguments: list[str] | None = None) -> int:
    """Measure and write the page; return the exit code."""
    options = parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("resnet50_gpu: there is no CUDA device here", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory(prefix="dure-resnet50-") as folder:
        rates = measure(options, Path(folder))
    record, page, is_fast = report(options, rates)
    write_results(options.results, "resnet50_gpu", record, page)
    return 0 if is_fast else 1


if __name__ == "__main__":
    sys.exit(run())
