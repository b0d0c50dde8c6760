"""Features of training on simulated devices, and the commands that use devices."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dure
from dure.errors import DureError, SpecInvalid, WorkerFailed
from tests.commands import Command
from tests.conformance.cases import TO_ROUNDING, largest_difference, losses_of, train_case, weights_of
from tests.conformance.tasks import Regression
from tests.simulated_cuda.devices import SimulatedDevices, on_devices

pytestmark = pytest.mark.simulated

STEPS = {"global_batch_size": 7, "samples": 70, "clip_norm": 0.4, "seed": 5}
ROOT = Path(__file__).parents[2]
TASK = f"{ROOT / 'tests/conformance/tasks.py'}:Regression"
IN_HALVES = 2e-2
"""Weights of order 0.1 after 10 steps whose gradients are rounded to 8 bits or more."""


def killed_at(folder: Path, step: int, rank: int) -> Path:
    """Write the file of a fault."""
    faults = folder / "faults.toml"
    faults.write_text(f'[[fault]]\nrank = {rank}\nstep = {step}\nkind = "kill"\n')
    return faults


def stopped_run(folder: Path, *arguments: object, **settings: object) -> Path:
    """Train with a checkpoint after every step until a rank is killed, and return the run."""
    with pytest.raises(WorkerFailed, match="was killed"):
        train_case(folder / "stopped", *arguments, checkpoint={"every_samples": 7}, **settings)
    [run] = (folder / "stopped").iterdir()
    return run


# --- random numbers, halves, compression


def check_draws(folder: Path, strategy: str) -> None:
    """Compare runs with dropout: undisturbed, restarted, resumed."""
    task = Regression(layered=True, dropout=0.4)
    nproc = 1 if strategy == "single" else 2
    settings = {"device": "cuda", **STEPS}
    expected = weights_of(train_case(folder, task, strategy, nproc, **settings))
    settings["faults"] = killed_at(folder, 6, 0)
    restarted = train_case(folder, task, strategy, nproc, snapshot_every=1, max_restarts=1, **settings)
    assert largest_difference(weights_of(restarted), expected) == 0.0
    run = stopped_run(folder, task, strategy, nproc, **settings)
    resumed = Path(dure.train(task, resume=run, quiet=True).run)
    assert largest_difference(weights_of(resumed), expected) == 0.0


@pytest.mark.parametrize("strategy", ["single", "dp", "balanced_dp", "model_parallel", "ddp", "pipeline"])
def test_draws_of_every_device_go_on_after_a_restart_and_a_resume(strategy, simulated_devices, tmp_path):
    simulated_devices.call(check_draws, tmp_path, strategy=strategy)


def check_compression(folder: Path, compression: str) -> None:
    """Compare compressed runs on devices, undisturbed, restarted and resumed, with one on the CPU."""
    task = Regression(layered=True)
    settings = {"compression": compression, **STEPS}
    expected = weights_of(train_case(folder, task, "ddp", 2, **settings))
    settings |= {"device": "cuda"}
    assert largest_difference(weights_of(train_case(folder, task, "ddp", 2, **settings)), expected) < TO_ROUNDING
    settings["faults"] = killed_at(folder, 6, 1)
    restarted = train_case(folder, task, "ddp", 2, snapshot_every=1, max_restarts=1, **settings)
    assert largest_difference(weights_of(restarted), expected) < TO_ROUNDING
    resumed = Path(dure.train(task, resume=stopped_run(folder, task, "ddp", 2, **settings), quiet=True).run)
    assert largest_difference(weights_of(resumed), expected) < TO_ROUNDING


@pytest.mark.parametrize("compression", ["topk", "int8", "powersgd"])
def test_compression_keeps_its_errors_on_the_device(compression, simulated_devices, tmp_path):
    simulated_devices.call(check_compression, tmp_path, compression=compression)


def check_precision(folder: Path, precision: str) -> None:
    """Compare runs in halves with one in float32."""
    task = Regression(layered=True, dtype="float32")
    expected = weights_of(train_case(folder, task, **STEPS))
    for strategy, nproc in (("single", 1), ("ddp", 2), ("fsdp", 2), ("dp", 2), ("pipeline", 2)):
        run = train_case(folder, task, strategy, nproc, device="cuda", precision=precision, **STEPS)
        assert largest_difference(weights_of(run), expected) < IN_HALVES, strategy


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_halves_differ_by_their_rounding(precision, simulated_devices, tmp_path):
    simulated_devices.call(check_precision, tmp_path, precision=precision)


class Normalised(Regression):
    """A convolution with BatchNorm over the tokens."""

    def build_model(self) -> nn.Module:
        layers = (nn.Linear(6, 8), nn.Unflatten(1, (5, 1)), nn.Flatten(1, 2), nn.BatchNorm1d(5), nn.Linear(8, 6))
        return nn.Sequential(*layers).to(torch.float64)


@on_devices(2)
def test_synchronised_batchnorm_trains_as_one_process(folder: Path) -> None:
    task = Normalised()
    expected = weights_of(train_case(folder, task, **STEPS))
    for strategy in ("ddp", "ring_ddp"):  # the latter reduces gradients itself, in the order of autograd's calls
        run = train_case(folder, task, strategy, 2, device="cuda", sync_batchnorm=True, **STEPS)
        assert largest_difference(weights_of(run), expected) < TO_ROUNDING, strategy


class Expanded(Regression):
    """A task whose batches hold tensors that `expand` returned."""

    def train_data(self) -> list[Any]:
        data = super().train_data()
        return [data[index] for index in range(len(data))]

    def collate(self, samples: Any) -> Any:
        x, y, mask = (torch.stack(parts) for parts in zip(*samples, strict=True))
        return x[:, :1].expand(-1, x.shape[1], -1), y, mask


@on_devices(2)
def test_batches_that_expand_one_number_over_many_are_copied(folder: Path) -> None:
    expected = weights_of(train_case(folder, Expanded(), **STEPS))
    for num_workers in (0, 1):
        run = train_case(folder, Expanded(), "ddp", 2, device="cuda", num_workers=num_workers, **STEPS)
        assert largest_difference(weights_of(run), expected) < TO_ROUNDING


class Breaking(Regression):
    """A task whose second rank meets a broken device in its sixth step, once."""

    folder: str = ""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        flag = Path(self.folder) / "broken"
        if model.training and torch.cuda.current_device() == 1 and not flag.exists():
            steps = flag.with_name("steps")
            steps.write_text(f"{steps.read_text() if steps.exists() else ''}.")
            if len(steps.read_text()) > 8:
                flag.touch()
                torch.cuda.simulated.break_device(1, "an illegal memory access was encountered")
        return super().loss(model, batch)


@on_devices(2)
def test_rank_with_a_broken_device_starts_again_with_a_fresh_context(folder: Path) -> None:
    expected = weights_of(train_case(folder, Regression(), **STEPS))
    run = train_case(folder, Breaking(folder=str(folder)), "ddp", 2, device="cuda", max_restarts=1, **STEPS)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    [restart] = [event for event in events if event["event"] == "restart"]
    assert restart["rank"] == 1
    assert "an illegal memory access was encountered" in restart["message"]
    assert largest_difference(weights_of(run), expected) < TO_ROUNDING


@on_devices(2)
def test_process_that_starts_the_ranks_uses_no_device(folder: Path) -> None:
    for strategy in ("ddp", "fsdp", "pipeline", "dp"):
        train_case(folder, Regression(layered=True, optimizer="adamw"), strategy, 2, device="cuda", **STEPS)
        assert not torch.cuda.simulated.is_started_here()
        assert not torch.cuda.simulated.is_started_elsewhere()
    assert torch.ones(1, device="cuda").item() == 1.0


# --- memory


@on_devices(2, SIMULATED_GPU_BYTES="1400000")
def test_microbatches_are_halved_until_they_fit(folder: Path) -> None:
    run = train_case(folder, Wide(), "ddp", 2, device="cuda", max_restarts=3, global_batch_size=64, samples=256)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [(event["from"], event["to"]) for event in events if event["event"] == "microbatch_halved"] == [
        (32, 16),
        (16, 8),
    ]
    assert len(losses_of(run)) == 4


class Wide(Regression):
    """A model whose activations do not fit for 32 samples of a rank at once."""

    num_samples: int = 256

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 600), nn.Tanh(), nn.Linear(600, 6)).to(torch.float64)


# --- commands


@on_devices(2)
def test_two_ranks_share_a_device_if_they_are_let(folder: Path) -> None:
    task = Regression(kind="tokens")
    expected = weights_of(train_case(folder, task, **STEPS))
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    with pytest.raises(SpecInvalid, match="nproc is 2"):
        train_case(folder, task, "ddp", 2, device="cuda", **STEPS)
    settings = {"device": "cuda", "share_devices": True, **STEPS}
    # gloo sends no memory of devices: messages between ranks go through that of the host
    for strategy, more in (("ddp", {}), ("ring_ddp", {"comm": "ring"}), ("naive_ddp", {"comm": "tree"})):
        run = train_case(folder, task, strategy, 2, **settings, **more)
        assert largest_difference(weights_of(run), expected) < TO_ROUNDING, strategy
    for strategy in ("fsdp", "pipeline"):
        with pytest.raises(DureError, match="share"):
            train_case(folder, Regression(layered=True), strategy, 2, **settings)


@pytest.fixture
def dure_command(simulated_devices, tmp_path):
    """Return a function that runs a command, expects success and returns its output."""

    def run(*words: object, code: int = 0, devices: int = 2, **environment: str) -> str:
        command = simulated_devices.dure(tmp_path, *words, devices=devices, **environment)
        assert command.code == code, command.out + command.err
        return command.out + command.err

    return run


def test_commands_on_devices(dure_command, tmp_path):
    settings = ("--device", "cuda", "--nproc", 2, "--global-batch-size", 7, "--samples", 35, "--name", "run")
    assert "completed" in dure_command("train", TASK, "--strategy", "ddp", *settings).lower()
    assert json.loads((tmp_path / "runs/run/summary.json").read_text())["status"] == "completed"
    events = map(json.loads, (tmp_path / "runs/run/events.jsonl").read_text().splitlines())
    *_, memory = (event for event in events if event["event"] == "memory")
    assert [device["device"] for rank in memory["ranks"] for device in rank["devices"]] == ["cuda:0", "cuda:1"]
    assert all(0 < device["peak"] <= device["total"] for rank in memory["ranks"] for device in rank["devices"])
    dure_command("eval", "runs/run", "--device", "cuda")
    dure_command("export", "runs/run", "weights.safetensors")
    assert (tmp_path / "weights.safetensors").exists()


def test_bench_and_preflight_on_devices(dure_command):
    shown = dure_command("bench", "--device", "cuda", "--nproc", 2, "--max-bytes", "4KB")
    assert "backend" in shown
    assert "ring" in shown
    words = ("--collectives", "send_recv,reduce_scatter", "--max-bytes", "4KB")
    assert "send_recv" in dure_command("bench", "--device", "cuda", "--nproc", 2, *words)
    shown = dure_command("preflight", "--device", "cuda", "--nproc", 2)
    assert "2 x Simulated GPU, driver 580.65.06 (up to CUDA 13.0)" in shown
    dure_command("preflight", "--device", "cuda", "--nproc", 2, "--share-devices", CUDA_VISIBLE_DEVICES="1")


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        ({"0": {"uncorrected": 3}}, "GPU 0 had 3 memory error(s) that ECC could not mend"),
        ({"1": {"action": 1}}, "GPU 1 must be reset"),
        ({"1": {"free": 10}}, "GPU 1 has 10 B of 16.0 GiB free"),
        ({"0": {"mode": 2}}, "GPU 0 is in compute mode prohibited"),
        ({"1": {"lost": True}}, "GPU 1 is lost and no longer answers on its bus"),
    ],
)
def test_preflight_names_what_is_wrong_with_a_device(reported, words, dure_command):
    settings = ("--device", "cuda", "--nproc", 2)
    shown = dure_command("preflight", *settings, code=3, COLUMNS="200", SIMULATED_NVML=json.dumps(reported))
    assert words in shown


def test_preflight_does_not_mind_a_lost_device_that_the_run_does_not_see(dure_command):
    environment = {"SIMULATED_NVML": json.dumps({"1": {"lost": True}}), "CUDA_VISIBLE_DEVICES": "0"}
    dure_command("preflight", "--device", "cuda", "--nproc", 1, **environment)


def test_ranks_are_spawned_where_only_the_driver_counts_devices(dure_command, tmp_path):
    settings = ("--device", "cuda", "--nproc", 2, "--samples", 35, "--name", "run")
    dure_command("train", TASK, "--strategy", "ddp", *settings, SIMULATED_NVML="0")
    assert json.loads((tmp_path / "runs/run/summary.json").read_text())["status"] == "completed"


class Lost(Breaking):
    """A task whose device is lost for good."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        try:
            return super().loss(model, batch)
        finally:
            if (Path(self.folder) / "broken").exists():
                os.environ["SIMULATED_NVML"] = json.dumps({"1": {"lost": True}})


