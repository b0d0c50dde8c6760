"""Stall of training by a checkpoint: dure compared with `torch.save` of the same state to the same disk.

    python benchmarks/checkpoint_stall.py                     both sizes, stall and whole runs; about three minutes
    python benchmarks/checkpoint_stall.py --only stall --rounds 5

`stall`: one process trains a model with AdamW, by the verbs of dure's own loop. In each round a step alone (twice, the
second as the A/A copy), `torch.save` and then a step, and dure's save and then a step, once as by default and once with
all copied at once, have their turns in a random order; the next turn begins when dure's thread is done, and after one
more step. The stall is what the training thread waits: for the save between two steps, and for the end of the copy
before the next step's optimiser. It is to be at most 0.15 of `torch.save`'s time. By how much longer that next step
took than one alone stands beside it: copying and then writing take it processor time, where there is no core to spare.

`runs`: the same run without checkpoints between its ends, with them written while training waits, with them written
beside it (what the thread takes from the steps it runs beside is in this, and not in the stall), and with `torch.save`
in the task, which waits for no disk. Beside training it is to take at most 0.9 of the time where training waits, and
at most that with `torch.save`.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from paired import HERE, compare, describe_surroundings, random_rounds, surroundings, write_results

import dure
from dure.process.context import Place
from dure.records.events import CheckpointSaved
from dure.records.run_dir import RunDir
from dure.spec import RunSpec
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.step_facts import NO_REQUESTS
from dure.training.run_state.capture import Progression
from dure.training.run_state.checkpoint_policy import Checkpointer
from dure.training.session.session import open_rank_group, open_session

BOUND = 0.15
BATCH = 64
STEPS_BETWEEN = 16


def main() -> None:
    """Measure what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 256])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--run-rounds", type=int, default=3)
    parser.add_argument("--only", choices=["stall", "runs"], action="append")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the system's temporary one)")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    parts = options.only or ["stall", "runs"]
    record: dict[str, Any] = surroundings()
    page = [f"# The stall of a checkpoint\n\n{describe_surroundings(record)}\n"]
    with tempfile.TemporaryDirectory(prefix="dure-stall-", dir=options.folder) as folder:
        if "stall" in parts:
            record["stall"] = {size: stall(Path(folder), size, options.rounds) for size in options.megabytes}
            page.append(_stall_table(record["stall"]))
        if "runs" in parts:
            record["runs"] = {size: runs(Path(folder), size, options.run_rounds) for size in options.megabytes}
            page.append(_runs_table(record["runs"]))
    write_results(options.results, "checkpoint_stall", record, "\n".join(page))


