"""A rank's part of a model and of its optimiser, in bytes and in names."""

import pytest
import torch
from torch import nn

from dure.errors import TaskInvalid
from dure.strategies.sections.absent_tensors import guarded
from dure.strategies.sections.own_part import LocalStages, keep_only
from dure.strategies.sections.plan import SectionPlan

CPU = torch.device("cpu")


class Model(nn.Module):
    """Three blocks, and a parameter and a buffer outside of them."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.ones(5))
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).requires_grad_(False)])


PLAN = SectionPlan(calls=["blocks.0", "blocks.1", "blocks.2"], begins=[0, 1], homes={"gain": 1, "offset": 0})


def storage_bytes(tensors):
    """Count what tensors really occupy, each memory once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(("section", "in_blocks"), [(0, 4 * 20), (1, 4 * 16 + 8 + 4 * 10)])
def test_a_part_holds_the_bytes_of_its_blocks_and_what_is_in_none(section, in_blocks):
    model = Model()
    part = LocalStages(model, PLAN, [section], CPU)
    outside = 4 * 3 + 4 * 5
    assert storage_bytes(part.tensors()) == in_blocks + outside
    # one number stands for each parameter that others keep; their buffers (BatchNorm's) are copied into
    rest = {0: 4 * 4 + (4 * 8 + 8), 1: 2 * 4}[section]
    assert storage_bytes([*model.parameters(), *model.buffers()]) == in_blocks + outside + rest


@pytest.mark.parametrize(
    ("section", "names"),
    [
        (0, {"offset", "blocks.0.weight", "blocks.0.bias"}),
        (1, {"gain", "blocks.2.weight", "blocks.2.bias"} | {f"blocks.1.{n}" for n in nn.BatchNorm1d(4).state_dict()}),
    ],
)
def test_a_checkpoint_sees_each_tensor_on_one_rank(section, names):
    assert LocalStages(Model(), PLAN, [section], CPU).state_dict().keys() == names


def test_what_others_keep_keeps_its_shape_and_cannot_be_used_unnoticed():
    model = Model()
    LocalStages(model, PLAN, [1], CPU)
    weight = model.blocks[0].weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.device) == ((4, 4), CPU)
    assert weight.isnan().all()
    with guarded():
        assert (weight.shape, weight.dtype, weight.requires_grad, len(weight)) == ((4, 4), torch.float32, True, 4)
    for use in (
        lambda: weight.sum(), lambda: weight.detach() + 1, lambda: weight.data.clamp_(0, 1), lambda: weight.T,
        lambda: torch.ones(4) @ weight, lambda: model.blocks[0](torch.ones(1, 4)), lambda: bool(weight[0, 0] > 0),
        lambda: nn.init.zeros_(weight), lambda: setattr(weight, "data", torch.ones(4, 4)),
    ):  # fmt: skip
        with (
            pytest.raises(TaskInvalid, match=r"the weights of blocks\.0\.(weight|bias) are on another rank"),
            guarded(),
        ):
            use()


def test_gradient_of_what_another_rank_trains_is_refused():
    model = Model()
    part = LocalStages(model, PLAN, [0], CPU)
    part.refuse_lost_gradients()
    model.gain.grad = torch.ones(3)
    with pytest.raises(TaskInvalid, match="gain has a gradient on a rank that does not train it"):
        part.refuse_lost_gradients()
    with pytest.raises(TaskInvalid, match="gain has a gradient"):
        part.refuse_lost_gradients([model.gain])


def test_buffers_of_others_can_be_copied_into():
    model = Model()
    LocalStages(model, PLAN, [0], CPU)
    for buffer in model.buffers():
        buffer.copy_(buffer.clone())


def test_a_part_takes_over_its_own_tensors_only():
    source, model = Model(), Model()
    part = LocalStages(model, PLAN, [0], CPU)
    part.load_state_dict({name: value for name, value in source.state_dict().items() if part.is_own(name)})
    assert torch.equal(model.blocks[0].weight, source.blocks[0].weight)
    assert model.blocks[2].weight.isnan().all()


def test_parameters_to_train_are_this_ranks():
    model = Model()
    assert LocalStages(model, PLAN, [0], CPU).trainable() == [model.blocks[0].weight, model.blocks[0].bias]
    model = Model()
    assert LocalStages(model, PLAN, [1], CPU).trainable() == [model.gain, *model.blocks[1].parameters()]


def groups(model):
    return [{"params": [model.gain], "lr": 0.5}, {"params": list(model.blocks[:2].parameters())}]


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(groups(model), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(groups(model), lr=0.1),
    "named": lambda model: torch.optim.AdamW(
        [{"params": [("gain", model.gain)]}, {"params": list(model.blocks.named_parameters())}]
    ),
    "adagrad": lambda model: torch.optim.Adagrad(groups(model), lr=0.1),
    "rmsprop": lambda model: torch.optim.RMSprop(groups(model), lr=0.1),
    "adafactor": lambda model: torch.optim.Adafactor(groups(model), lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("is_any_kept", [True, False], ids=["some", "none"])
def test_an_optimiser_keeps_its_groups_and_steps_what_is_left_even_nothing(name, is_any_kept):
    model = Model()
    optimizer = OPTIMIZERS[name](model)
    kept = [model.blocks[0].weight] if is_any_kept else []
    keep_only(optimizer, kept)
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, len(kept)]
    assert all(
        len(group.get("param_names") or group["params"]) == len(group["params"]) for group in optimizer.param_groups
    )
    assert set(optimizer.state) <= set(kept)
    model.blocks[0](torch.ones(1, 4)).sum().backward()
    before = model.blocks[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(before, model.blocks[0].weight) is not is_any_kept
    optimizer.load_state_dict(optimizer.state_dict())
