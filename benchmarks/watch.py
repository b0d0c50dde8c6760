"""Cost of watching a run: CPU share and memory of `dure watch`, and the age of the newest step that its pages show.

    python benchmarks/watch.py                               64 ranks at 20 steps a second, about three minutes
    python benchmarks/watch.py --ranks 4 --seconds 5         a shorter one

A process writes the records of a run as its ranks would, each rank's once a second. `dure watch` runs at the same
time, with no page, one and ten; a page here is a WebSocket that decodes the numbers of the training loss. The age of a
step is the time since its end when its loss arrives at a page: the writers' buffers are a part of it. CPU shares are of
one core. With Chromium, the page is opened in it too, and the share of its main thread and its longest task are
measured.
"""

import argparse
import asyncio
import base64
import gzip
import json
import multiprocessing
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from paired import HERE, describe_surroundings, surroundings, write_results

from dure.records.events import Attempt, Training
from dure.records.run_dir import RunDir
from dure.records.step_record import StepRecord, step_line

BATCH = 256
SPEC = HERE.parent / "tests" / "samples" / "run_folders" / "resumed" / "spec.json"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WRITE_SECONDS = 1.0
"""Interval at which a rank writes its records, as `RecordWriter` does."""
SETTLING_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """Measurements with some number of pages."""

    pages: int
    cpu_fraction: float
    memory_bytes: int
    messages_per_second: float
    message_bytes: float
    median_age_seconds: float | None
    largest_age_seconds: float | None


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps-per-second", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    parser.add_argument("--history", type=int, default=3_000, help="steps before watching begins")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    record: dict[str, Any] = {**surroundings(), "ranks": options.ranks, "steps_per_second": options.steps_per_second}
    record["history"] = options.history
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder) / "run")
        with (
            growing(run, options.ranks, options.steps_per_second, options.history) as begin,
            serving(run) as (pid, url),
        ):
            record["seconds_to_read"] = seconds_to_read(url, begin, options.steps_per_second)
            record["rows"] = [
                asdict(measure(pid, url, pages, options.seconds, begin, options.steps_per_second))
                for pages in (0, 1, 10)
            ]
            record["browser"] = None if CHROMIUM is None else browser(pid, url, options.seconds)
    write_results(options.results, "watch", record, page(record))


# --- the run


