"""Checks that need a GPU: `make gpu-check`. Core dependencies only, no network.

Weights against a loop by hand on the GPU: one rank on NCCL, two gloo ranks that share the GPU, two replicas in one
process; every strategy, undisturbed and with a rank killed; convolutions; bf16 and fp16. These parts run side by side.
Then, each alone: `resnet50_gpu.py`, `transformer_gpu.py`, peak memory, and a model of 1.3 billion parameters with and
without snapshots and with a rank killed. With `--rounds 6` all but this last part took seven minutes on an H200, and
this one three. `--only NAME` runs one part, `--matching TEXT` some checks of it. Writes gpu_check.md and .json to
benchmarks/results, or to $OUT. Exits 0 when all holds, 1 when something does not, 3 where there is no CUDA device.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpu_tasks
import resnet50_gpu
import torch
import transformer_gpu
from gpu_tasks import Regression
from images_task import NUM_CLASSES, Images, ResNet50, loss
from paired import HERE, describe_surroundings, surroundings, write_results
from resnet50 import build_resnet50
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from transformer_task import Text

import dure
from dure.strategies.table import STRATEGIES
from dure.torchcompat.imports import import_late_parts

STEPS: dict[str, Any] = {"global_batch_size": 7, "samples": 130, "clip_norm": 0.4, "seed": 5}
"""20 steps: six whole batches of 7 and one of two samples to an epoch, which no two devices share evenly."""
_WHOLE_STEPS = 58
"""Number of samples in an epoch and two whole batches."""
TO_ROUNDING = 1e-10
"""Float64 sums in another order differ by about 1e-16 each; 20 steps amplify that little."""
IN_HALF = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
"""Weights of order 0.1 after 20 steps whose gradients are rounded to 24, 8 and 11 bits in another order."""
TO_ROUNDING_OF_CONVOLUTIONS = 1e-4
"""Float32, six steps; sums of weight gradients in another order."""
MOST_MEMORY = 1.03
MOST_SECONDS_TO_RECOVER = 10.0
MOST_FOR_SNAPSHOTS = 1.02
LARGE = {"width": 2048, "layers": 24, "heads": 16}
"""1.3 billion parameters: 15.7 GB with AdamW's state."""
LARGE_STEPS, KILLED_STEP = 64, 26
_LAST_STEPS = 32
"""Steps at the end of a run whose mean is compared: enough for some snapshots, after the restart's own steps."""

SIDE_BY_SIDE = ["conformance", "strategies", "images", "kills", "precisions"]
PARTS = [*SIDE_BY_SIDE, "speed", "words", "memory", "large"]
ONE = {"strategy": "single", "nproc": 1}
PLACES: dict[str, dict[str, Any]] = {
    "single": ONE,
    "ddp, 1 rank on NCCL": {"strategy": "ddp", "nproc": 1, "backend": "nccl"},
    "ddp, 2 gloo ranks on one GPU": {"strategy": "ddp", "nproc": 2, "backend": "gloo", "share_devices": True},
    "dp, 2 replicas on one GPU": {"strategy": "dp", "nproc": 2, "share_devices": True},
    "balanced_dp, 2 replicas on one GPU": {"strategy": "balanced_dp", "nproc": 2, "share_devices": True},
}
NEED_GPUS_APART = frozenset({"fsdp", "pipeline", "tensor_parallel"})
"""Strategies whose ranks cannot share a GPU: on one GPU they run on one rank."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison."""

    name: str
    value: float | str
    bound: float | str
    holds: bool
    seconds: float


