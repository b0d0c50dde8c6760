"""A long run with a fault at a random rank every half minute: how much of the time it trained, and what it left behind.

    python benchmarks/soak.py                              30 minutes and a short control; `make soak`
    python benchmarks/soak.py --seconds 60 --every 8       to try it out

The faults come from outside: SIGKILL, SIGSEGV, SIGABRT and SIGSTOP, drawn at random. Steps take about 20 ms, so a hang
is known after 2 s (`--hang-after`). The time between two faults is counted in steps, so that a slow machine also trains
between them. The control is the same task without pauses and without faults: the same samples, so its weights and its
last loss must be the same, bit by bit. Exits 1 if anything is not as it should be.
"""

import argparse
import itertools
import json
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from paired import HERE, describe_surroundings, surroundings, write_results
from recovery import BATCH, _lines, _start, _until

FAULTS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGSTOP)
STEP_SECONDS = 0.0215
"""Approximate time of a step here, to know how many fill the time."""
HANG_AFTER_SECONDS = 2
LONGEST_PAUSE_SECONDS = 15.0
LEAST_EFFECTIVE = 0.95
MOST_GROWTH_BYTES = 20 * 2**20
LONGEST_RECORD_BYTES = 65536
INTERRUPTED_AFTER_STEPS = 5
"""A pause of more median steps than that is no slow step: training was interrupted."""


def main() -> None:
    """Soak, compare and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds of steps from one fault to the next")
    parser.add_argument("--least-effective", type=float, default=LEAST_EFFECTIVE)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    record: dict[str, Any] = surroundings()
    with tempfile.TemporaryDirectory(prefix="dure-soak-") as name:
        steps = int(options.seconds / STEP_SECONDS)
        record |= soak(Path(name), steps, options.every)
        record["same_weights"] = is_as_undisturbed(Path(name), steps)
    faults = wrong(record, options.least_effective)
    record["wrong"] = faults
    kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(record["faults"].items()))
    page = [
        f"# A run of {record['seconds'] / 60:.1f} minutes with a fault every {options.every:g} s of steps\n",
        f"{describe_surroundings(record)}\n",
        "| | bound | measured |\n|---|---|---|",
        f"| faults | - | {kinds} |",
        f"| time that trained, of all | {options.least_effective:.0%} | {record['effective_fraction']:.1%} |",
        f"| the same, had every step taken the median | - | {record['fraction_of_median_steps']:.1%} |",
        f"| longest pause between steps | {LONGEST_PAUSE_SECONDS:g} s | {record['longest_pause_seconds']:.1f} s |",
        f"| steps done twice | - | {record['steps_redone']} of {steps} |",
        f"| weights and last loss as without faults | bit by bit | {'yes' if record['same_weights'] else 'NO'} |",
        f"| growth of the supervisor's memory | 20 MiB | {record['growth_bytes'] / 2**20:.1f} MiB |",
        f"| growth of its open files | 0 | {record['growth_files']} |",
        f"| processes left | 0 | {record['processes_left']} |",
        "",
    ]
    write_results(options.results, "soak", record, "\n".join(page))
    if faults:
        raise SystemExit("soak: " + "; ".join(faults))


def _ranks(supervisor: psutil.Process) -> list[psutil.Process]:
    """Return its ranks: what takes their lines, once one speaks, is a child of it too."""
    found = []
    for child in supervisor.children():
        with suppress(psutil.NoSuchProcess):  # one that ends just now
            if not any("log_pump" in word for word in child.cmdline()):
                found.append(child)
    return found


def soak(folder: Path, steps: int, every: float) -> dict[str, Any]:
    """Train with faults, and return what was seen of it."""
    run, draw, faults = folder / "run", random.Random(1), Counter[str]()
    command = [*_train("paced.py:Paced", folder, "run", steps), "--max-restarts", "100000"]
    process = _start([*command, "--hang-after", str(HANG_AFTER_SECONDS)], folder / "log")
    assert _until(lambda: len(_lines(run / "rank0.jsonl")) > 50, 60), (folder / "log").read_text()
    supervisor = psutil.Process(process.pid)
    before, children = _size(supervisor), {child.pid for child in supervisor.children(recursive=True)}
    between = int(every / STEP_SECONDS)
    next_fault = between
    try:
        while process.poll() is None:
            time.sleep(0.2)
            if (step := _last_step(run / "rank0.jsonl")) < next_fault:
                continue
            next_fault = step + between
            ranks = _ranks(supervisor)
            after = _size(supervisor)
            children |= {child.pid for child in ranks}
            fault = draw.choice(FAULTS)
            if len(ranks) == 2:
                with suppress(psutil.NoSuchProcess):
                    ranks[draw.randrange(2)].send_signal(fault)
                    faults[fault.name] += 1
    except psutil.NoSuchProcess:
        pass
    finally:
        process.kill()
    assert process.wait() == 0, (folder / "log").read_text()[-4000:]
    records = _lines(run / "rank0.jsonl")
    times = sorted(record["time"] for record in [*records, *_lines(run / "undone.jsonl")])
    pauses = [end - begin for begin, end in itertools.pairwise(times)]
    seconds, median = times[-1] - times[0], statistics.median(pauses)
    interrupted = sum(pause - median for pause in pauses if pause > INTERRUPTED_AFTER_STEPS * median)
    num_redone = len(times) - len(records)
    return {
        "seconds": seconds,
        "faults": dict(faults),
        "median_step_seconds": median,
        "interrupted_seconds": interrupted,
        "effective_fraction": 1 - (interrupted + num_redone * median) / seconds,
        "fraction_of_median_steps": len(records) * median / seconds,
        "longest_pause_seconds": max(pauses),
        "steps_redone": num_redone,
        "steps_once": [record["step"] for record in records] == list(range(1, steps + 1)),
        "last_loss": records[-1]["loss_sum"],
        "growth_bytes": after[0] - before[0],
        "growth_files": after[1] - before[1],
        "processes_left": sum(psutil.pid_exists(child) for child in children),
    }


def _last_step(path: Path) -> int:
    """Return the step of the last whole record, of which a run that begins again may have none."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LONGEST_RECORD_BYTES))
        last = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
    return int(json.loads(last)["step"]) if last else 0


