"""State of an optimiser or a model through a checkpoint: the same type and value, or a refusal before it is written."""

from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import dure
from dure.comm.groups import Solo
from dure.errors import TaskInvalid, WorkerFailed
from dure.strategies.state.optimizer import optimizer_to_names
from dure.training.checkpoints.reader import Checkpoint
from dure.training.checkpoints.state import Snapshot
from tests.conformance.cases import records_of
from tests.conformance.tasks import Regression
from tests.faulty_task import Faulty
from tests.training.checkpoints.checkpoint_cases import at, new_store, save


def model_and_optimizer(make: Any = lambda p: SGD(p, lr=0.1)) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()
    return model, make(model.parameters())


def through_a_checkpoint(root: Any, model: nn.Module, optimizer: Optimizer, make: Any = None) -> Optimizer:
    """Return an optimiser over the same model that has taken up the checkpoint of the first."""
    snapshot = Snapshot(model=model.state_dict(), optimizer=optimizer_to_names(model, optimizer))
    path = save(new_store(root)[0], snapshot, at(8), Solo()).path
    again = SGD(model.parameters(), lr=9.0) if make is None else make(model.parameters())
    Checkpoint.read(path).load_optimizer(model, again)
    return again


KEPT = {
    "text": "momentum",
    "whole number": 3,
    "truth value": True,
    "nothing": None,
    "pair": (1, 0.5),
    "list of tensors": [torch.arange(3), torch.rand(2, dtype=torch.float64)],
    "tuple of tensors": (torch.tensor(2**40), torch.rand(2)),
    "ordered": OrderedDict(b=torch.arange(2), a="x"),
    "deep": {"a": {"b": [{"c": torch.tensor([1], dtype=torch.uint8), "d": "words"}]}},
    "numpy's number": numpy.float64(0.1),
    "dtype": torch.float32,
    "size": torch.Size([2, 3]),
    "no dimension": torch.tensor(0.1, dtype=torch.float64),
    "of the parameter's shape": torch.rand(3, 3, dtype=torch.float64),
    "whole numbers of its shape": torch.arange(9).view(3, 3),
    "truth of its shape": torch.eye(3, dtype=torch.bool),
}


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert [*one] == [*other]
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


@pytest.mark.parametrize("kind", KEPT)
def test_state_when_of_any_kind_comes_back_as_it_was(kind, tmp_path):
    model, optimizer = model_and_optimizer()
    optimizer.state[model[0].weight] = {"value": KEPT[kind]}
    optimizer.param_groups[0]["value"] = optimizer.state["value"] = KEPT[kind]
    again = through_a_checkpoint(tmp_path, model, optimizer)
    assert_same(again.state[model[0].weight]["value"], KEPT[kind])
    assert_same(again.param_groups[0]["value"], KEPT[kind])
    assert_same(again.state["value"], KEPT[kind])


def test_tensor_when_shared_by_parameters_and_groups_is_still_shared(tmp_path):
    def make(parameters: Any) -> Optimizer:
        return AdamW([{"params": [p]} for p in parameters], lr=torch.tensor(0.1), foreach=False)

    model, optimizer = model_and_optimizer(make)
    rate, clock = optimizer.param_groups[0]["lr"], torch.zeros(())
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    for p in model.parameters():
        optimizer.state[p] = {"step": clock, "mean": torch.zeros_like(p)}
    again = through_a_checkpoint(tmp_path, model, optimizer, make)
    assert len({id(group["lr"]) for group in again.param_groups}) == 1
    assert len({id(again.state[p]["step"]) for p in model.parameters()}) == 1
    assert len({id(again.state[p]["mean"]) for p in model.parameters()}) == 4


def of_a_flat_buffer(model: nn.Module) -> dict[Any, Any]:
    flat = torch.zeros(24, dtype=torch.bfloat16)
    return {
        p: {"mean": part.view_as(p)}
        for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True)
    }


VIEWS = {
    "views of one buffer": (of_a_flat_buffer, r"0\.bias\.mean is a view of memory that .*0\.weight\.mean is a view"),
    "the parameter itself": (lambda model: {model[0].weight: {"p": model[0].weight}}, r"that the model's 0\.weight is"),
    "its data": (lambda model: {model[0].weight: {"p": model[1].weight.data[1:]}}, r"that the model's 1\.weight is"),
}


@pytest.mark.parametrize("case", VIEWS)
def test_state_when_its_memory_is_shared_is_refused(case, tmp_path):
    state_of, words = VIEWS[case]
    model, optimizer = model_and_optimizer()
    optimizer.state.update(state_of(model))
    with pytest.raises(TaskInvalid, match=words):
        through_a_checkpoint(tmp_path, model, optimizer)
    assert not list(tmp_path.iterdir())


def two_in_one() -> Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.ones(3), torch.ones(3))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (lambda: torch.eye(3).to_sparse(), "tensor x is sparse_coo"),
        (two_in_one, "TwoTensor, which is made of several tensors"),
        (lambda: torch.zeros(2, dtype=torch.complex128), "dtype torch.complex128"),
    ],
)
@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_tensor_when_no_file_can_hold_it_is_refused(part, tensor, words, tmp_path):
    held = {"x": tensor()} if part == "model" else {"state": {"w": {"x": tensor()}}}
    with pytest.raises(TaskInvalid, match=words.replace("tensor x", "tensor .*x")):
        save(new_store(tmp_path)[0], Snapshot(**{part: held}), at(8), Solo())
    assert not list(tmp_path.iterdir())


class Keeps(SGD):
    """Keeps a set, from its first step on."""

    def step(self, closure: Any = None) -> Any:
        self.state["seen"] = {1}
        return super().step(closure)


class KeepsSet(Regression):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Keeps(model.parameters(), lr=0.1)


def test_run_when_no_checkpoint_could_hold_its_state_ends_after_its_first_step(tmp_path):
    with pytest.raises(
        WorkerFailed, match=r"cannot be checkpointed: optimizer\.shared_state\.seen is a builtins\.set"
    ) as failed:
        dure.train(
            KeepsSet(),
            start="inline",
            runs_dir=tmp_path,
            name="run",
            samples=40,
            global_batch_size=4,
            threads=1,
            quiet=True,
        )
    assert failed.value.exit_code == 2
    assert len(records_of(tmp_path / "run")) == 1


@pytest.mark.slow
def test_run_when_resumed_by_ranks_that_must_draw_alike_and_drew_unequally_before_then_it_goes_on(tmp_path):
    task, same = Faulty(num_samples=32, width=12), {"nproc": 2, "quiet": True, "threads": 1, "device": "cpu"}
    # rank 0 alone calls the model, whose Dropout(0.0) draws without effect
    first = dure.train(
        task, strategy="rpc_model", samples=16, global_batch_size=8, runs_dir=tmp_path, name="run", start="fork", **same
    )
    last = dure.train(task, strategy="tensor_parallel", samples=32, resume=first.run, **same)
    assert (last.status, last.samples) == ("completed", 32)