def stall(folder: Path, megabytes: int, num_rounds: int) -> dict[str, Any]:
    """Return seconds of each turn, by name."""
    spec = RunSpec(task=f"{HERE / 'stacked.py'}:Stacked", task_options={"megabytes": megabytes}, device="cpu", epochs=9)
    place = Place(threads=torch.get_num_threads(), is_supervised=False)
    session = open_session(spec, place, *open_rank_group(spec, place))
    strategy = session.strategy
    run = RunDir.create(folder, f"stall{megabytes}")
    saver = Checkpointer(session, run, Progression(), run.append_event)
    file = folder / "state.pt"
    batch = session.task.train_data().__getitems__(range(BATCH))

    def step() -> None:
        strategy.forward_backward(
            [Microbatch(batch=batch, num_samples=BATCH)], global_samples=BATCH, requests=NO_REQUESTS
        )
        strategy.sync_gradients().read()
        waited.append(_seconds(saver.before_change))
        strategy.optimizer_step()
        saver.progression.samples_seen += BATCH
        saver.progression.step += 1

    def by_torch() -> None:
        torch.save({"model": strategy.model.state_dict(), "optimizer": strategy.optimizer.state_dict()}, file)

    def by_dure(is_beside: bool) -> None:
        assert saver.copies is not None
        saver.copies.is_beside = is_beside
        saver.save(None)

    turns: dict[str, Callable[[], None]] = {
        "none": lambda: None,
        "none again": lambda: None,
        "torch.save": by_torch,
        "dure": lambda: by_dure(True),
        "dure, copied at once": lambda: by_dure(False),
    }
    waited: list[float] = []
    step()
    saver.prepare()
    for _ in range(3):
        step()
    if saver.copies is None or not saver.copies.is_beside:
        raise SystemExit("nothing is copied beside training here: is there memory for a copy?")
    first = _seconds(lambda: by_dure(True))
    saver.settle()
    waits: dict[str, list[float]] = {name: [] for name in turns}
    steps: dict[str, list[float]] = {name: [] for name in turns}
    for _, name in random_rounds(list(turns), num_rounds + 1, seed=0):
        file.unlink(missing_ok=True)
        step()
        seconds = _seconds(turns[name])
        steps[name].append(_seconds(step) - waited[-1])
        waits[name].append(seconds + waited[-1])
        saver.settle()
    saves = [event for event in run.events() if isinstance(event, CheckpointSaved)]
    saver.leave(None, None, None)
    return {
        "first": first,
        "seconds": {name: values[1:] for name, values in waits.items()},
        "step_seconds": {name: values[1:] for name, values in steps.items()},
        "write_seconds": statistics.median(event.write_seconds for event in saves),
        "num_bytes": saves[-1].num_bytes,
    }


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def runs(folder: Path, megabytes: int, num_rounds: int) -> dict[str, list[float]]:
    """Return seconds per step of whole runs, by how they save; the steps' own and what saves held them up."""
    ways: dict[str, dict[str, Any]] = {
        "no checkpoints": {},
        "training waits": {"checkpoint": {"every_samples": STEPS_BETWEEN * BATCH, "background": False}},
        "beside training": {"checkpoint": {"every_samples": STEPS_BETWEEN * BATCH}},
        "torch.save in the task": {},
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    num_steps = 4 * STEPS_BETWEEN
    for number, name in random_rounds(list(ways), num_rounds, seed=0):
        summary = dure.train(
            f"{HERE / 'stacked.py'}:Stacked",
            task_options={
                "megabytes": megabytes,
                "num_samples": num_steps * BATCH,
                "samples_between": STEPS_BETWEEN * BATCH,
                "saved_to": str(folder / "state.pt") if name.startswith("torch.save") else "",
            },
            global_batch_size=BATCH,
            device="cpu",
            runs_dir=folder,
            name=f"run{megabytes}-{number}-{name.replace(' ', '-')}",
            quiet=True,
            max_restarts=0,
            **ways[name],
        )
        # the last one is the same in all: nothing runs beside it
        events = [e for e in RunDir.open(Path(summary.run)).events() if isinstance(e, CheckpointSaved)]
        seconds[name].append((summary.wall_seconds - events[-1].stall_seconds) / num_steps)
    return seconds


def _stall_table(found: dict[int, dict[str, Any]]) -> str:
    rows = []
    for size, of in found.items():
        plain = statistics.median(of["seconds"]["torch.save"])
        waits = {row.name: row for row in compare(of["seconds"], "torch.save")}
        steps = {row.name: row for row in compare(of["step_seconds"], "none")}
        for name in ("dure", "dure, copied at once"):
            ours, slowed = waits[name], steps[name].difference
            verdict = "holds" if ours.ratio <= BOUND else "**does not hold**"
            rows.append(
                f"| {of['num_bytes'] / 1e6:.0f} MB (asked for {size}) | {name} | {plain * 1e3:.0f} | "
                f"{ours.median * 1e3:.1f} | {ours.ratio:.3f} ({ours.ratio_low:.3f} to {ours.ratio_high:.3f}) | "
                f"{verdict} | "
                f"{slowed * 1e3:+.1f} of {steps['none'].median * 1e3:.0f} | {(ours.median + slowed) / plain:.3f} | "
                f"{steps['none again'].difference * 1e3:+.1f} | {of['write_seconds'] * 1e3:.0f} |\n"
            )
    return (
        f"| state | save | torch.save ms | stall ms | ratio (middle half) | at most {BOUND} | next step longer by ms | "
        "with that | A/A of a step ms | written after ms |\n|---|---|---|---|---|---|---|---|---|---|\n" + "".join(rows)
    )


def _runs_table(found: dict[int, dict[str, list[float]]]) -> str:
    rows = [
        f"| {size} MB | {row.name} | {row.median * 1e3:.1f} | {row.ratio:.3f} ({row.ratio_low:.3f} to "
        f"{row.ratio_high:.3f}) |\n"
        for size, seconds in found.items()
        for row in compare(seconds, "training waits")
    ]
    return (
        f"Whole runs with a checkpoint every {STEPS_BETWEEN} steps, ms per step with all that held them up:\n\n"
        "| state | checkpoints | ms per step | of the time where training waits |\n|---|---|---|---|\n" + "".join(rows)
    )


if __name__ == "__main__":
    main()
