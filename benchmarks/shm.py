"""All-reduce through shared memory beside gloo's, and torch's DDP unmodified over `dure_shm` beside DDP over gloo.

    python benchmarks/shm.py                              2 and 4 ranks, 4 kB to 102 MB, three models; ten minutes
    python benchmarks/shm.py --world-size 2 --only reduce --megabytes 4
    python benchmarks/shm.py --world-size 2 --only reduce --share-kib 128 --share-kib 512    try other shares

Every round gives each candidate one turn in random order; a turn is timed on all ranks and the slowest rank's time
counts. `copy` is the bound: each rank copies its vector once, as fast as torch can, all at the same time. No all-reduce
of vectors in private memory can do with less, since each has to be read and overwritten once. `in place` is the
algorithm on vectors that lie in shared memory already (`AllReduce.zeros`), as the gradients of `ring_ddp` do: it writes
over what it has just read, and can be quicker than a copy into other memory. Writes the results as shm.md and .json.
"""

import argparse
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import step_models
import torch
import torch.distributed as dist
from paired import HERE, compare, describe_surroundings, random_rounds, surroundings, write_results
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dure.cluster.rank import RankInfo
from dure.comm.algorithms import shm
from dure.comm.groups import ProcessGroup, open_group
from dure.process.context import StoreAddress
from dure.torchcompat.imports import import_late_parts

GLOO, COPY = "gloo", "copy"
WARM_UP_ROUNDS = 3
TURN_BYTES = 50e6
"""A turn makes so many calls that it moves about this."""

Measured = dict[str, list[float]]
Candidates = dict[str, Callable[[], Any]]


def main() -> None:
    """Measure what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["reduce", "ddp"])
    parser.add_argument("--world-size", action="append", type=int, help="default: 2 and 4")
    parser.add_argument("--megabytes", action="append", type=float, help="default: 0.004, 0.1, 1, 4, 25 and 102")
    parser.add_argument("--share-kib", action="append", type=int, help="default: the one that dure uses")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20, help="training steps of a turn")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    import_late_parts()
    record: dict[str, Any] = {**surroundings(), "rounds": options.rounds, "steps": options.steps, "parts": []}
    page = [
        f"# Shared memory beside gloo\n\n{describe_surroundings(record)}\n\nOne thread per rank, {options.rounds} "
        "rounds in random order. `copy` is each rank copying its vector once: the bound where vectors lie in "
        "private memory. `in place`: they lie in shared memory, as the gradients of `ring_ddp` do.\n"
    ]
    for world_size in options.world_size or [2, 4]:
        if options.only != "ddp":
            sizes = options.megabytes or [0.004, 0.1, 1.0, 4.0, 25.0, 102.0]
            page.extend(_reduce_part(record, world_size, megabytes, options) for megabytes in sizes)
        if options.only != "reduce":
            page.extend(_ddp_part(record, world_size, name, options) for name in step_models.NAMES)
    write_results(options.results, "shm", record, "\n".join(page))


def _reduce_part(record: dict[str, Any], world_size: int, megabytes: float, options: argparse.Namespace) -> str:
    shares = options.share_kib or [shm.SHARE_BYTES // 1024]
    calls = max(1, round(TURN_BYTES / world_size / (megabytes * 1e6 + 1e5)))

    def measure(group: ProcessGroup) -> Measured:
        return _turns(group, *_reducers(int(megabytes * 1e6), shares), calls, options.rounds)

    seconds = on_ranks(world_size, measure)
    rows = [asdict(row) for row in compare(seconds, GLOO)]
    shares_of_copy = {row.name: 1 / row.ratio for row in compare(seconds, COPY)}
    record["parts"].append(
        {"kind": "reduce", "world_size": world_size, "megabytes": megabytes, "calls": calls, "rows": rows}
        | {"share_of_copy": shares_of_copy, "microseconds": _rounded(seconds)}
    )
    lines = [
        f"| {row['name']} | {row['median'] * 1e6:.0f} | {min(seconds[row['name']]) * 1e6:.0f} | "
        f"{1 / row['ratio']:.2f} | {1 / row['ratio_high']:.2f} to "
        f"{1 / row['ratio_low']:.2f} | {shares_of_copy[row['name']]:.0%} |\n"
        for row in rows
    ]
    head = (
        "| | us, median | us, fastest round | times faster than gloo, median | middle half | share of the bound |\n"
        "|---|---|---|---|---|---|\n"
    )
    return f"## all_reduce, {world_size} ranks, {megabytes:g} MB of float32, {calls} calls a turn\n\n{head}" + "".join(
        lines
    )


def _ddp_part(record: dict[str, Any], world_size: int, name: str, options: argparse.Namespace) -> str:
    def measure(group: ProcessGroup) -> Measured:
        return _turns(group, *_trainers(name, options.steps), 1, options.rounds)

    seconds = {
        label: [turn / options.steps for turn in turns] for label, turns in on_ranks(world_size, measure).items()
    }
    rows = [asdict(row) for row in compare(seconds, GLOO)]
    record["parts"].append(
        {"kind": "ddp", "world_size": world_size, "model": name, "rows": rows, "microseconds": _rounded(seconds)}
    )
    lines = [
        f"| {row['name']} | {row['median'] * 1e6:.0f} | {min(seconds[row['name']]) * 1e6:.0f} | "
        f"{row['ratio']:.3f} | {row['ratio_low']:.3f} to "
        f"{row['ratio_high']:.3f} |\n"
        for row in rows
    ]
    head = (
        "| | us per step, median | us, fastest round | ratio to gloo, median | middle half |\n|---|---|---|---|---|\n"
    )
    return f"## torch's DDP, {world_size} ranks, {name} model, {options.steps} steps a turn\n\n{head}{''.join(lines)}"


def _reducers(num_bytes: int, shares: list[int]) -> tuple[Candidates, Callable[[], Any]]:
    """Build all ways to all-reduce one vector, and what comes before a turn of each."""
    backend = dist.new_group(backend="cpu:dure_shm")
    vector, other = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
    in_place = shm.SharedMemoryAllReduce()
    shared = in_place.zeros(num_bytes // 4, torch.float32, torch.device("cpu"))
    candidates: Candidates = {
        GLOO: lambda: dist.all_reduce(vector),
        "gloo, again (A/A)": lambda: dist.all_reduce(vector),
        "backend dure_shm": lambda: dist.all_reduce(vector, group=backend),
        COPY: lambda: other.copy_(vector),
        "algorithm shm, in place": lambda: in_place.all_reduce(shared),
    }
    for share in shares:
        shm.SHARE_BYTES = share * 1024
        algorithm = shm.SharedMemoryAllReduce()
        label = "algorithm shm" + (f", shares of {share} KiB" if len(shares) > 1 else "")
        candidates[label] = lambda algorithm=algorithm: algorithm.all_reduce(vector)

    def prepare() -> None:
        for tensor in (vector, shared):
            tensor.zero_()  # sums of sums would overflow

    return candidates, prepare


def _trainers(name: str, num_steps: int) -> tuple[Candidates, Callable[[], Any]]:
    """Build the same training under torch's DDP over each backend."""
    shared = dist.new_group(backend="cpu:dure_shm")
    groups = {GLOO: None, "gloo, again (A/A)": None, "dure_shm": shared, "dure_shm, again (A/A)": shared}
    return {label: _train(name, num_steps, group) for label, group in groups.items()}, lambda: None


