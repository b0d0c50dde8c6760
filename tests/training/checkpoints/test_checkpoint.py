"""Saving and loading: what comes back is bit for bit what was given."""

import json
import math
import os
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from dure.comm.groups import Solo
from dure.errors import CheckpointDamaged, CheckpointMismatch, TaskInvalid
from dure.strategies.state.optimizer import optimizer_to_names
from dure.strategies.state.tensor_shard import Needs, rectangles, whole_buffers
from dure.training.checkpoints.reader import Checkpoint, export_weights, verify
from dure.training.checkpoints.state import Snapshot
from tests.training.checkpoints.checkpoint_cases import (
    ThreadGroup,
    TiedNet,
    at,
    new_store,
    save,
    save_at,
    snapshot_of,
    train,
    trained,
)

OPTIMIZERS = {
    "sgd_momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd_plain": lambda p: SGD(p, lr=0.1),
    "adam": lambda p: Adam(p, lr=1e-2),
    "adamw_tensor_lr": lambda p: AdamW(p, lr=torch.tensor(1e-2), foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_when_resumed_from_a_checkpoint_is_bit_equal(tmp_path, name):
    store, _ = new_store(tmp_path)
    model, optimizer = trained(OPTIMIZERS[name])
    path = save(store, snapshot_of(model, optimizer), at(24), Solo()).path
    train(model, optimizer, 5, seed=1)

    other, again = trained(OPTIMIZERS[name], seed=99)
    checkpoint = Checkpoint.read(path)
    checkpoint.load_model(other)
    checkpoint.load_optimizer(other, again)
    train(other, again, 5, seed=1)

    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


def test_checkpoint_when_loaded_gives_position_extra_metrics_and_random_state(tmp_path):
    store, _ = new_store(tmp_path)
    model, optimizer = trained()
    extra = {"best": math.inf, "worst": -math.inf, "scaler": {"scale": 65536.0}, "betas": (0.9, 1e-300), "none": None}
    metrics = {"loss": {"value": 0.1 + 0.2, "count": 7}}
    saved = save(store, snapshot_of(model, optimizer, extra=extra), at(24), Solo(), metrics=metrics)
    checkpoint = Checkpoint.read(saved.path)
    assert (checkpoint.position, checkpoint.extra, checkpoint.metrics) == (at(24), extra, metrics)
    state = checkpoint.per_rank(world_size=1)
    assert state is not None
    assert state["torch"].tolist() == list(range(16))
    assert checkpoint.per_rank(world_size=2) is None
    assert saved.num_bytes == sum(f.stat().st_size for f in saved.path.iterdir() if f.name != "manifest.json")


def test_checkpoint_when_weights_are_tied_stores_them_once(tmp_path):
    store, _ = new_store(tmp_path)
    path = save_at(store, 8).path
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "embedding.weight" in names
    assert "head.weight" not in names
    model = TiedNet()
    Checkpoint.read(path, weights_only=True).load_model(model)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, trained(seed=8)[0].head.weight)


def test_checkpoint_file_when_read_by_the_safetensors_library_holds_the_same(tmp_path):
    model, optimizer = trained()
    path = save(new_store(tmp_path)[0], snapshot_of(model, optimizer), at(8), Solo()).path
    for name, tensor in safetensors.torch.load_file(path / "model.safetensors").items():
        assert torch.equal(tensor, model.state_dict()[name])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoint_when_read_by_torchs_distributed_checkpoint_holds_the_same(tmp_path):
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    model, optimizer = trained()
    path = save(new_store(tmp_path)[0], snapshot_of(model, optimizer), at(8), Solo()).path
    found = {name: torch.zeros_like(value) for name, value in model.state_dict().items() if name != "head.weight"}
    load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.items())


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int16],
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (5,), (3, 4)])
def test_tensor_when_of_any_dtype_and_shape_comes_back_bit_equal(tmp_path, dtype, shape):
    tensor = (torch.rand(shape) * 8).to(dtype)
    mixed = {"a": tensor, "odd": torch.ones(3, dtype=torch.uint8), "wide": torch.ones(2, dtype=torch.float64)}
    path = save(new_store(tmp_path)[0], Snapshot(model=mixed), at(0), Solo()).path
    found = Checkpoint.read(path).weights()["a"]
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_nan_payloads_and_signed_zeros_when_saved_come_back_bit_equal(tmp_path):
    odd = torch.tensor(
        struct.unpack("<4d", bytes.fromhex("000000000000f8ff01000000000ff07f" + "00" * 7 + "80" + "00" * 8))
    )
    path = save(new_store(tmp_path)[0], Snapshot(model={"odd": odd}), at(0), Solo()).path
    assert torch.equal(Checkpoint.read(path).weights()["odd"].view(torch.int64), odd.view(torch.int64))