def is_as_undisturbed(folder: Path, steps: int) -> bool:
    """Train without pauses and faults; return whether both ended alike."""
    control = _start(_train("tiny.py:Tiny", folder, "control", steps), folder / "control.log")
    assert control.wait() == 0, (folder / "control.log").read_text()
    for name in ("run", "control"):
        command = ["-m", "dure", "export", str(folder / name), str(folder / f"{name}.safetensors")]
        assert _start(command, folder / "export.log").wait() == 0, (folder / "export.log").read_text()
    losses = [_lines(folder / name / "rank0.jsonl")[-1]["loss_sum"] for name in ("run", "control")]
    weights = [(folder / f"{name}.safetensors").read_bytes() for name in ("run", "control")]
    return losses[0] == losses[1] and weights[0] == weights[1]


def wrong(record: dict[str, Any], least_effective: float) -> list[str]:
    """Return what is not as it should be."""
    found = {
        "a sample was lost or used twice": not record["steps_once"],
        "weights or loss differ from the undisturbed run's": not record["same_weights"],
        "too little of the time trained": record["effective_fraction"] < least_effective,
        "it hung too long": record["longest_pause_seconds"] > LONGEST_PAUSE_SECONDS,
        "the supervisor grew": record["growth_bytes"] > MOST_GROWTH_BYTES or record["growth_files"] > 0,
        "a process was left": record["processes_left"] > 0,
    }
    return [text for text, is_so in found.items() if is_so]


def _train(task: str, folder: Path, name: str, steps: int) -> list[str]:
    words = f"-m dure train {HERE / task} --strategy ddp --nproc 2 --global-batch-size {BATCH} --quiet --device cpu"
    return [*words.split(), "--samples", str(steps * BATCH), "--runs-dir", str(folder), "--name", name]


def _size(process: psutil.Process) -> tuple[int, int]:
    return process.memory_info().rss, process.num_fds()


if __name__ == "__main__":
    main()
