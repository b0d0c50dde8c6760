"""Units are repeated blocks of some size, and share no parameter with anything outside them."""

import torch
from torch import nn

from dure.strategies.sharded.fsdp_units import find_units, has_batchnorm, shared_parameters, unit_faults
from examples.char_gpt import GPT

WIDE = 256  # 256 KiB in float32: above the least size of a unit


def wide() -> nn.Linear:
    return nn.Linear(WIDE, WIDE, bias=False)


def names(model: nn.Module, patterns: str | None = None) -> list[str]:
    return [unit.name for unit in find_units(model, patterns)]


def test_units_of_a_gpt_are_its_blocks():
    with torch.device("meta"):
        model = GPT(97, 3, 4, 96, 64, 0.0)
    assert names(model) == ["blocks.0", "blocks.1", "blocks.2"]


def test_units_are_looked_for_in_containers_inside_containers_and_modules():
    inner = nn.Sequential(wide(), nn.Sequential(wide(), wide()))
    model = nn.ModuleDict({"body": nn.ModuleDict({"stages": inner}), "head": nn.Linear(2, 2)})
    assert names(model) == ["body.stages.0", "body.stages.1.0", "body.stages.1.1"]


def test_what_is_small_or_in_no_container_is_no_unit():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = wide()
            self.rest = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    assert names(Plain()) == []


def test_a_subclass_of_a_container_is_a_block_itself():
    class Block(nn.Sequential):
        pass

    assert names(nn.Sequential(Block(wide(), wide()), wide())) == ["0", "1"]


def test_blocks_that_share_a_parameter_are_no_units():
    model = nn.Sequential(wide(), wide(), wide())
    model[2].weight = model[0].weight
    assert names(model) == ["1"]
    assert shared_parameters(model, model[2]) == ["weight"]


def test_a_block_that_is_used_twice_is_one_unit():
    block = wide()
    assert names(nn.Sequential(block, nn.Tanh(), block)) == ["0"]


def test_named_units_come_outer_ones_first_whatever_their_size():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert names(model, "0.*,*") == ["0", "0.0", "1"]


def test_unit_that_is_named_wrongly_is_told_with_its_name():
    model = nn.Sequential(nn.ModuleList([wide()]), wide(), wide())
    model[2].weight = model[1].weight
    faults = list(unit_faults(model, "0,1,nowhere"))
    assert [fault.split(",")[0] for fault in faults] == [
        "units names 0",
        "units names 1",
        "units names nowhere",
    ]


def test_batchnorm_is_found_however_deep():
    assert has_batchnorm(nn.Sequential(nn.Sequential(nn.BatchNorm1d(2))))
    assert not has_batchnorm(nn.Sequential(nn.LayerNorm(2)))
