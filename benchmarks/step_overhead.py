"""Microseconds per step of dure, of the loop by hand and of its peers, alternately in the same processes.

dure runs as it does in `dure train`: the whole Trainer with strategy, loop, records and progress. It leads: after a
block of steps its callback runs the blocks of the others that are due, so that blocks of all candidates come in a
random order.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import step_models
import tiny_model
import torch
import torch.distributed as dist
from paired import HERE, Turns
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dure.cluster.rank import RankInfo
from dure.process.context import Place, StoreAddress
from dure.records.run_dir import RunDir
from dure.spec import RunSpec
from dure.training.session.session import open_rank_group, open_session
from dure.training.session.stop_request import StopSignals
from dure.training.trainer import Trainer

BASELINE = "by hand"
WARM_UP_ROUNDS = 2
Steps = Callable[[int], None]
"""Runs a number of steps."""


class Data:
    """The same tensors for all, and an order for each who asks."""

    def __init__(self, num_samples: int, rank: int, world_size: int, batch: int = tiny_model.BATCH) -> None:
        self.inputs, self.labels = tiny_model.build_data(num_samples)
        self.rank, self.world_size, self.batch = rank, world_size, batch

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The bare data path: a permuted index into tensors."""
        while True:
            order = torch.randperm(len(self.labels))[self.rank :: self.world_size]
            for rows in order.split(self.batch):
                yield self.inputs[rows], self.labels[rows]

    def selected(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same by `index_select`, which few people write and dure uses: 20 us less."""
        while True:
            order = torch.randperm(len(self.labels))[self.rank :: self.world_size]
            for rows in order.split(self.batch):
                yield self.inputs.index_select(0, rows), self.labels.index_select(0, rows)

    def loader(self) -> "DataLoader[Any]":
        """The usual data path: a DataLoader that fetches and collates single samples."""
        data = TensorDataset(self.inputs, self.labels)
        sampler: Any = DistributedSampler(data, self.world_size, self.rank) if self.world_size > 1 else None
        return DataLoader(data, self.batch, shuffle=sampler is None, sampler=sampler)


def by_hand(data: Data, batches: Iterator[Any], *, is_averaged: bool = False) -> Steps:
    """The loop that everybody writes, with DDP where there are two processes."""
    torch.manual_seed(0)
    model = tiny_model.build_model()
    engine = DistributedDataParallel(model) if data.world_size > 1 else model
    optimizer = tiny_model.build_optimizer(model)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            loss = tiny_model.loss(engine, next(batches))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if is_averaged:
                shown = loss.detach()
                dist.all_reduce(shown)
                (shown / data.world_size).item()
            else:
                loss.item()

    return run


class Carrying(nn.Module):
    """The objective with a parameter whose gradient is the loss: what DDP's first bucket carries in dure."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.carrier = nn.Parameter(torch.zeros(4))

    def forward(self, batch: Any) -> Tensor:
        loss = tiny_model.loss(self.model, batch)
        facts = torch.addcmul(torch.tensor([0.0, 64.0, 0.0, 0.0]), torch.tensor([64.0, 0, 0, 0]), loss.detach())
        return loss + torch.dot(self.carrier, facts)


def carrying(data: Data) -> Steps:
    """DDP by hand, the loss averaged over the ranks by travelling in DDP's first bucket."""
    torch.manual_seed(0)
    module = Carrying(tiny_model.build_model())
    engine = DistributedDataParallel(module)
    optimizer = tiny_model.build_optimizer(module.model)
    batches = data.batches()

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            engine(next(batches)).backward()
            facts = module.carrier.grad
            assert facts is not None
            (facts * 2.0).tolist()
            optimizer.step()
            optimizer.zero_grad()
            module.carrier.grad = None

    return run


def accelerate(data: Data) -> Steps:
    """Hugging Face Accelerate, its own wrappers around model, optimiser and backward."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    plain = tiny_model.build_model()
    model, optimizer = accelerator.prepare(plain, tiny_model.build_optimizer(plain))
    batches = data.batches()

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            loss = tiny_model.loss(model, next(batches))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

    return run


def fabric(data: Data) -> Steps:
    """Lightning Fabric, its own wrappers around model, optimiser and backward."""
    from lightning_fabric import Fabric

    torch.manual_seed(0)
    strategy = "ddp" if data.world_size > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=data.world_size, strategy=strategy)
    fabric.launch()
    plain = tiny_model.build_model()
    model, optimizer = fabric.setup(plain, tiny_model.build_optimizer(plain))
    batches = data.batches()

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            loss = tiny_model.loss(model, next(batches))
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

    return run


def candidates(data: Data) -> dict[str, Steps]:
    """Build everybody but dure."""
    found: dict[str, Steps] = {
        BASELINE: by_hand(data, data.batches()),
        "by hand, again (A/A)": by_hand(data, data.batches()),
        "Accelerate": accelerate(data),
        "Lightning Fabric": fabric(data),
        "by hand, index_select": by_hand(data, data.selected()),
        "by hand, DataLoader": by_hand(data, _forever(data.loader())),
    }
    if data.world_size > 1:
        found["by hand, loss averaged"] = by_hand(data, data.batches(), is_averaged=True)
        found["by hand, loss in the bucket"] = carrying(data)
    return found


def reducers(data: Data, name: str) -> dict[str, Steps]:
    """Build the ways to bring gradients together that `ring_ddp` is measured against; the first is the baseline."""
    shared = dist.new_group(backend="cpu:dure_shm")
    return {
        BASELINE: flat_by_hand(data, name),
        "by hand, again (A/A)": flat_by_hand(data, name),
        "torch DDP, bucket view, static graph": torch_ddp(data, name, None),
        "torch DDP over dure_shm": torch_ddp(data, name, shared),
        "compute alone": flat_by_hand(data, name, is_reduced=False),
        "compute alone, ranks in step": flat_by_hand(data, name, is_reduced=False, meeting=shared),
    }


def flat_by_hand(
    data: Data, name: str, *, is_reduced: bool = True, meeting: "dist.ProcessGroup | None" = None
) -> Steps:
    """The fastest loop that one writes by hand: one flat vector of all gradients, one all-reduce on gloo.

    With a `meeting` the ranks wait for each other in every step, over one number: what no way to reduce can be below.
    """
    torch.manual_seed(0)
    model = step_models.build_model(name)
    optimizer = step_models.build_optimizer(model)
    parameters = list(model.parameters())
    batches = data.selected()
    one = torch.zeros(1)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            loss = step_models.loss(model, next(batches))
            loss.backward()
            if is_reduced:
                gradients = [parameter.grad for parameter in parameters]
                flat = torch.cat([gradient.view(-1) for gradient in gradients])
                dist.all_reduce(flat)
                flat /= data.world_size
                parts = flat.split([gradient.numel() for gradient in gradients])
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))
            if meeting is not None:
                dist.all_reduce(one, group=meeting)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

    return run


def torch_ddp(data: Data, name: str, group: "dist.ProcessGroup | None") -> Steps:
    """torch's DDP at its fastest."""
    torch.manual_seed(0)
    model = step_models.build_model(name)
    engine = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, static_graph=True)
    optimizer = step_models.build_optimizer(model)
    batches = data.selected()

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            loss = step_models.loss(engine, next(batches))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

    return run