def write_steps(folder: Path, ranks: int, rate: float, history: int, pipe: Any, is_over: Event) -> None:
    """Write the records of a run whose ranks are in step, until it is over."""
    files = [(folder / f"rank{rank}.jsonl").open("a") for rank in range(ranks)]
    begin = time.time() - history / rate
    written = [0] * ranks
    draws = np.random.default_rng(1)
    starts = [int(rate * WRITE_SECONDS * rank / ranks) for rank in range(ranks)]
    while True:
        now = time.time()
        for rank, file in enumerate(files):
            newest = int((now - begin) * rate)
            if not written[rank]:
                newest -= starts[rank]  # from now on the ranks write one after another
            elif newest - written[rank] < rate * WRITE_SECONDS:
                continue
            steps = range(written[rank] + 1, newest + 1)
            busy = draws.uniform(0.5, 0.6, len(steps)) + (0.2 if rank == ranks // 2 else 0.0)
            file.write("".join(line(step, begin, rate, share) for step, share in zip(steps, busy, strict=True)))
            file.flush()
            written[rank] = newest
        if pipe is not None:
            pipe.send(begin)
            pipe = None
        if is_over.wait(0.02):
            break
    for file in files:
        file.close()


def line(step: int, begin: float, rate: float, busy: float) -> str:
    """Return the record of a step."""
    loss = 2.3 / (1 + step / 300)
    return step_line(
        StepRecord(
            time=begin + step / rate, step=step, epoch=0, samples_seen=step * BATCH, loss_sum=loss * BATCH,
            loss_count=BATCH, data_seconds=0.1 / rate, forward_backward_seconds=(busy - 0.1) / rate,
            sync_seconds=(0.95 - busy) / rate, optimizer_seconds=0.05 / rate, wall_seconds=1 / rate,
            sent_bytes=4_000_000,
        )
    )  # fmt: skip


@contextmanager
def growing(run: RunDir, ranks: int, rate: float, history: int) -> Iterator[float]:
    """Let a run grow, and yield the time of its first step."""
    run.path.mkdir()
    shutil.copy(SPEC, run.path)
    with run.lock():
        run.append_event(Attempt())
        run.append_event(
            Training(
                world_size=ranks, num_devices=ranks, device="cpu", epoch_samples=60_000, total_samples=2**40,
                samples_seen=0, step=0,
            )
        )  # fmt: skip
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        is_over = context.Event()
        writer = context.Process(target=write_steps, args=(run.path, ranks, rate, history, there, is_over))
        writer.start()
        try:
            yield here.recv()
        finally:
            is_over.set()
            writer.join()


@contextmanager
def serving(run: RunDir) -> Iterator[tuple[int, str]]:
    """Watch a run, and yield the process and the address of the page."""
    command = [sys.executable, "-m", "dure", "watch", str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.pid, process.stdout.readline().strip()
        finally:
            process.terminate()


# --- the pages


async def listen(url: str, arrivals: list[tuple[float, int, int]]) -> None:
    """Note the time, the newest step and the size of each message to a page."""
    from tornado.websocket import websocket_connect

    connection = await websocket_connect(re.sub(r"^http(.*)/\?", r"ws\1/live?", url), max_message_size=2**30)
    while (text := await connection.read_message()) is not None:
        numbers = json.loads(text)["numbers"]
        step = newest_step(numbers["loss"]) if "loss" in numbers else 0
        arrivals.append((time.time(), step, len(text)))


def newest_step(events: Sequence[dict[str, Any]]) -> int:
    """Return the last step of a chart over samples."""
    columns = dict(events[-1]["new"]["entries"])
    samples = np.frombuffer(gzip.decompress(base64.b64decode(columns["x"]["array"]["data"])), columns["x"]["dtype"])
    return round(float(samples[-1]) / BATCH) if samples.size else 0


async def with_pages(url: str, pages: int, seconds: float) -> list[tuple[float, int, int]]:
    arrivals: list[tuple[float, int, int]] = []
    tasks = [asyncio.create_task(listen(url, arrivals)) for _ in range(pages)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return arrivals


def seconds_to_read(url: str, begin: float, rate: float) -> float:
    """Return the seconds until the newest step on a page is at most three seconds old."""
    start = time.time()
    while True:
        arrivals = asyncio.run(with_pages(url, 1, 1.0))
        if any(arrived - (begin + step / rate) < 3.0 for arrived, step, _ in arrivals if step):
            return time.time() - start


def measure(pid: int, url: str, pages: int, seconds: float, begin: float, rate: float) -> Row:
    """Measure the server while some pages are open."""
    time.sleep(SETTLING_SECONDS)
    process = psutil.Process(pid)
    before, start = sum(process.cpu_times()[:2]), time.time()
    arrivals = asyncio.run(with_pages(url, pages, seconds))
    cpu = (sum(process.cpu_times()[:2]) - before) / (time.time() - start)
    # the first message to a page has all of its state
    changes = arrivals[pages:]
    ages = [arrived - (begin + step / rate) for arrived, step, _ in changes if step]
    sizes = [size for _, _, size in changes]
    return Row(
        pages=pages,
        cpu_fraction=cpu,
        memory_bytes=process.memory_info().rss,
        messages_per_second=len(changes) / seconds / max(1, pages),
        message_bytes=statistics.mean(sizes) if sizes else 0.0,
        median_age_seconds=statistics.median(ages) if ages else None,
        largest_age_seconds=max(ages, default=None),
    )


def browser(pid: int, url: str, seconds: float) -> dict[str, float]:
    """Open the page in Chromium; return the share of its main thread, and its longest task."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shown = opened.new_page()
        shown.goto(url)
        shown.wait_for_timeout(1000 * 3 * SETTLING_SECONDS)
        session = shown.context.new_cdp_session(shown)
        session.send("Performance.enable")
        shown.evaluate(
            "() => { window.longest = 0; new PerformanceObserver((seen) => { for (const one of seen.getEntries())"
            " window.longest = Math.max(window.longest, one.duration); }).observe({ type: 'longtask' }); }"
        )

        def busy() -> float:
            found = session.send("Performance.getMetrics")["metrics"]
            return float(next(one["value"] for one in found if one["name"] == "TaskDuration"))

        before, start = busy(), time.time()
        shown.wait_for_timeout(1000 * seconds)
        fraction = (busy() - before) / (time.time() - start)
        longest = shown.evaluate("window.longest") / 1000
        opened.close()
    return {"main_thread_fraction": fraction, "longest_task_seconds": longest}


def page(record: dict[str, Any]) -> str:
    """Return the results as a page."""
    rows = []
    for row in record["rows"]:
        cells = [f"{row['pages']}", f"{row['cpu_fraction']:.1%}", f"{row['memory_bytes'] / 2**20:.0f} MiB"]
        if row["pages"]:
            cells += [f"{row['messages_per_second']:.2f}", f"{row['message_bytes'] / 1024:.0f} KiB"]
            cells += [f"{row[f'{kind}_age_seconds']:.2f} s" for kind in ("median", "largest")]
        rows.append(f"| {' | '.join([*cells, *['-'] * (7 - len(cells))])} |")
    run = (
        f"{record['ranks']} ranks at {record['steps_per_second']:g} steps a second, each rank's records written once "
        f"a second; {record['history']:,} steps before watching began, read in {record['seconds_to_read']:.1f} s."
    )
    columns = (
        "pages",
        "CPU share of the server",
        "memory",
        "messages/s to a page",
        "of",
        "age of a step, median",
        "largest",
    )
    lines = ["# What watching a run costs", "", describe_surroundings(record), "", run, ""]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows, ""]
    if record["browser"] is not None:
        shown = record["browser"]
        lines.append(
            f"In Chromium, the page keeps its main thread busy for {shown['main_thread_fraction']:.0%} of the time; "
            f"its longest task takes {shown['longest_task_seconds'] * 1000:.0f} ms."
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
