"""Checks that need a GPU: `make gpu-check`. Core dependencies only, no network.

Weights against a loop by hand on the GPU: one rank on NCCL, two gloo ranks that share the GPU, two replicas in one
process; every strategy, undisturbed and with a rank killed; bf16 and fp16; peak memory; and `resnet50_gpu.py`. Each
part by itself (`--only NAME`) is meant to take less than ten minutes. Writes gpu_check.md and .json to
benchmarks/results, or to $OUT. Exits 0 when all holds, 1 when something does not, 3 where there is no CUDA device.
"""

import argparse
import json
import os
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
from gpu_tasks import Regression
from images_task import NUM_CLASSES, Images, ResNet50, loss
from paired import HERE, describe_surroundings, surroundings, write_results
from resnet50 import build_resnet50
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

import dure
from dure.strategies.table import STRATEGIES
from dure.torchcompat import import_late_parts

STEPS: dict[str, Any] = {"global_batch_size": 7, "samples": 130, "clip_norm": 0.4, "seed": 5}
"""20 steps: six whole batches of 7 and one of two samples to an epoch, which no two devices share evenly."""
_WHOLE_STEPS = 58
"""Number of samples in an epoch and two whole batches."""
TO_ROUNDING = 1e-10
"""Float64 sums in another order differ by about 1e-16 each; 20 steps amplify that little."""
IN_HALF = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
"""Weights of order 0.1 after 20 steps whose gradients are rounded to 24, 8 and 11 bits in another order."""
MOST_MEMORY = 1.03

PARTS = ["conformance", "strategies", "kills", "precisions", "memory", "speed"]
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

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.device = device
        self.done: list[Check] = []
        self._number = 0

    def at_most(self, name: str, bound: float, measure: Callable[[], float]) -> None:
        """Check that a measured number is at most `bound`."""
        self._check(name, bound, measure, lambda value: value <= bound)

    def equal(self, name: str, expected: str, measure: Callable[[], str]) -> None:
        """Check that what happens is what is expected."""
        self._check(name, expected, measure, lambda value: value == expected)

    def _check(self, name: str, bound: Any, measure: Callable[[], Any], holds: Callable[[Any], bool]) -> None:
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


def in_child(call: Callable[[], Any]) -> Any:
    """Run something that uses CUDA in a forked process and return its answer; this one must stay without CUDA.

    Raises:
        ChildFailed: The call raised, or the process died.
    """
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as file:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                answer = {"answer": call()}
            except BaseException as error:
                if not isinstance(error, dure.DureError):
                    traceback.print_exc()
                answer = {"kind": type(error).__name__, "message": str(error)}
            Path(file.name).write_text(json.dumps(answer), encoding="utf-8")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        answer = json.loads(file.read() or "{}")
    if "answer" not in answer:
        died = f"the process ended with {os.waitstatus_to_exitcode(status)}"
        raise ChildFailed(answer.get("kind", "died"), answer.get("message", died))
    return answer["answer"]


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference of two sets of weights; infinite where one is no number."""
    assert one.keys() == other.keys()
    worst = max(float((one[name] - other[name]).abs().max()) for name in one)
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


def memory(checks: Checks, batch: int, image_size: int) -> None:
    """Compare the peak of allocated memory with that of the loop by hand."""
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
    file = options.results / "resnet50_gpu.json"

    def measure() -> float:
        names = ("results", "device", "batch", "image_size", "rounds", "block")
        arguments = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
        in_child(lambda: resnet50_gpu.run(arguments))
        rows = {row["name"]: row["ratio"] for row in json.loads(file.read_text())["rows"]}
        return rows[resnet50_gpu.HAND] / rows["dure"]

    checks.at_most("ResNet-50: the hand-tuned loop's images/s / dure's", 1 / resnet50_gpu.LEAST_RATIO, measure)


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _rows(checks: list[Check]) -> Iterator[str]:
    for check in checks:
        yield f"| {'ok' if check.holds else 'FAIL'} | {check.name} | {_shown(check.value)} | {_shown(check.bound)} |\n"


def main() -> int:
    """Run all checks and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append")
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
    with tempfile.TemporaryDirectory(prefix="dure-gpu-check-") as folder:
        checks = Checks(Path(folder), options.device)
        for part in (conformance, strategies, kills, precisions):
            if part.__name__ in parts:
                part(checks)
        if "memory" in parts:
            memory(checks, min(64, options.batch), options.image_size)
        if "speed" in parts:
            speed(checks, options)
    return _write(options.results, checks.done)


def _write(results: Path, done: list[Check]) -> int:
    num_failed = sum(not check.holds for check in done)
    record: dict[str, Any] = in_child(surroundings)
    record |= {"num_checks": len(done), "num_failed": num_failed, "checks": [asdict(check) for check in done]}
    page = (
        f"# Checks on a GPU\n\n{describe_surroundings(record)}\n\n{len(done) - num_failed} of {len(done)} hold.\n\n"
        f"| | check | value | at most |\n|---|---|---|---|\n{''.join(_rows(done))}"
    )
    write_results(results, "gpu_check", record, page)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
