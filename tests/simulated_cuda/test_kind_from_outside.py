"""Devices of a kind from outside torch: the weights of the CPU's one-process run, or one sentence."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import dure
from dure.errors import EnvironmentLacks, SpecInvalid, WorkerFailed
from dure.host import device_kinds
from dure.host.backends import device_backend
from dure.host.devices import count_accelerators
from dure.strategies.table import STRATEGIES
from tests.conformance.cases import TO_ROUNDING, is_layered, largest_difference, losses_of, train_case, weights_of
from tests.conformance.tasks import Normalised, Regression
from tests.simulated_cuda.devices import BUILD_SECONDS, SimulatedDevices

pytestmark = [pytest.mark.simulated, pytest.mark.timeout(BUILD_SECONDS)]

KIND, BACKEND = "fieldgpu", "fieldccl"
STEPS = {"global_batch_size": 7, "samples": 70, "clip_norm": 0.4, "seed": 5}
EXACT = [name for name, info in STRATEGIES.items() if info.is_exact]
TASK = f"{Path(__file__).parents[1] / 'conformance/tasks.py'}:Regression"
IN_HALVES = 2e-2
"""Weights of order 0.1 after 10 steps whose gradients are rounded to 8 bits or more."""


def killed_at(folder: Path, step: int, rank: int) -> Path:
    """Write the file of a fault."""
    faults = folder / f"faults{step}.toml"
    faults.write_text(f'[[fault]]\nrank = {rank}\nstep = {step}\nkind = "kill"\n')
    return faults


# --- training


def check_there_and_back(folder: Path, strategy: str) -> None:
    """Train on devices, then on the CPU, then on devices again, and compare with an undisturbed process on the CPU."""
    task = Regression(kind="tokens", optimizer="adamw", layered=is_layered(strategy))
    expected = weights_of(train_case(folder, task, **STEPS))
    nproc = 2 if STRATEGIES[strategy].many_devices else 1
    last = 0 if STRATEGIES[strategy].one_process else nproc - 1
    settings = {"num_workers": 1, "microbatch_size": 2, "checkpoint": {"every_samples": 7}, **STEPS}
    faults = killed_at(folder, 4, last)
    with pytest.raises(WorkerFailed, match="was killed"):
        train_case(folder / "stopped", task, strategy, nproc, device=KIND, faults=faults, **settings)
    [run] = (folder / "stopped").iterdir()
    with pytest.raises(WorkerFailed, match="was killed"):
        dure.train(task, resume=run, device="cpu", faults=killed_at(folder, 7, last), quiet=True)
    dure.train(task, resume=run, device=KIND, faults=None, quiet=True)
    assert largest_difference(weights_of(run), expected) < TO_ROUNDING


@pytest.mark.parametrize("strategy", EXACT)
def test_weights_of_a_run_that_moves_between_devices_and_the_cpu(strategy, devices_from_outside, tmp_path):
    devices_from_outside.call(check_there_and_back, tmp_path, strategy=strategy)


def check_draws(folder: Path, strategy: str) -> None:
    """Compare runs with dropout: undisturbed, and restarted from a snapshot."""
    task = Regression(layered=True, dropout=0.4)
    settings = {"device": KIND, **STEPS}
    nproc = 1 if strategy == "single" else 2
    expected = weights_of(train_case(folder, task, strategy, nproc, **settings))
    settings["faults"] = killed_at(folder, 6, 0)
    restarted = train_case(folder, task, strategy, nproc, snapshot_every=1, max_restarts=1, **settings)
    assert largest_difference(weights_of(restarted), expected) == 0.0


@pytest.mark.parametrize("strategy", ["single", "ddp", "dp", "fsdp"])
def test_draws_of_devices_go_on_after_a_restart(strategy, devices_from_outside, tmp_path):
    devices_from_outside.call(check_draws, tmp_path, strategy=strategy)


def check_features(folder: Path) -> None:
    """Compare runs with halves, BatchNorm, compression and averaged replicas with those of the CPU."""
    task = Regression(layered=True, dtype="float32")
    expected = weights_of(train_case(folder, task, **STEPS))
    for precision in ("bf16", "fp16"):
        run = train_case(folder, task, "ddp", 2, device=KIND, precision=precision, **STEPS)
        assert largest_difference(weights_of(run), expected) < IN_HALVES, precision
    cases = (
        (Normalised(), "ddp", {"sync_batchnorm": True}),
        (Normalised(), "fsdp", {}),
        (Regression(layered=True), "ddp", {"compression": "int8"}),
        (Regression(), "averaging", {}),
        (Regression(), "diloco", {}),
    )
    for task, strategy, settings in cases:
        on_cpu = weights_of(train_case(folder, task, strategy, 2, **settings, **STEPS))
        run = train_case(folder, task, strategy, 2, device=KIND, **settings, **STEPS)
        assert largest_difference(weights_of(run), on_cpu) < TO_ROUNDING, (strategy, settings)


def test_features_of_training(devices_from_outside, tmp_path):
    devices_from_outside.call(check_features, tmp_path)


class Wide(Regression):
    """A model whose activations do not fit for 32 samples of a rank at once."""

    num_samples: int = 256

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 600), nn.Tanh(), nn.Linear(600, 6)).to(torch.float64)


def check_memory(folder: Path) -> None:
    """Train with less memory than a step needs at once."""
    run = train_case(folder, Wide(), "ddp", 2, device=KIND, max_restarts=3, global_batch_size=64, samples=256)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["to"] for event in events if event["event"] == "microbatch_halved"] == [16, 8]
    assert len(losses_of(run)) == 4


def test_microbatches_are_halved_until_they_fit(devices_from_outside, tmp_path):
    devices_from_outside.call(check_memory, tmp_path, environment={"SIMULATED_GPU_BYTES": "1400000"})


class Breaking(Regression):
    """A task whose second rank meets a broken device in its sixth step, once."""

    folder: str = ""

    def loss(self, model: nn.Module, batch: object) -> object:
        flag = Path(self.folder) / "broken"
        if model.training and torch.accelerator.current_device_index() == 1 and not flag.exists():
            steps = flag.with_name("steps")
            steps.write_text(f"{steps.read_text() if steps.exists() else ''}.")
            if len(steps.read_text()) > 8:
                flag.touch()
                torch.fieldgpu.simulated.break_device(1, "the queue was lost")
        return super().loss(model, batch)


def check_broken(folder: Path) -> None:
    """Break a device once, and for good."""
    expected = weights_of(train_case(folder, Regression(), **STEPS))
    run = train_case(folder, Breaking(folder=str(folder)), "ddp", 2, device=KIND, max_restarts=1, **STEPS)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    [restart] = [event for event in events if event["event"] == "restart"]
    assert restart["rank"] == 1
    assert "FieldGPU error: the queue was lost (its device failed, or a kernel on it did)" in restart["message"]
    assert largest_difference(weights_of(run), expected) < TO_ROUNDING
    (folder / "broken").unlink()
    (folder / "steps").unlink()
    with pytest.raises(
        WorkerFailed, match=r"the queue was lost .* run it once more, and if it fails again look at the"
    ):
        train_case(folder, Breaking(folder=str(folder)), "ddp", 2, device=KIND, **STEPS)


def test_rank_with_a_broken_device_starts_again_or_says_what_failed(devices_from_outside, tmp_path):
    devices_from_outside.call(check_broken, tmp_path)


# --- the process that starts the ranks


def check_start(folder: Path) -> None:
    """Start ranks from a process whose count of devices would take them from its children."""
    expected = weights_of(train_case(folder, Regression(), **STEPS))
    settings = {**STEPS, "device": "auto"}
    for strategy in ("ddp", "fsdp", "pipeline", "dp"):
        run = train_case(folder, Regression(layered=True, optimizer="adamw"), strategy, 2, **settings)
        assert json.loads((run / "summary.json").read_text())["device"] == KIND
        assert not torch.fieldgpu.simulated.is_started_here()
        assert not torch.fieldgpu.simulated.is_started_elsewhere()
    assert torch.ones(1, device=KIND).item() == 1.0
    assert device_kinds.reason_fork_would_lose_devices() == "fieldgpu is in use in this process"
    spawned = weights_of(train_case(folder, Regression(), "ddp", 2, **{**settings, "start": "auto"}))
    assert largest_difference(spawned, expected) < TO_ROUNDING
    with pytest.raises(EnvironmentLacks, match="start is fork but fieldgpu is in use in this process"):
        train_case(folder, Regression(), "ddp", 2, **settings)


def test_process_that_starts_the_ranks_uses_no_device(devices_from_outside, tmp_path):
    devices_from_outside.call(check_start, tmp_path)


def check_count(folder: Path) -> None:
    """Ask torch for the number of devices, as a task may, and look what dure says of a fork."""
    assert torch.fieldgpu.device_count() == 2
    reason = "fieldgpu was asked for in this process (torch.fieldgpu.is_available() is enough)"
    assert device_kinds.reason_fork_would_lose_devices() == reason
    assert count_accelerators(KIND) == 2


def test_count_by_others_is_a_reason_not_to_fork(devices_from_outside, tmp_path):
    devices_from_outside.call(check_count, tmp_path)


# --- abilities


def check_abilities(folder: Path) -> None:
    """Try what is not known of a kind, as it is and where it is missing."""
    assert device_backend(KIND) == BACKEND
    attempts = (device_kinds.copies_beside, device_kinds.has_timed_events, device_kinds.has_float64)
    assert [can(KIND) for can in attempts] == [True] * 3
    device_kinds._can.cache_clear()

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("this kind has none")

    torch.Stream = torch.Event = torch.ones = refuse  # in this process only
    assert [can(KIND) for can in attempts] == [False] * 3


def test_abilities_are_tried(devices_from_outside, tmp_path):
    devices_from_outside.call(check_abilities, tmp_path)


class Poor(Regression):
    """A task for devices without pinned memory, streams, events that measure time, float64 and facts about memory."""

    def build_model(self) -> nn.Module:
        device_kinds._can = lambda name, attempt: False
        device_kinds.memory_of = lambda device: None
        return super().build_model()


def check_poor(folder: Path) -> None:
    """Train on devices that can do little; sums are in float32 there."""
    task = Poor(layered=True)
    expected = weights_of(train_case(folder, Regression(layered=True), **STEPS))
    for strategy in ("ddp", "fsdp", "pipeline", "balanced_dp"):
        run = train_case(folder, task, strategy, 2, device=KIND, snapshot_every=1, **STEPS)
        assert largest_difference(weights_of(run), expected) < 1e-6, strategy


def test_devices_that_can_do_little_train_too(devices_from_outside, tmp_path):
    devices_from_outside.call(check_poor, tmp_path)


# --- commands and refusals


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--strategy ddp --nproc 3", "nproc is 3 but 2 fieldgpu device(s) are visible: use --nproc 2 or --device cpu"),
        ("--device fieldgpu:1", "device is 'fieldgpu:1' but must be a kind, without a number: use --device fieldgpu"),
        (
            "--device gpu",
            "device is 'gpu' but torch knows no accelerator of this name here: use --device fieldgpu, cpu",
        ),
        (
            "--device cuda",
            "--device cuda but this machine shows no cuda device, and this torch is built for fieldgpu: use --device "
            "fieldgpu, cpu or auto",
        ),
        (
            "--strategy ddp --nproc 2 --backend nccl",
            "backend is nccl, which moves CUDA tensors only, but device is fieldgpu: use fieldccl",
        ),
        (
            "--strategy ddp --nproc 2 --share-devices",
            "the ranks of ddp exchange fieldgpu tensors, which gloo does not move: give every rank a device of its own",
        ),
        ("--strategy ddp --nproc 2 --backend foo", "unknown backend 'foo': known here: auto, gloo, dure_shm, fieldccl"),
        (
            "--strategy parameter_server --nproc 2 --backend fieldccl",
            "backend is fieldccl, which moves no CPU tensors, but servers are CPU processes: leave it out",
        ),
        (
            "--device cpu --strategy ddp --nproc 2 --backend fieldccl",
            "backend is fieldccl, which moves fieldgpu tensors only, but device is cpu: use gloo",
        ),
        ("--compile", "torch.compile generates no code for fieldgpu devices: leave --compile out"),
    ],
)
def test_what_devices_from_outside_cannot_is_refused_before_training(words, sentence, devices_from_outside, tmp_path):
    command = devices_from_outside.dure(tmp_path, "train", TASK, "--samples", 35, *words.split())
    assert command.err.startswith(f"dure: {sentence}"), command.err
    assert command.err.count("\n") == 1
    assert command.code == (3 if "cuda" in words else 2)
    assert not (tmp_path / "runs").exists()


def check_precision(folder: Path) -> None:
    """Ask for halves of a kind whose module has none, or one of them."""
    told = torch.fieldgpu.get_amp_supported_dtype
    torch.fieldgpu.get_amp_supported_dtype = lambda: [torch.bfloat16]
    with pytest.raises(SpecInvalid, match="precision is fp16, but autocast on fieldgpu devices has bf16: use bf16 or"):
        train_case(folder, Regression(), device=KIND, precision="fp16", **STEPS)
    del torch.fieldgpu.get_amp_supported_dtype
    with pytest.raises(SpecInvalid, match=r"precision is bf16, but autocast on .* has no half precision: use fp32"):
        train_case(folder, Regression(), device=KIND, precision="bf16", **STEPS)
    torch.fieldgpu.get_amp_supported_dtype = told


def test_halves_that_autocast_lacks_are_refused(devices_from_outside, tmp_path):
    devices_from_outside.call(check_precision, tmp_path)


def test_commands_on_devices_from_outside(devices_from_outside: SimulatedDevices, tmp_path: Path) -> None:
    def run(*words: object) -> str:
        command = devices_from_outside.dure(tmp_path, *words)
        assert command.code == 0, command.out + command.err
        return command.out + command.err

    run("train", TASK, "--strategy", "ddp", "--nproc", 2, "--samples", 35, "--name", "run", "--preflight")
    assert json.loads((tmp_path / "runs/run/summary.json").read_text())["status"] == "completed"
    run("eval", "runs/run", "--device", KIND)
    assert BACKEND in run("bench", "--nproc", 2, "--max-bytes", "64", "--no-record")
    assert f"2 ranks over {BACKEND}: sums right" in " ".join(run("preflight").split())
    (tmp_path / "script.py").write_text("import os; print('rank', os.environ['RANK'])")
    assert "rank 1" in run("run", "--nproc", "gpu", "script.py")
    few = devices_from_outside.dure(tmp_path, "preflight", "--nproc", 2, FIELDGPU_VISIBLE_DEVICES="1")
    assert few.code == 3
    assert "torch sees 1 fieldgpu device(s), but the run needs 2" in few.out