class Checks:
    """Runs the checks one by one; one that breaks is a check that does not hold."""

    def __init__(self, folder: Path, device: str, matching: str = "") -> None:
        self.folder = folder
        self.device = device
        self.matching = matching
        self.done: list[Check] = []
        self._number = 0

    def at_most(self, name: str, bound: float, measure: Callable[[], float]) -> None:
        """Check that a measured number is at most `bound`."""
        self._check(name, bound, measure, lambda value: value <= bound)

    def equal(self, name: str, expected: str, measure: Callable[[], str]) -> None:
        """Check that what happens is what is expected."""
        self._check(name, expected, measure, lambda value: value == expected)

    def _check(self, name: str, bound: Any, measure: Callable[[], Any], holds: Callable[[Any], bool]) -> None:
        if self.matching not in name:
            return
        start = time.perf_counter()
        try:
            value = measure()
            is_good = holds(value)
        except Exception as error:
            traceback.print_exc()
            value, is_good = f"{type(error).__name__}: {error}"[:300], False
        check = Check(name=name, value=value, bound=bound, holds=is_good, seconds=time.perf_counter() - start)
        self.done.append(check)
        print(f"{'ok  ' if is_good else 'FAIL'} {name}: {_shown(value)} (at most {_shown(bound)})", flush=True)

    def path(self, name: str) -> Path:
        """Return a fresh path."""
        self._number += 1
        return self.folder / f"{self._number}-{name}"

    def train(self, task: dure.Task, **settings: Any) -> Path:
        """Train by dure and return the run's folder."""
        path = self.path("run")
        defaults = {"quiet": True, "device": self.device, "threads": 4, "eval_every_epochs": 1e6}
        in_child(lambda: dure.train(task, runs_dir=path.parent, name=path.name, **(defaults | settings)).steps)
        return path

    def weights(self, run: Path) -> dict[str, torch.Tensor]:
        """Return a run's last weights."""
        file = self.path("weights.safetensors")
        dure.export(run, file)
        return load_file(file)

    def same_weights(
        self, name: str, bound: float, expected: dict[str, torch.Tensor], task: dure.Task, **settings: Any
    ) -> None:
        """Check that dure trains to the expected weights."""
        self.at_most(name, bound, lambda: difference(self.weights(self.train(task, **settings)), expected))

    def by_hand(self, task: Regression, **settings: Any) -> dict[str, torch.Tensor]:
        """Train by hand in a process of its own and return the weights."""
        file = self.path("hand.safetensors")
        in_child(lambda: gpu_tasks.by_hand(task, file, device=self.device, **(STEPS | settings)))
        return load_file(file)


class ChildFailed(Exception):
    """Error in a forked process."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind, self.message = kind, message
        super().__init__(f"{kind}: {message}"[:300])


class Child:
    """Forked process that runs something that uses CUDA; this one must stay without CUDA."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._file = tempfile.NamedTemporaryFile("r", encoding="utf-8")  # noqa: SIM115
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                answer = {"answer": call()}
            except BaseException as error:
                if not isinstance(error, dure.DureError):
                    traceback.print_exc()
                answer = {"kind": type(error).__name__, "message": str(error)}
            Path(self._file.name).write_text(json.dumps(answer), encoding="utf-8")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def answer(self) -> Any:
        """Wait for the process and return its answer.

        Raises:
            ChildFailed: The call raised, or the process died.
        """
        _, status = os.waitpid(self._pid, 0)
        with self._file:
            answer = json.loads(self._file.read() or "{}")
        if "answer" not in answer:
            died = f"the process ended with {os.waitstatus_to_exitcode(status)}"
            raise ChildFailed(answer.get("kind", "died"), answer.get("message", died))
        return answer["answer"]


