"""All-reduce algorithms beside gloo's own, on the same sockets of the same processes.

    python benchmarks/all_reduce.py                                  ring, and a second gloo as A/A copy
    python benchmarks/all_reduce.py --name ring --name tree --mebibytes 1 --world-size 4

Every round gives each candidate one turn in random order; a turn is timed on all ranks together, from barrier to
barrier, and the slowest rank's time counts. Writes benchmarks/results/all_reduce.md and .json.
"""

import argparse
import json
import os
import socket
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from paired import HERE, compare, describe_surroundings, random_rounds, surroundings, write_results

from dure.cluster.rank import RankInfo
from dure.comm.algorithms import segments
from dure.comm.algorithms.opening import open_all_reduce
from dure.comm.algorithms.table import ALGORITHMS
from dure.comm.groups import ProcessGroup, open_group
from dure.process.context import StoreAddress

BASELINE, COPY = "gloo", "gloo again"
WARM_UP_ROUNDS = 2
HEAD = "| | ms | ratio, median | ratio, middle half | GB/s of bus |\n|---|---|---|---|---|\n"


def main() -> None:
    """Measure every world size and size, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", action="append", choices=[*ALGORITHMS], help="default: ring")
    parser.add_argument("--world-size", action="append", type=int, help="default: 2, 3 and 4")
    parser.add_argument("--mebibytes", action="append", type=float, help="default: 25")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=3, help="all-reduces of a turn")
    parser.add_argument("--segment-kib", type=int, default=segments.SEGMENT_BYTES // 1024)
    parser.add_argument("--window", type=int, default=segments.WINDOW)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    segments.SEGMENT_BYTES, segments.WINDOW = options.segment_kib * 1024, options.window
    record: dict[str, Any] = {**surroundings(), "rounds": options.rounds, "calls": options.calls, "parts": []}
    page = [
        f"# All-reduce beside gloo's own\n\n{describe_surroundings(record)}\n\n"
        f"float32, sum, one thread per rank, {options.rounds} rounds of {options.calls} calls each in random order; "
        f"segments of at most {options.segment_kib} KiB, {options.window} under way. GB/s of bus are 2 (P-1)/P of the "
        "vector's bytes by the time, what a bandwidth-optimal algorithm sends per rank.\n"
    ]
    for world_size in options.world_size or [2, 3, 4]:
        for mebibytes in options.mebibytes or [25.0]:
            seconds = on_ranks(world_size, options.name or ["ring"], int(mebibytes * 2**20), options)
            rows = [asdict(row) for row in compare(seconds, BASELINE)]
            record["parts"].append({"world_size": world_size, "mebibytes": mebibytes, "rows": rows})
            bus_bytes = 2 * (world_size - 1) / world_size * mebibytes * 2**20
            lines = [
                f"| {row['name']} | {row['median'] * 1e3:.2f} | {row['ratio']:.3f} | "
                f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f} | {bus_bytes / row['median'] / 1e9:.2f} |\n"
                for row in rows
            ]
            page.append(f"## {world_size} ranks, {mebibytes:g} MiB\n\n{HEAD}{''.join(lines)}")
    write_results(options.results, "all_reduce", record, "\n".join(page))


def on_ranks(world_size: int, names: list[str], num_bytes: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds per call of each candidate and round, measured in forked processes."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        pids = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                try:
                    values = _measure(rank, world_size, listener, names, num_bytes, options)
                    (Path(folder) / str(rank)).write_text(json.dumps(values))
                finally:
                    os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        by_rank = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(world_size)]
    return {
        name: [max(turn) for turn in zip(*(values[name] for values in by_rank), strict=True)] for name in by_rank[0]
    }


def _measure(
    rank: int, world_size: int, listener: socket.socket, names: list[str], num_bytes: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    group = _join(rank, world_size, listener)
    candidates = {BASELINE: "backend", COPY: "backend"} | {name: name for name in names}
    algorithms = {label: open_all_reduce(name) for label, name in candidates.items()}
    vector = torch.empty(num_bytes // 4)
    seconds: dict[str, list[float]] = {label: [] for label in candidates}
    for number, label in random_rounds([*candidates], WARM_UP_ROUNDS + options.rounds, seed=0):
        vector.zero_()  # sums of sums would overflow
        group.barrier()
        start = time.perf_counter()
        for _ in range(options.calls):
            algorithms[label].all_reduce(vector)
        spent = time.perf_counter() - start
        if number >= WARM_UP_ROUNDS:
            seconds[label].append(spent / options.calls)
    for algorithm in algorithms.values():
        algorithm.close()
    group.close()
    return seconds


def _join(rank: int, world_size: int, listener: socket.socket) -> ProcessGroup:
    torch.set_num_threads(1)
    host, port = listener.getsockname()
    place = RankInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    address = StoreAddress(host=host, port=port, prefix="bench", listen_fd=listener.detach() if rank == 0 else None)
    return open_group(place, address, device=torch.device("cpu"), backend="gloo", timeout_seconds=60)


if __name__ == "__main__":
    main()