def _train(name: str, num_steps: int, group: dist.ProcessGroup | None) -> Callable[[], None]:
    torch.manual_seed(0)
    model = step_models.build_model(name)
    engine = DistributedDataParallel(model, process_group=group)
    optimizer = step_models.build_optimizer(model)
    batch_size = step_models.BATCHES[name]
    batches: list[tuple[Tensor, Tensor]] = [
        (torch.randn(batch_size, 64), torch.randint(10, (batch_size,))) for _ in range(num_steps)
    ]

    def run() -> None:
        for batch in batches:
            step_models.loss(engine, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def _turns(
    group: ProcessGroup, candidates: Candidates, prepare: Callable[[], Any], calls: int, num_rounds: int
) -> Measured:
    seconds: Measured = {label: [] for label in candidates}
    for number, label in random_rounds([*candidates], WARM_UP_ROUNDS + num_rounds, seed=0):
        prepare()
        group.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            candidates[label]()
        spent = time.perf_counter() - start
        if number >= WARM_UP_ROUNDS:
            seconds[label].append(spent / calls)
    return seconds


def on_ranks(world_size: int, measure: Callable[[ProcessGroup], Measured]) -> Measured:
    """Return the seconds of each candidate and round, of the slowest rank, measured in forked processes."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        pids = [_fork(rank, world_size, listener, Path(folder), measure) for rank in range(world_size)]
        for pid in pids:
            os.waitpid(pid, 0)
        by_rank = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(world_size)]
    return {name: [*_slowest(values[name] for values in by_rank)] for name in by_rank[0]}


def _slowest(by_rank: Iterator[list[float]]) -> Iterator[float]:
    return (max(turn) for turn in zip(*by_rank, strict=True))


def _fork(
    rank: int, world_size: int, listener: socket.socket, folder: Path, measure: Callable[[ProcessGroup], Measured]
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        host, port = listener.getsockname()
        place = RankInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
        address = StoreAddress(host=host, port=port, prefix="bench", listen_fd=listener.detach() if rank == 0 else None)
        group = open_group(place, address, device=torch.device("cpu"), backend="gloo", timeout_seconds=120)
        values = measure(group)
        group.close()
        (folder / str(rank)).write_text(json.dumps(values))
    finally:
        os._exit(0)


def _rounded(seconds: Measured) -> dict[str, list[float]]:
    return {name: [round(value * 1e6, 1) for value in column] for name, column in seconds.items()}


if __name__ == "__main__":
    main()