def test_tensor_when_not_contiguous_or_overlapping_keeps_its_values(tmp_path):
    base = torch.arange(24.0).reshape(2, 3, 4)
    views = {"transposed": base.permute(2, 0, 1), "row": base[1], "all": base, "expanded": torch.ones(1).expand(5)}
    path = save(new_store(tmp_path)[0], Snapshot(model=views), at(0), Solo()).path
    found = Checkpoint.read(path).weights()
    assert all(torch.equal(found[name], view) for name, view in views.items())


def test_load_model_when_the_model_is_another_names_the_tensors(tmp_path):
    path = save_at(new_store(tmp_path)[0], 8).path
    other = TiedNet(width=7)
    other.register_parameter("added", nn.Parameter(torch.zeros(1)))
    del other.frozen
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(
        CheckpointMismatch, match=r"(?s)lacks: added;.*model lacks: frozen;.*\(F32 \(10, 6\) in the check"
    ):
        Checkpoint.read(path).load_model(other)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_load_model_when_the_dtype_is_another_refuses_to_round(tmp_path):
    path = save_at(new_store(tmp_path)[0], 8).path
    with pytest.raises(CheckpointMismatch, match=r"F32 .* in the checkpoint, F64 .* in the model"):
        Checkpoint.read(path).load_model(TiedNet().double())


