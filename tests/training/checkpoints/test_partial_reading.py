"""A rank reads of a checkpoint what it needs: the same values, all of them checked, and little else in memory."""

import ctypes
import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import dure
from dure.comm.groups import Solo
from dure.errors import CheckpointDamaged
from dure.strategies.state.optimizer import optimizer_to_names
from dure.strategies.state.tensor_shard import Needs, Rectangle, TensorShard
from dure.training.checkpoints import tensor_stream
from dure.training.checkpoints.reader import Checkpoint
from dure.training.checkpoints.state import Snapshot
from dure.training.run_state.capture import Progression
from dure.training.run_state.snapshot_policy import MemorySaver
from tests.conformance.cases import train_case
from tests.conformance.tasks import Regression
from tests.training.checkpoints import malice
from tests.training.checkpoints.checkpoint_cases import ThreadGroup, at, flip_bit, new_store, save
from tests.training.snapshots.test_snapshot_state import Net, momentum, session_of

WHOLE = torch.arange(5 * 7 * 3.0).reshape(5, 7, 3)


def in_rows(root: Path, world_size: int, whole: Tensor = WHOLE) -> Path:
    """Save a tensor in rows, and state of its shape and of another one."""

    def work(group: Any) -> Any:
        rows = whole.tensor_split(world_size)
        begin = sum(len(part) for part in rows[: group.rank])

        def piece(factor: float) -> TensorShard:
            return TensorShard(
                tensor=rows[group.rank] * factor, offsets=(begin, *(0,) * (whole.dim() - 1)), shape=tuple(whole.shape)
            )

        state = {"w": {"sum": piece(2), "step": torch.tensor(3)}, "other": {"sum": torch.ones(2)}}
        snapshot = Snapshot(model={"w": piece(1), "other": torch.zeros(2)}, optimizer={"state": state})
        return save(new_store(root)[0], snapshot, at(8), group)

    return Path(ThreadGroup(world_size).run(work)[-1].path)


PARTS = [
    Rectangle((0, 0, 0), (5, 7, 3)),
    Rectangle((2, 0, 0), (3, 7, 3)),
    Rectangle((0, 2, 0), (5, 2, 3)),
    Rectangle((1, 1, 1), (3, 4, 1)),
    Rectangle((4, 6, 2), (1, 1, 1)),
    Rectangle((2, 0, 0), (0, 7, 3)),
]


@pytest.mark.parametrize("block_bytes", [4, 20, 100, 2**20])
@pytest.mark.parametrize("world_size", [1, 3])
def test_part_when_read_is_that_of_the_whole(world_size, block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_stream, "BLOCK_BYTES", block_bytes)
    path = in_rows(tmp_path, world_size)
    for part in PARTS:
        found = Checkpoint.read(path, needs=Needs(model={"w": part}, optimizer={"w": part}))
        slices = part.within(Rectangle.of_whole(WHOLE.shape))
        assert torch.equal(found._saved("model", "w").part(part), WHOLE[slices])
        saved = found._optimizer(lambda saved: saved)["state"]
        assert torch.equal(saved["w"]["sum"].part(part), 2 * WHOLE[slices])
        assert saved["w"]["step"].whole() == 3
        with pytest.raises(RuntimeError, match="0 of 2 items of a saved tensor have been read"):
            saved["other"]["sum"].whole()


def test_file_when_nothing_of_it_is_needed_is_not_read_and_any_other_is_checked_to_its_end(tmp_path):
    path = in_rows(tmp_path, 3)
    first_rows = Needs(model={"w": Rectangle((0, 0, 0), (2, 7, 3))}, optimizer={})
    flip_bit(path / "model-00002.safetensors", 8 * 200)
    Checkpoint.read(path, needs=first_rows)
    size = (path / "model.safetensors").stat().st_size
    for bit in (0, 8 * (size - 1)):
        flip_bit(path / "model.safetensors", bit)
        with pytest.raises(CheckpointDamaged, match=r"model\.safetensors was altered"):
            Checkpoint.read(path, needs=first_rows)
        flip_bit(path / "model.safetensors", bit)


def test_weights_when_only_they_are_read_then_the_optimizers_state_need_not_be_right(tmp_path):
    path = in_rows(tmp_path, 1)
    malice.state_of_a_tensor_that_is_not_there(path)
    needs = Needs(model={"w": PARTS[0]}, optimizer={"w": PARTS[0]})
    for used in (None, needs):
        found = Checkpoint.read(path, weights_only=True, needs=used)
        assert torch.equal(found._saved("model", "w").whole(), WHOLE)
        with pytest.raises(CheckpointDamaged, match=r"state\.json is not what dure writes: KeyError\('nowhere'\)"):
            Checkpoint.read(path, needs=used)


@pytest.fixture
def peak_bytes() -> Callable[[Callable[[], Any]], int]:
    """Give what measures how much larger the process was at most, while it did something."""
    # each large tensor in memory of its own: holes in a heap count too, and depend on what was freed before
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**17)

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))

    def measured(action: Callable[[], Any]) -> int:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        before = status("VmRSS")
        action()
        return status("VmHWM") - before

    return measured