def _forever(loader: "DataLoader[Any]") -> Iterator[Any]:
    while True:
        yield from loader


def work(job: Mapping[str, Any], place: Place) -> None:
    """Be one of the processes: measure, and write this process's times."""
    world_size, block, num_rounds = place.rank.world_size, job["block"], job["rounds"]
    batch = step_models.BATCHES[job["model"]]
    global_batch = batch * world_size
    num_steps = (num_rounds + WARM_UP_ROUNDS) * block + 2
    spec = RunSpec(
        task=f"{HERE / 'tiny.py'}:Tiny",
        # one epoch, so that no evaluation or checkpoint comes in between
        task_options={"num_samples": (num_steps + 8) * global_batch, "model": job["model"]},
        samples=num_steps * global_batch,
        global_batch_size=global_batch,
        strategy=job["strategy"],
        **job["settings"],
        nproc=world_size,
        device="cpu",
        quiet=True,
    )
    group, devices = open_rank_group(spec, place)
    session = open_session(spec, place, group, devices)
    data = Data(num_steps * global_batch, place.rank.rank, world_size, batch)
    others = candidates(data) if job["strategy"] in ("single", "ddp") else reducers(data, job["model"])
    turns = Turns(others, num_rounds + WARM_UP_ROUNDS, block, before=group.barrier)
    profile: Any = nullcontext()
    if job["profile"]:
        import cProfile

        profile = cProfile.Profile()
    with profile:
        Trainer(session, RunDir.open(Path(job["run"])), StopSignals(is_supervised=False), turns).train()
    if job["profile"]:
        profile.dump_stats(f"{job['profile']}.{place.rank.rank}")
    Path(job["run"], f"seconds{place.rank.rank}.json").write_text(json.dumps(turns.seconds))
    session.strategy.close()
    group.barrier()
    os._exit(0)  # torch's threads may abort an ordinary exit