class Growing(nn.Module):
    """A model with a buffer that grows, and one that comes on the way."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("queue", torch.zeros(0))
        self.register_buffer("mean", None)


def test_load_model_when_buffers_grew_or_came_then_they_have_the_shape_that_was_saved(tmp_path):
    model = Growing()
    model.queue, model.mean = torch.arange(3.0), torch.ones(2, dtype=torch.float64)
    path = save(new_store(tmp_path)[0], Snapshot(model=model.state_dict()), at(8), Solo()).path
    other = Growing()
    needs = Needs(model=rectangles(other.state_dict().items()), optimizer={}, buffers=whole_buffers(other))
    Checkpoint.read(path, needs=needs).load_model(other)
    assert other.queue.tolist() == [0, 1, 2]
    assert torch.equal(other.mean, model.mean)


def test_load_model_when_it_ties_what_the_checkpoint_does_not_is_refused(tmp_path):
    model, _ = trained()
    state = {**model.state_dict(), "head.weight": model.head.weight.detach() + 1}
    path = save(new_store(tmp_path)[0], Snapshot(model=state), at(8), Solo()).path
    with pytest.raises(CheckpointMismatch, match=r"embedding.weight and head.weight are one tensor in the model"):
        Checkpoint.read(path).load_model(TiedNet())


def test_load_optimizer_when_the_groups_differ_is_refused(tmp_path):
    path = save_at(new_store(tmp_path)[0], 8).path
    model = TiedNet()
    with pytest.raises(
        CheckpointMismatch, match=r"samples-000000000008 .* parameter group 0 .* not in both: norm\.bias"
    ):
        Checkpoint.read(path).load_optimizer(model, AdamW([model.embedding.weight, model.norm.weight]))
    with pytest.raises(CheckpointMismatch, match="1 parameter groups and this one has 2"):
        Checkpoint.read(path).load_optimizer(
            model, AdamW([{"params": [p]} for p in (model.norm.weight, model.norm.bias)])
        )


def test_save_when_the_state_needs_pickle_is_refused_by_place(tmp_path):
    with pytest.raises(TaskInvalid, match=r"optimizer\.other\.clock is a builtins\.object"):
        save(new_store(tmp_path)[0], Snapshot(optimizer={"other": {"clock": object()}}), at(8), Solo())
    with pytest.raises(TaskInvalid, match=r"tensor w has dtype torch\.complex128"):
        save(new_store(tmp_path)[0], Snapshot(model={"w": torch.zeros(1, dtype=torch.complex128)}), at(8), Solo())
    assert not list(tmp_path.iterdir())


def test_export_when_done_holds_all_names_and_replaces_atomically(tmp_path):
    path = save_at(new_store(tmp_path / "checkpoints")[0], 8).path
    out = tmp_path / "model.safetensors"
    out.write_text("old")
    num_bytes = export_weights(path, out)
    weights = safetensors.torch.load_file(out)
    model = trained(seed=8)[0]
    assert num_bytes == out.stat().st_size
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "model.safetensors"]


def test_save_on_three_ranks_when_done_holds_every_ranks_own_state(tmp_path):
    store, _ = new_store(tmp_path)
    model, optimizer = trained()
    answers = ThreadGroup(3).run(lambda group: save(store, snapshot_of(model, optimizer, group.rank), at(8), group))
    assert {answer.path for answer in answers} == {tmp_path / "samples-000000000008"}
    for rank in range(3):
        state = Checkpoint.read(answers[0].path, rank=rank).per_rank(world_size=3)
        assert state is not None
        assert state["torch"][0] == rank
    assert Checkpoint.read(answers[0].path, rank=7).per_rank(world_size=8) is None
    assert verify(answers[0].path).world_size == 3


def test_files_when_a_checkpoint_has_its_name_were_forced_to_the_disk_before(tmp_path, monkeypatch):
    told: list[str] = []
    sync, rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        told.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        told.append(f"-> {Path(target).name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    save_at(new_store(tmp_path / "checkpoints")[0], 8)
    files, writing = told[:4], told[5]
    assert sorted(files) == ["model.safetensors", "optimizer.safetensors", "rank0.safetensors", "state.json"]
    assert told[4] == "manifest.json"
    assert writing.startswith(".writing-samples-000000000008")
    assert told[6:8] == ["-> samples-000000000008", "checkpoints"]
    assert told[8:] == [".latest.writing", "-> latest", "checkpoints"]


def test_manifest_when_read_by_a_person_is_plain_json(tmp_path):
    path = save_at(new_store(tmp_path)[0], 8, is_best=True).path
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["position"] == {"samples_seen": 8, "step": 1, "epoch": 0}
    assert manifest["aliases"] == {"head.weight": "embedding.weight"}
    assert manifest["model"]["norm.num_batches_tracked"]["dtype"] == "I64"


def test_pickle_when_put_in_the_place_of_a_file_is_never_loaded(tmp_path):
    path = save_at(new_store(tmp_path)[0], 8).path
    (path / "model.safetensors").unlink()
    torch.save({"w": torch.ones(1)}, path / "model.safetensors")
    with pytest.raises(CheckpointDamaged, match=r"samples-000000000008 is damaged: model\.safetensors has .* bytes"):
        Checkpoint.read(path)


def test_extra_state_of_a_module_when_plain_comes_back(tmp_path):
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model = Counting(2, 2)
    model.seen = 5
    optimizer = SGD(model.parameters())
    snapshot = Snapshot(model=model.state_dict(), optimizer=optimizer_to_names(model, optimizer))
    other = Counting(2, 2)
    Checkpoint.read(save(new_store(tmp_path)[0], snapshot, at(0), Solo()).path).load_model(other)
    assert other.seen == 5
