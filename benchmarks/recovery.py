"""Time from the kill of a rank to the next step: dure and a script by hand under torchrun; and the cost of being ready.

    python benchmarks/recovery.py                       100 kills under dure, 10 under torchrun; about eight minutes
    python benchmarks/recovery.py --kills 10 --only dure

Steps of about 20 ms on two processes. A kill is SIGKILL to a rank drawn at random, at a random moment of a step. Under
torchrun each kill has a job of its own, since the next one may never come: no step within 60 seconds counts as hung.
`ready` runs the same task with and without restarts and snapshots alternately: the ratio of their median steps is what
snapshots cost; heartbeats are written in all of them, and what the supervisor takes is its own processor time. A
heartbeat by itself is timed beside it.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from paired import HERE, describe_surroundings, surroundings, write_results

BATCH = 128
HUNG_SECONDS = 60.0
KILLS_OF_A_RUN = 20
READY_STEPS = 300
STEP_MICROSECONDS = 20_000
PLAIN = "no restarts"
WAYS: dict[str, tuple[object, ...]] = {
    PLAIN: ("--max-restarts", 0),
    "restarts, no snapshots": ("--snapshot-every", 10**6),
    "restarts, snapshots": (),
}
"""Flags of each way. In all of them ranks send heartbeats and the supervisor watches."""


def main() -> None:
    """Measure what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--torchrun-kills", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=6, help="of `ready`")
    parser.add_argument("--only", choices=["dure", "torchrun", "ready"], action="append")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    parts = options.only or ["dure", "torchrun", "ready"]
    draw = random.Random(1)
    record: dict[str, Any] = surroundings()
    page = [f"# Recovery from the death of a rank\n\n{describe_surroundings(record)}\n"]
    rows = []
    if "dure" in parts:
        record["dure"] = [s for _ in range(-(-options.kills // KILLS_OF_A_RUN)) for s in kills_under_dure(draw)]
        rows.append(_row("dure", record["dure"]))
    if "torchrun" in parts:
        record["torchrun"] = [kill_under_torchrun(draw) for _ in range(options.torchrun_kills)]
        rows.append(_row("by hand under torchrun", record["torchrun"]))
    if rows:
        page.append(
            "| | kills | went on | median s | longest s | steps redone, most |\n|---|---|---|---|---|---|\n"
            + "".join(rows)
        )
    if "ready" in parts:
        record["ready"], record["beat_us"] = ready(options.rounds), beat_microseconds()
        page.append(_page_of_ready(record["ready"]))
        share = record["beat_us"] / STEP_MICROSECONDS
        page.append(
            f"A heartbeat, with the number of the last collective: {record['beat_us']:.1f} us, {share:.3%} of a step."
        )
    write_results(options.results, "recovery", record, "\n".join(page))


def _row(name: str, found: list[dict[str, float | None]]) -> str:
    seconds = [one["seconds"] for one in found if one["seconds"] is not None]
    redone = [one["redone"] for one in found if one["redone"] is not None]
    if not seconds:
        return f"| {name} | {len(found)} | 0 | | | |\n"
    return (
        f"| {name} | {len(found)} | {len(seconds)} | {statistics.median(seconds):.2f} | {max(seconds):.2f} | "
        f"{max(redone):.0f} |\n"
    )


def _page_of_ready(found: list[dict[str, tuple[float, float]]]) -> str:
    lines = [
        f"What it costs to be ready, {len(found)} rounds of runs of {READY_STEPS} steps:\n",
        "| | a step, ratio to no restarts, median | lowest and highest | supervisor, of one core, in ticks of 10 ms |",
        "|---|---|---|---|",
    ]
    for way in WAYS:
        ratios = sorted(one[way][0] / one[PLAIN][0] for one in found)
        share = statistics.median(one[way][1] for one in found)
        lines.append(f"| {way} | {statistics.median(ratios):.3f} | {ratios[0]:.3f} to {ratios[-1]:.3f} | {share:.2%} |")
    return "\n".join(lines) + "\n"


def _start(command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, *command], env=environment, stdout=file, stderr=file)


def _until(condition: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return found


def _dure(folder: Path, name: str, steps: int, *more: object) -> list[str]:
    task = f"train {HERE / 'paced.py'}:Paced --strategy ddp --nproc 2 --global-batch-size {BATCH} --quiet --device cpu"
    return [
        *("-m", "dure", *task.split(), "--samples", str(steps * BATCH), "--runs-dir", str(folder), "--name", name),
        *map(str, more),
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _ranks(supervisor: psutil.Process) -> list[psutil.Process]:
    """Return its ranks: what takes their lines, once one speaks, is a child of it too."""
    return [child for child in supervisor.children() if not any("log_pump" in word for word in child.cmdline())]


def kills_under_dure(draw: random.Random) -> list[dict[str, float | None]]:
    """Kill ranks of one run, one after another, and return what each cost."""
    found: list[dict[str, float | None]] = []
    with tempfile.TemporaryDirectory(prefix="dure-recovery-") as name:
        run = Path(name) / "run"
        most = ("--max-restarts", 2 * KILLS_OF_A_RUN)
        process = _start(_dure(Path(name), "run", 100_000, *most), Path(name) / "log")
        first = _first_step_of_round(run, 1)
        for number in range(KILLS_OF_A_RUN):
            time.sleep(0.3 + draw.random() * 0.2)
            killed_at, rank = time.time(), draw.choice(_ranks(psutil.Process(process.pid)))
            rank.send_signal(signal.SIGKILL)
            last_step = max(record["step"] for record in _lines(run / "rank0.jsonl") if record["time"] < killed_at)
            first = _first_step_of_round(run, number + 2)
            found.append({"seconds": first["time"] - killed_at, "redone": max(0, last_step - (first["step"] - 1))})
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    return found


def _first_step_of_round(run: Path, number: int) -> dict[str, Any]:
    """Wait for the first step after all ranks were started for the `number`-th time."""

    def found() -> dict[str, Any] | None:
        begun = [event for event in _lines(run / "events.jsonl") if event["event"] == "training"]
        if len(begun) < number:
            return None
        return next((record for record in _lines(run / "rank0.jsonl") if record["time"] > begun[-1]["time"]), None)

    step = _until(found, HUNG_SECONDS)
    if step is None:
        raise SystemExit(f"no step followed start {number}: {(run.parent / 'log').read_text()}")
    return dict(step)


def kill_under_torchrun(draw: random.Random) -> dict[str, float | None]:
    """Kill a rank of a job of its own, and return what it cost; nothing if no step came any more."""
    with tempfile.TemporaryDirectory(prefix="dure-recovery-") as name:
        folder = Path(name)
        script = ("--max-restarts", "3", str(HERE / "recovery_by_hand.py"), str(folder), "100000")
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        process = _start([*launch, *script], folder / "log")

        def steps() -> list[tuple[float, int]]:
            text = (folder / "steps0").read_text() if (folder / "steps0").is_file() else ""
            words = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
            return [(float(when), int(step)) for when, step in words]

        try:
            assert _until(lambda: len(steps()) > 60, 60), (folder / "log").read_text()
            time.sleep(draw.random())
            before = time.time()
            os.kill(int((folder / f"pid{draw.randrange(2)}").read_text()), signal.SIGKILL)
            last = max(step for _, step in steps())
            # half a second is less than a new process needs to import torch, and more than the old ones still step
            again = _until(lambda: [one for one in steps() if one[0] > before + 0.5], HUNG_SECONDS)
            if not again:
                return {"seconds": None, "redone": None}
            return {"seconds": again[0][0] - before, "redone": last - (again[0][1] - 1)}
        finally:
            family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for member in family:
                member.kill()
            process.wait()


def ready(num_rounds: int) -> list[dict[str, tuple[float, float]]]:
    """Return of each round and way: a median step's seconds, and the supervisor's share of one core meanwhile."""
    found = []
    with tempfile.TemporaryDirectory(prefix="dure-recovery-") as name:
        folder = Path(name)
        for number in range(num_rounds):
            ways = list(WAYS)[:: 1 if number % 2 else -1]
            found.append({way: _steps_of(folder, f"{number}-{[*WAYS].index(way)}", WAYS[way]) for way in ways})
    return found


def beat_microseconds() -> float:
    """Return the time of one heartbeat as a rank writes it at each step: the median of 100 times 1,000."""
    import torch.distributed as dist

    from dure.launch.worker.worker_process import unnamed_file
    from dure.process.heartbeat import Heartbeats
    from dure.torchcompat.calls import SequenceNumber

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    descriptor, sequence, found = unnamed_file("beats"), SequenceNumber(), []
    heartbeats = Heartbeats(descriptor, 2)
    for _ in range(100):
        begun = time.perf_counter()
        for step in range(1000):
            heartbeats.beat(0, step, "training", sequence.now())
        found.append((time.perf_counter() - begun) * 1e3)
    dist.destroy_process_group()
    os.close(descriptor)
    return statistics.median(found)


def _steps_of(folder: Path, run: str, flags: tuple[object, ...]) -> tuple[float, float]:
    process = _start(_dure(folder, run, READY_STEPS, *flags), folder / "log")
    supervisor, records = psutil.Process(process.pid), folder / run / "rank0.jsonl"
    used = []
    for count in (READY_STEPS // 6, READY_STEPS * 5 // 6):
        while len(_lines(records)) < count:
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)  # a benchmark that looks more often is what it measures
        used.append((time.monotonic(), sum(supervisor.cpu_times()[:2])))
    assert process.wait(120) == 0, (folder / "log").read_text()
    times = [record["time"] for record in _lines(records)][READY_STEPS // 6 :]
    (begun, first), (ended, last) = used
    return statistics.median(end - begin for begin, end in itertools.pairwise(times)), (last - first) / (ended - begun)


if __name__ == "__main__":
    main()