def measure(
    world_size: int,
    *,
    num_rounds: int,
    block: int,
    profile: str | None = None,
    model: str = "tiny",
    strategy: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, list[float]]:
    """Return each candidate's microseconds per step, one value per round; of several processes the slowest's.

    Beside `ring_ddp` stand other ways to reduce gradients, beside the others the peers of `candidates`.
    """
    with tempfile.TemporaryDirectory(prefix="dure-overhead-") as folder:
        run = RunDir.create(Path(folder), "overhead")
        (run.path / "spec.json").write_text("{}")
        job = {"run": str(run.path), "rounds": num_rounds, "block": block, "profile": profile, "model": model}
        job["strategy"] = strategy or ("ddp" if world_size > 1 else "single")
        job["settings"] = dict(settings or {})
        with socket.create_server(("127.0.0.1", 0)) as listener:
            processes = [_start(job, RankInfo(**_ranks(rank, world_size)), listener) for rank in range(world_size)]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit("a process of the benchmark failed")
        of_ranks = [json.loads((run.path / f"seconds{rank}.json").read_text()) for rank in range(world_size)]
    return {
        name: [1e6 * max(seconds) for seconds in zip(*(one[name][WARM_UP_ROUNDS:] for one in of_ranks), strict=True)]
        for name in of_ranks[0]
    }


def _ranks(rank: int, world_size: int) -> dict[str, int]:
    return {"rank": rank, "local_rank": rank, "world_size": world_size, "local_world_size": world_size}


def _start(job: Mapping[str, Any], rank: RankInfo, listener: socket.socket) -> "subprocess.Popen[bytes]":
    host, port = listener.getsockname()
    told = {**job, "host": host, "port": port, "listen_fd": listener.fileno()}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if rank.world_size > 1:
        # so that the peers, too, take the process group that is there
        launched = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "overhead"}
        environment |= rank.to_environment() | launched
    return subprocess.Popen(
        [sys.executable, __file__, json.dumps(told)],
        env=environment,
        pass_fds=[listener.fileno()],
    )


def main() -> None:
    """Be the process that the arguments and the environment describe."""
    job = json.loads(sys.argv[1])
    rank = RankInfo.from_environment() or RankInfo()
    store = StoreAddress(host=job["host"], port=job["port"], prefix="overhead", listen_fd=job["listen_fd"])
    work(job, Place(rank=rank, store=store, threads=1, is_supervised=False))


if __name__ == "__main__":
    main()
