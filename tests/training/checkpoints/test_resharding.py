"""Tensors saved in pieces: any cut is put together again, and read as any other cut."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dure.comm.groups import ProcessGroup, Solo
from dure.errors import CheckpointDamaged
from dure.strategies.state.optimizer import optimizer_to_names
from dure.strategies.state.tensor_shard import TensorShard
from dure.training.checkpoints.manifest import seal
from dure.training.checkpoints.reader import Checkpoint, verify
from dure.training.checkpoints.state import Snapshot
from tests.comm.gloo_ranks import on_ranks
from tests.training.checkpoints.checkpoint_cases import ThreadGroup, at, new_store, save

WHOLE = torch.arange(35.0).reshape(5, 7)


def _save_in_rows(root: Path, world_size: int) -> Path:
    """Save a tensor cut into rows, an uneven cut with more ranks than rows included, beside a replicated one."""

    def work(group) -> object:
        rows = torch.tensor_split(WHOLE, world_size)
        offset = sum(len(part) for part in rows[: group.rank])
        replicated = TensorShard(tensor=torch.ones(2), offsets=(0,), shape=(2,))
        model = {
            "w": TensorShard(tensor=rows[group.rank], offsets=(offset, 0), shape=(5, 7)),
            "replicated": replicated,
            "plain": torch.tensor(3),
        }
        state = {"state": {"w": {"sum": TensorShard(tensor=rows[group.rank] * 2, offsets=(offset, 0), shape=(5, 7))}}}
        return save(new_store(root)[0], Snapshot(model=model, optimizer=state), at(8), group)

    answers = ThreadGroup(world_size).run(work)
    return answers[-1].path


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_tensor_when_saved_in_pieces_is_put_together(tmp_path, world_size):
    checkpoint = Checkpoint.read(_save_in_rows(tmp_path, world_size), rank=0)
    assert torch.equal(checkpoint.weights()["w"], WHOLE)
    assert torch.equal(checkpoint.optimizer["state"]["w"]["sum"], WHOLE * 2)
    assert len(checkpoint.manifest.model["w"].pieces) == min(world_size, 5)
    assert len(checkpoint.manifest.model["replicated"].pieces) == 1


def test_checkpoint_when_a_piece_is_left_out_is_refused(tmp_path):
    path = _save_in_rows(tmp_path, 2)
    manifest = verify(path)
    entry = manifest.model["w"].model_copy(update={"pieces": manifest.model["w"].pieces[:1]})
    (path / "manifest.json").write_bytes(seal(manifest.model_copy(update={"model": {**manifest.model, "w": entry}})))
    with pytest.raises(CheckpointDamaged, match=r"contradicts itself: w: pieces of 21 items for 35"):
        Checkpoint.read(path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_pieces_when_read_by_torchs_distributed_checkpoint_are_the_same(tmp_path):
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    found = {"w": torch.zeros(5, 7)}
    path = _save_in_rows(tmp_path, 3)
    load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert torch.equal(found["w"], WHOLE)


def _steps_of_fsdp(num_ranks: int, root: Path, path: Path | None = None) -> tuple[Path, dict[str, torch.Tensor]]:
    """Make a step and a checkpoint, or read one, and return the weights after the step behind it."""

    def work(group: ProcessGroup) -> tuple[Path, dict[str, torch.Tensor]]:
        torch.manual_seed(group.rank if path else 0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
        fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(seed: int) -> None:
            inputs = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        if path:
            checkpoint = Checkpoint.read(path, rank=group.rank)
            checkpoint.load_model(model)
            checkpoint.load_optimizer(model, optimizer)
        else:
            step(0)
            snapshot = Snapshot(model=model.state_dict(), optimizer=optimizer_to_names(model, optimizer))
        saved = path or save(new_store(root)[0], snapshot, at(4), group).path
        step(1)
        return saved, {name: value.full_tensor() for name, value in model.state_dict().items()}

    return on_ranks(num_ranks, work)[0]


def test_fsdp_when_saved_on_two_ranks_continues_the_same_on_one_and_three(tmp_path):
    path, after = _steps_of_fsdp(2, tmp_path)
    assert len(verify(path).model["0.weight"].pieces) == 2
    for num_ranks in (1, 3):
        _, resumed = _steps_of_fsdp(num_ranks, tmp_path, path)
        # sums of gradients over another number of ranks round differently: float64 leaves 1e-12
        for name, values in after.items():
            assert resumed[name].flatten().tolist() == pytest.approx(values.flatten().tolist(), abs=1e-12)


def test_fsdp_checkpoint_when_loaded_into_the_plain_model_fits(tmp_path):
    path = _save_in_rows(tmp_path, 2)
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.zeros(5, 7)))
    model.register_buffer("replicated", torch.zeros(2))
    model.register_buffer("plain", torch.tensor(0))
    Checkpoint.read(path).load_model(model)
    assert torch.equal(model.w, WHOLE)
    again = save(new_store(tmp_path / "again")[0], Snapshot(model=model.state_dict()), at(8), Solo()).path
    assert verify(again).model["w"].is_whole
