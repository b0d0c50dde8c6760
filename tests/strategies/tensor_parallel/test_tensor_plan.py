"""Layers that the rules divide, and the reasons given for those that they do not."""

import re

import pytest
import torch
from torch import nn

from dure.strategies.tensor_parallel.plan import find_plan, read_plan, whole_layers
from examples.char_gpt import GPT


def linear(inputs: int = 8, outputs: int = 8) -> nn.Linear:
    return nn.Linear(inputs, outputs)


class Attention(nn.Module):
    """Projections under any names."""

    def __init__(self, names: str, heads: int | None = 4, width: int = 8) -> None:
        super().__init__()
        if heads is not None:
            self.num_heads = heads
        for name in names.split():
            self.add_module(name, linear(width, width))


def styles(model: nn.Module, num_ranks: int = 2) -> dict[str, str]:
    return find_plan(model, num_ranks).styles


# chains


def test_linear_layers_of_a_sequence_are_paired():
    model = nn.Sequential(linear(), nn.GELU(), linear(), nn.Dropout(0.1), linear(), nn.Tanh(), nn.Dropout(), linear())
    assert styles(model) == {"0": "column", "2": "row", "4": "column", "7": "row"}


def test_what_is_not_elementwise_parts_a_pair():
    model = nn.Sequential(linear(), nn.LayerNorm(8), linear(), nn.Softmax(-1), linear())
    assert styles(model) == dict.fromkeys(["0", "2", "4"], "gathered")


def test_a_subclass_of_a_layer_has_no_rule():
    class Scaled(nn.Linear):
        def forward(self, value):
            return 2 * super().forward(value)

    plan = find_plan(nn.Sequential(Scaled(8, 8), nn.ReLU(), linear()), 2)
    assert plan.styles == {"2": "gathered"}


# names


@pytest.mark.parametrize("names", ["fc1 fc2", "linear1 linear2", "c_fc c_proj", "mlp_in mlp_out", "w1 w2", "up down"])
def test_a_two_layer_network_is_known_by_its_names(names):
    wide, narrow = names.split()
    model = nn.ModuleDict({wide: linear(8, 32), narrow: linear(32, 8)})
    assert styles(model) == {wide: "column", narrow: "row"}