@on_devices(2)
def test_rank_whose_device_is_lost_is_not_started_again(folder: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"GPU 1 .*is lost"):
        train_case(folder, Lost(folder=str(folder)), "ddp", 2, device="cuda", max_restarts=3, **STEPS)


@pytest.fixture
def launched(simulated_devices, tmp_path):
    """Return a function that starts two ranks as a launcher does, with the devices that each sees, and ends them."""

    def start(visible: tuple[str, str]) -> list[Command]:
        return _launched(simulated_devices, tmp_path, visible)

    return start


def test_ranks_that_see_a_device_each_train_together(launched, tmp_path):
    ranks = launched(("0", "1"))
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    assert json.loads((tmp_path / "runs/run/summary.json").read_text())["status"] == "completed"


def test_ranks_that_see_the_same_device_are_refused(launched):
    ranks = launched(("1", "1"))
    assert [rank.wait() for rank in ranks] == [2, 2]
    assert any("ranks 0, 1 have the same device GPU-5157a7ed" in rank.err for rank in ranks)


def _launched(simulated_devices: SimulatedDevices, tmp_path: Path, visible: tuple[str, str]) -> list[Command]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "one"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = ("train", TASK, "--strategy", "ddp", "--device", "cuda", "--samples", 35, "--name", "run")
    return [
        simulated_devices.start(
            tmp_path, *words, CUDA_VISIBLE_DEVICES=visible[rank], RANK=str(rank), LOCAL_RANK=str(rank), **told
        )
        for rank in range(2)
    ]


def test_too_many_devices_are_refused(dure_command):
    shown = dure_command("train", TASK, "--strategy", "ddp", "--device", "cuda", "--nproc", 3, code=2)
    assert shown.startswith("dure: nproc is 3 but 2 cuda device")


SCRIPT = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import fully_shard
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
for wrap in (DistributedDataParallel, fully_shard):
    model = wrap(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 3, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print("rank", dist.get_rank(), "done")
dist.destroy_process_group()
"""


def test_scripts_with_ddp_and_fsdp_run_on_devices(dure_command, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    shown = dure_command("run", "--nproc", 2, "script.py")
    assert "rank 0 done" in shown
    assert "rank 1 done" in shown