MIB = 2**20
M_MMAP_THRESHOLD = -3
"""Parameter of `mallopt`; its default is adapted to what is freed, a value that is set is not."""


def test_part_when_it_is_an_eighth_takes_an_eighth_of_the_memory(tmp_path, peak_bytes):
    path = in_rows(tmp_path, 2, torch.zeros(64, MIB // 4))
    part = Rectangle((28, 0), (8, MIB // 4))
    needs = Needs(model={"w": part}, optimizer={"w": part})
    held = []
    # a part of both files of 32 MiB each, of model and optimiser
    grown = peak_bytes(lambda: held.append(Checkpoint.read(path, needs=needs)))
    assert grown < 2 * 8 * MIB + 2 * tensor_stream.BLOCK_BYTES + 4 * MIB


def test_checkpoint_when_loaded_whole_is_not_in_memory_twice(tmp_path, peak_bytes):
    def build() -> tuple[nn.Module, AdamW]:
        model = nn.ParameterList(nn.Parameter(torch.zeros(MIB)) for _ in range(8))
        return model, AdamW(model.parameters())

    model, optimizer = build()
    for parameter in model.parameters():
        state = {"exp_avg": torch.zeros(MIB), "exp_avg_sq": torch.zeros(MIB), "step": torch.tensor(1.0)}
        optimizer.state[parameter] = state
    snapshot = Snapshot(model=model.state_dict(), optimizer=optimizer_to_names(model, optimizer))
    path = save(new_store(tmp_path)[0], snapshot, at(8), Solo()).path
    model, optimizer = build()

    def load() -> None:
        checkpoint = Checkpoint.read(path)
        checkpoint.load_model(model)
        checkpoint.load_optimizer(model, optimizer)

    # weights of 32 MiB and state of 64: the state is held while it moves, tensor by tensor
    assert peak_bytes(load) < (32 + 64 + 2 * 4) * MIB + 2 * tensor_stream.BLOCK_BYTES + 4 * MIB


def held_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    return {
        part: sum(piece.tensor.nbytes for pieces in tensors.values() for piece in pieces)
        for part, tensors in checkpoint._held.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "model", "optimizer"),
    [("fsdp", 0.7, 0.7), ("zero1", 1.0, 0.7), ("parameter_server", 1.0, 0.7), ("pipeline", 0.7, 0.7)],
)
def test_ranks_when_they_resume_hold_their_own_part(strategy, model, optimizer, tmp_path, monkeypatch):
    more = {"servers": 2} if strategy == "parameter_server" else {}
    run = train_case(tmp_path, Regression(optimizer="adamw", layered=True), strategy, 2, samples=44, **more)
    (path,) = (run / "checkpoints").glob("samples-*")
    whole = held_bytes(Checkpoint.read(path))
    read = Checkpoint.read

    def noted(path: Path, *, rank: int = 0, **more: Any) -> Checkpoint:
        found = read(path, rank=rank, **more)
        (tmp_path / f"held-{rank}.json").write_text(json.dumps(held_bytes(found)))
        return found

    monkeypatch.setattr(Checkpoint, "read", noted)
    dure.train(resume=run, samples=88, start="fork", quiet=True)
    held = [json.loads(file.read_text()) for file in tmp_path.glob("held-*.json")]
    assert len(held) == 2 + len(more) * 2
    assert max(one["model"] for one in held) <= model * whole["model"]
    assert max(one["optimizer"] for one in held) <= optimizer * whole["optimizer"]


def test_session_when_put_back_from_memory_shares_none_of_it():
    descriptor = os.memfd_create("snapshots")
    session, other = (session_of(Net(), momentum()) for _ in range(2))
    for one in (session, other):
        one.spec = SimpleNamespace(seed=0)
    model, optimizer = session.strategy.model, session.strategy.optimizer
    optimizer.state["shared"] = torch.ones(3)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    saver = MemorySaver(session, Progression(step=1, samples_seen=8), [descriptor], 1, pytest.fail)
    assert saver.is_due()
    saver.take(lambda: None)
    again = MemorySaver(other, Progression(), [descriptor], 1, pytest.fail)
    found = again.newest(lambda ranks, samples: True)
    again.load(found)
    # the next round's snapshots are written over it
    os.pwrite(descriptor, b"\xff" * os.fstat(descriptor).st_size, 0)
    assert all(
        torch.equal(value, other.strategy.model.state_dict()[name]) for name, value in model.state_dict().items()
    )
    mine, theirs = optimizer.state, other.strategy.optimizer.state
    assert torch.equal(theirs["shared"], torch.ones(3))
    pairs = zip(model.parameters(), other.strategy.model.parameters(), strict=True)
    for (p, q), key in product(pairs, ("momentum_buffer",)):
        assert torch.equal(mine[p][key], theirs[q][key])
    os.close(descriptor)