def test_a_gated_network_has_two_layers_that_widen():
    names = {"gate_proj": linear(8, 32), "up_proj": linear(8, 32), "down_proj": linear(32, 8)}
    plan = find_plan(nn.ModuleDict(names), 2)
    assert plan.styles == {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
    assert plan.regions == [("gate_proj", "up_proj", "down_proj")]


def test_names_of_layers_that_do_not_fit_each_other_are_no_pair():
    assert styles(nn.ModuleDict({"fc1": linear(8, 16), "fc2": linear(8, 8)})) == {"fc1": "gathered", "fc2": "gathered"}


# attention


@pytest.mark.parametrize("names", ["q k v o", "q_proj k_proj v_proj out_proj", "query key value dense", "wq wk wv wo"])
def test_attention_is_divided_by_heads(names):
    *inputs, output = names.split()
    assert styles(Attention(names)) == {**dict.fromkeys(inputs, "column"), output: "row"}


@pytest.mark.parametrize(
    ("heads", "num_ranks", "match"),
    [
        (4, 3, "every rank computes all heads that come from q: 4 heads do not divide by 3 ranks"),
        (3, 2, r"the number of heads is not found \(num_heads"),  # eight features are not of three heads
        (None, 2, r"the number of heads is not found \(num_heads, heads, n_heads, n_head of Attention\)"),
    ],
)
def test_attention_whose_heads_cannot_be_divided_is_named(heads, num_ranks, match):
    plan = find_plan(Attention("q k v o", heads=heads), num_ranks)
    assert set(plan.styles.values()) == {"gathered"}
    (note,) = plan.notes
    assert re.search(match, note)


def test_heads_of_keys_and_values_must_divide_too():
    model = Attention("q_proj o_proj")
    model.k_proj, model.v_proj, model.num_key_value_heads = linear(8, 2), linear(8, 2), 1
    plan = find_plan(model, 2)
    assert "1 heads do not divide by 2 ranks" in plan.notes[0]


def test_multihead_attention_of_torch_stays_whole_and_is_named():
    plan = find_plan(nn.TransformerEncoderLayer(8, 4, 32), 2)
    assert plan.styles == {"linear1": "column", "linear2": "row"}
    assert plan.notes[0].startswith("self_attn whole: nn.MultiheadAttention keeps")


def test_one_reason_for_several_layers_is_said_once():
    plan = find_plan(nn.Sequential(*(Attention("q k v o") for _ in range(3))), 3)
    assert plan.notes == ["every rank computes all heads that come from 0-2.q: 4 heads do not divide by 3 ranks"]


# a whole model


def test_a_gpt_is_divided_by_heads_pairs_and_vocabulary():
    with torch.device("meta"):
        plan = find_plan(GPT(97, 2, 4, 96, 64, 0.0), 2)
    block = {"attention_in": "fused", "attention_out": "row", "mlp_in": "column", "mlp_out": "row"}
    assert plan.styles == {
        **{f"blocks.{number}.{name}": style for number in (0, 1) for name, style in block.items()},
        "embedding": "vocab",
        "position": "vocab",
        "head": "gathered",
    }
    assert plan.notes == []


def test_what_is_not_divided_is_listed():
    model = GPT(97, 1, 4, 96, 64, 0.0)
    assert whole_layers(model, find_plan(model, 2)) == ["blocks.0.attention_norm", "blocks.0.mlp_norm", "norm"]


@pytest.mark.parametrize(
    ("embedding", "reason"),
    [
        (nn.Embedding(9, 8, sparse=True), "its gradient is sparse"),
        (nn.Embedding(9, 8, max_norm=1.0), "it changes its rows in forward"),
        (nn.Embedding(9, 8, scale_grad_by_freq=True), "it scales gradients by how often"),
    ],
)
def test_an_embedding_that_looks_at_all_its_rows_stays_whole(embedding, reason):
    plan = find_plan(nn.Sequential(embedding, linear()), 2)
    assert plan.styles == {"1": "gathered"}
    assert plan.notes[0].startswith(f"0 whole: {reason}")


def test_layers_that_share_a_weight_are_cut_alike():
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    model[2].weight = model[0].weight
    assert styles(model) == {"0": "gathered", "2": "gathered"}


def test_a_layer_that_shares_its_weight_with_a_whole_one_stays_whole():
    model = nn.Sequential(linear(), nn.Bilinear(8, 1, 8))
    model[1].bias = model[0].bias
    plan = find_plan(model, 2)
    assert plan.styles == {}
    assert plan.notes == ["0 whole: its weight is shared with a whole layer"]


@pytest.mark.parametrize(
    ("size", "num_ranks", "is_divided"), [(3, 3, True), (4, 3, False), (5, 3, True), (2, 3, False)]
)
def test_a_layer_is_divided_where_every_rank_gets_some(size, num_ranks, is_divided):
    plan = find_plan(nn.Sequential(linear(8, size)), num_ranks)
    assert (plan.styles == {"0": "gathered"}) == is_divided
    assert bool(plan.notes) != is_divided


def test_a_pair_that_is_too_narrow_between_stays_whole_together():
    plan = find_plan(nn.Sequential(linear(8, 2), nn.Tanh(), linear(2, 8)), 3)
    assert plan.styles == {}
    assert plan.regions == []


# a plan as text


def test_a_plan_that_is_given_is_the_whole_plan():
    model = nn.Sequential(nn.Embedding(9, 8), linear(), nn.Tanh(), linear(), linear())
    plan = read_plan("0=vocab, 1=column, 3=row", model, 2)
    assert plan.styles == {"0": "vocab", "1": "column", "3": "row"}
    assert plan.faults == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("1", "plan says '1', but must say a name and one of column, fused, gathered, row, vocab"),
        ("1=wide", "plan says '1=wide', but must say a name and one of"),
        ("body=row", "plan names body, which fits no module of the model: its own are 0, 1, 2, 3"),
        ("2=row", "plan names 2 (Tanh), which has no rule: name nn.Linear and nn.Embedding layers"),
        ("0=row", "plan makes 0 (Embedding) row: an Embedding can be vocab, and a Linear any other"),
        ("1=vocab", "plan makes 1 (Linear) vocab: an Embedding can be vocab, and a Linear any other"),
        ("1=fused", "plan makes 1 fused, but its 8 outputs are not three times as many for 2 ranks"),
        ("3=gathered", "plan divides 3, whose 1 is too few to give each of 2 ranks some: leave it out"),
    ],
)
def test_a_plan_that_does_not_fit_is_told_with_the_name(text, fault):
    model = nn.Sequential(nn.Embedding(9, 8), linear(), nn.Tanh(), linear(8, 1))
    (found,) = read_plan(text, model, 2).faults
    assert found.startswith(fault)


def test_a_plan_that_cuts_a_shared_weight_in_two_ways_is_told():
    model = nn.Sequential(linear(), linear())
    model[1].weight = model[0].weight
    (found,) = read_plan("0=column,1=row", model, 2).faults
    assert found.startswith("plan cuts 0 and 1, which share a parameter, in different ways")
    assert read_plan("0=gathered", model, 2).faults