def in_child(call: Callable[[], Any]) -> Any:
    """Run something that uses CUDA in a forked process and return its answer."""
    return Child(call).answer()


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference of two sets of weights; infinite where one is no number.

    It is computed in a forked process: OpenMP's threads would be missing in those that are forked from here later.
    """
    assert one.keys() == other.keys()
    worst = float(in_child(lambda: max(float((one[name] - other[name]).abs().max()) for name in one)))
    return worst if worst == worst else float("inf")


def conformance(checks: Checks) -> None:
    """Check weights, evaluation, resuming and failures against the loop by hand, in float64."""
    for kind, optimizer in (("mean", "sgd"), ("tokens", "adamw")):
        task = Regression(kind=kind, optimizer=optimizer)
        expected = checks.by_hand(task)
        for name, place in PLACES.items():
            for size in (None, 2):
                label = f"weights: {name}, {kind} loss, {optimizer}, microbatch {size}"
                checks.same_weights(label, TO_ROUNDING, expected, task, **place, **STEPS, microbatch_size=size)
    task, expected = Regression(), checks.by_hand(Regression())
    spawned = PLACES["ddp, 2 gloo ranks on one GPU"] | {"start": "spawn"}
    checks.same_weights("weights: ddp, 2 spawned ranks", TO_ROUNDING, expected, task, **spawned, **STEPS)
    checks.at_most("resumed on 2 ranks: weights", TO_ROUNDING, lambda: difference(_resumed(checks), expected))
    checks.at_most("evaluation on 2 ranks and on 1: difference", 1e-12, lambda: _evaluations_differ(checks))
    checks.equal("a sample that is no number stops all ranks", "WorkerFailed", lambda: _poisoned(checks))


def places_of(strategy: str) -> dict[str, dict[str, Any]]:
    """Return the ways in which a strategy runs on one GPU, by name: on one device, and on two that are the same."""
    places = {f"{strategy}, 1 device": {"strategy": strategy, "nproc": 1}}
    if STRATEGIES[strategy].many_devices and strategy not in NEED_GPUS_APART:
        shared = {"strategy": strategy, "nproc": 2, "share_devices": True}
        places[f"{strategy}, 2 devices that are one GPU"] = shared
    return places


def strategies(checks: Checks) -> None:
    """Check the weights of every strategy: the exact ones against the loop by hand, the others against the CPU."""
    task = Regression()
    by_hand = checks.by_hand(task)
    for strategy, info in STRATEGIES.items():
        for name, place in places_of(strategy).items():
            expected = by_hand
            if not info.is_exact:
                name = f"{name}, as on the CPU"
                own = {key: value for key, value in place.items() if key != "share_devices"}
                expected = checks.weights(checks.train(task, **{**own, **STEPS, "device": "cpu"}))
            checks.same_weights(f"weights: {name}", TO_ROUNDING, expected, task, **place, **STEPS)
    if checks.device == "cuda":
        offloaded = {"strategy": "fsdp", "nproc": 1, "fsdp": {"cpu_offload": True}}
        checks.same_weights("weights: fsdp, offloaded", TO_ROUNDING, by_hand, task, **offloaded, **STEPS)
    divided = places_of("zero1")["zero1, 2 devices that are one GPU"] | {"start": "fork"}
    checks.same_weights("weights: zero1, forked ranks", TO_ROUNDING, by_hand, task, **divided, **STEPS)


def images(checks: Checks) -> None:
    """Check convolutions in channels_last under a fused optimiser against `single`, deterministic and in float32."""
    steps: dict[str, Any] = {"samples": 48, "global_batch_size": 8, "seed": 3, "deterministic": True}
    task = ResNet50(num_samples=48, image_size=64, num_images=48, is_fused=checks.device == "cuda")
    expected = checks.weights(checks.train(task, **ONE, **steps))
    repeated = {"single again": ONE, "single, 2 loader processes": ONE | {"num_workers": 2}}
    alone = {
        strategy: {"strategy": strategy, "nproc": 1} for strategy in ("ddp", "ring_ddp", "naive_ddp", "zero1", "fsdp")
    }
    for name, place in (repeated | alone).items():
        checks.same_weights(f"ResNet-50: {name}", TO_ROUNDING_OF_CONVOLUTIONS, expected, task, **place, **steps)


def kills(checks: Checks) -> None:
    """Check that every exact strategy comes to the same weights when a rank is killed and the run goes on by itself."""
    task = Regression(optimizer="adamw")
    expected = checks.by_hand(task)
    for strategy, info in STRATEGIES.items():
        for name, place in list(places_of(strategy).items())[-1:] if info.is_exact else ():
            faults = checks.path("faults.toml")
            rank = 0 if info.one_process else place["nproc"] - 1
            faults.write_text(f'[[fault]]\nrank = {rank}\nstep = 6\nkind = "kill"\n')
            settings = {**place, **STEPS, "faults": faults, "snapshot_every": 1, "max_restarts": 3}
            checks.same_weights(f"killed: {name}", TO_ROUNDING, expected, task, **settings)


def _resumed(checks: Checks) -> dict[str, torch.Tensor]:
    run = checks.train(Regression(), **ONE, **(STEPS | {"samples": _WHOLE_STEPS}))
    shared = PLACES["ddp, 2 gloo ranks on one GPU"]
    in_child(lambda: dure.train(resume=run, samples=STEPS["samples"], quiet=True, **shared).steps)
    return checks.weights(run)


def _evaluations_differ(checks: Checks) -> float:
    run = checks.train(Regression(), **ONE, **STEPS)
    one = in_child(lambda: dure.evaluate(run, which="last", nproc=1)["metrics"])
    shared = {"nproc": 2, "backend": "gloo", "share_devices": True}
    two = in_child(lambda: dure.evaluate(run, which="last", **shared)["metrics"])
    if any(one[name]["count"] != two[name]["count"] for name in one):
        return float("inf")
    return max(abs(one[name]["value"] - two[name]["value"]) for name in one)


def _poisoned(checks: Checks) -> str:
    try:
        checks.train(Regression(poisoned=3), **PLACES["ddp, 2 gloo ranks on one GPU"], **STEPS)
    except ChildFailed as error:
        return error.kind if "samples" in error.message else str(error)
    return "it trained"


def precisions(checks: Checks) -> None:
    """Check bf16 and fp16, with accumulation too, against autocast and GradScaler by hand."""
    steps = STEPS | {"global_batch_size": 16, "samples": 320}
    task = Regression(dtype="float32", num_samples=64)
    for precision in ("fp32", "bf16", "fp16"):
        for size in (None, 4):
            expected = checks.by_hand(task, **steps, precision=precision, microbatch_size=size)
            for name in ("single", "ddp, 1 rank on NCCL", "ddp, 2 gloo ranks on one GPU"):
                settings = {**PLACES[name], **steps, "precision": precision, "microbatch_size": size}
                label = f"{precision}: {name}, microbatch {size}"
                checks.same_weights(label, IN_HALF[precision], expected, task, **settings)


def large(checks: Checks, options: argparse.Namespace) -> None:
    """Check what snapshots cost a large model, and how long it takes to go on after a kill."""
    sizes = (
        LARGE if options.device == "cuda" else {"width": 32, "layers": 2, "heads": 2, "context": 16, "vocabulary": 64}
    )
    batch = min(16, options.batch)
    settings: dict[str, Any] = {**ONE, "precision": "bf16", "samples": LARGE_STEPS * batch, "global_batch_size": batch}
    task = Text(rows=LARGE_STEPS * batch, **sizes)
    faults = checks.path("faults.toml")
    faults.write_text(f'[[fault]]\nrank = 0\nstep = {KILLED_STEP}\nkind = "kill"\n')
    runs: dict[str, Path] = {}

    def snapshot_ratio() -> float:
        runs["plain"] = checks.train(task, **settings, max_restarts=0)
        runs["killed"] = checks.train(task, **settings, faults=faults)
        plain, killed = (_mean_step(runs[name]) for name in ("plain", "killed"))
        print(f"     {plain * 1000:,.1f} and {killed * 1000:,.1f} ms")
        return killed / plain

    checks.at_most("large model: a step with snapshots / without", MOST_FOR_SNAPSHOTS, snapshot_ratio)
    name = "large model: seconds from a kill to the next step"
    checks.at_most(name, MOST_SECONDS_TO_RECOVER, lambda: _seconds_to_recover(runs["killed"]))
    name = "large model: seconds of the steps that a kill undid"
    checks.at_most(name, MOST_SECONDS_TO_RECOVER, lambda: _seconds_undone(runs["killed"]))


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def _mean_step(run: Path) -> float:
    return statistics.mean(record["wall_seconds"] for record in _lines(run / "rank0.jsonl")[-_LAST_STEPS:])


def _seconds_to_recover(run: Path) -> float:
    """Return the seconds from the kill to the end of the first step after it."""
    (killed,) = (event["time"] for event in _lines(run / "events.jsonl") if event["event"] == "fault")
    return min(record["time"] for record in _lines(run / "rank0.jsonl") if record["time"] > killed) - killed


def _seconds_undone(run: Path) -> float:
    return sum(record["wall_seconds"] for record in _lines(run / "undone.jsonl"))


def memory(checks: Checks, options: argparse.Namespace) -> None:
    """Compare the peak of allocated memory with that of the loop by hand."""
    batch, image_size = min(64, options.batch), options.image_size
    for name in ("single", "ddp, 1 rank on NCCL"):
        checks.at_most(
            f"peak memory, {name}: dure / by hand, ResNet-50, bf16, batch {batch}",
            MOST_MEMORY,
            lambda name=name: _memory_ratio(checks, name, batch, image_size),
        )


def _memory_ratio(checks: Checks, name: str, batch: int, image_size: int) -> float:
    files = checks.path("memory-dure.json"), checks.path("memory-hand.json")
    num_samples = 8 * batch
    task = ResNet50(num_samples=num_samples, image_size=image_size, memory_file=str(files[0]))
    checks.train(task, **PLACES[name], samples=num_samples, global_batch_size=batch, precision="bf16", seed=0)
    device = torch.device(checks.device, 0)
    in_child(lambda: _memory_by_hand(files[1], batch, image_size, device, is_ddp=name.startswith("ddp")))
    ours, hand = (json.loads(file.read_text()) for file in files)
    print(f"     {ours / 2**20:,.0f} MiB and {hand / 2**20:,.0f} MiB")
    return float(ours / max(1, hand))


def _memory_by_hand(file: Path, batch: int, image_size: int, device: torch.device, *, is_ddp: bool) -> None:
    torch.backends.cudnn.benchmark = True
    model = build_resnet50(NUM_CLASSES).to(device, memory_format=torch.channels_last)
    engine: torch.nn.Module = model
    if is_ddp:
        backend = "nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
        engine = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    batches = resnet50_gpu.copied_ahead(resnet50_gpu.host_batches(Images(8 * batch, image_size), batch), device)
    for _ in range(8):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            value = loss(engine, next(batches), torch.channels_last)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    file.write_text(json.dumps(torch.cuda.max_memory_allocated()))


def speed(checks: Checks, options: argparse.Namespace) -> None:
    """Run `resnet50_gpu.py`, whose page is a file of its own."""
    names = ("results", "device", "batch", "image_size", "rounds", "block")
    arguments = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    _compare_with_hand(checks, "ResNet-50", resnet50_gpu.run, arguments, options.results / "resnet50_gpu.json")


def words(checks: Checks, options: argparse.Namespace) -> None:
    """Run `transformer_gpu.py`, whose page is a file of its own."""
    arguments = ["--results", str(options.results), "--device", options.device, "--rounds", str(options.rounds)]
    if options.device != "cuda":
        arguments += ["--width", "32", "--layers", "2", "--heads", "2", "--batch", "2", "--vocabulary", "64"]
    _compare_with_hand(checks, "GPT", transformer_gpu.run, arguments, options.results / "transformer_gpu.json")


def _compare_with_hand(
    checks: Checks, name: str, run: Callable[[list[str]], int], arguments: list[str], file: Path
) -> None:
    def measure() -> float:
        in_child(lambda: run(arguments))
        rows = {row["name"]: row["ratio"] for row in json.loads(file.read_text())["rows"]}
        return rows[resnet50_gpu.HAND] / rows["dure"]

    checks.at_most(f"{name}: the hand-tuned loop's rate / dure's", 1 / resnet50_gpu.LEAST_RATIO, measure)


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _rows(checks: list[Check]) -> Iterator[str]:
    for check in checks:
        yield f"| {'ok' if check.holds else 'FAIL'} | {check.name} | {_shown(check.value)} | {_shown(check.bound)} |\n"


def main() -> int:
    """Run all checks and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--matching", default="", help="only checks whose name contains this text")
    parser.add_argument("--device", default="cuda", help="cpu only tries the script out")
    parser.add_argument("--batch", type=int, default=256, help="images of a ResNet-50 step")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of ResNet-50")
    parser.add_argument("--block", type=int, default=15, help="steps of a round")
    parser.add_argument("--results", type=Path, default=Path(os.environ.get("OUT") or HERE / "results"))
    options = parser.parse_args()
    if options.device == "cuda" and not in_child(torch.cuda.device_count):
        print("gpu-check: there is no CUDA device here, so nothing was checked", file=sys.stderr)
        return 3
    if options.device == "cpu":
        del PLACES["ddp, 1 rank on NCCL"]
        PLACES["ddp, 1 rank on NCCL"] = {"strategy": "ddp", "nproc": 1}
    import_late_parts()
    parts = options.only or PARTS
    beside = {"conformance": conformance, "strategies": strategies, "images": images, "kills": kills}
    beside["precisions"] = precisions
    alone = {"speed": speed, "words": words, "memory": memory, "large": large}
    with tempfile.TemporaryDirectory(prefix="dure-gpu-check-") as folder:
        checks = Checks(Path(folder), options.device, options.matching)
        children = [Child(lambda part=beside[name]: _done_by(part, checks)) for name in beside if name in parts]
        checks.done += [Check(**values) for child in children for values in child.answer()]
        for part in (alone[name] for name in alone if name in parts):
            _write(options.results, checks.done, is_shown=False)
            part(checks, options)
    return _write(options.results, checks.done)


def _done_by(part: Callable[[Checks], None], checks: Checks) -> list[dict[str, Any]]:
    own = Checks(checks.path(part.__name__), checks.device, checks.matching)
    own.folder.mkdir()
    part(own)
    return [asdict(check) for check in own.done]


def _write(results: Path, done: list[Check], *, is_shown: bool = True) -> int:
    num_failed = sum(not check.holds for check in done)
    record: dict[str, Any] = in_child(surroundings)
    record |= {"num_checks": len(done), "num_failed": num_failed, "checks": [asdict(check) for check in done]}
    page = (
        f"# Checks on a GPU\n\n{describe_surroundings(record)}\n\n{len(done) - num_failed} of {len(done)} hold.\n\n"
        f"| | check | value | at most |\n|---|---|---|---|\n{''.join(_rows(done))}"
    )
    write_results(results, "gpu_check", record, page, is_shown=is_shown)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
