"""Layers are divided as the table says, weights come out as one process's, and what cannot be divided is refused."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dure
from dure.comm.groups import ProcessGroup
from dure.errors import RanksDisagree, SpecInvalid
from tests.comm.gloo_ranks import on_ranks
from tests.conformance.cases import (
    TO_ROUNDING,
    are_same_bits,
    evaluated_digests,
    largest_difference,
    losses_of,
    train_case,
    weights_of,
)
from tests.conformance.tasks import TOKENS, WIDTH, Regression, layered_model
from tests.conformance.test_failures import Branching
from tests.conformance.test_precision import STEPS as HALF_STEPS
from tests.conformance.test_precision import Steep
from tests.conformance.test_resume import SETTINGS, back_to, resumed
from tests.specs import grouped
from tests.strategies.data_parallel.test_zero1 import Grouped
from tests.strategies.sharded.sharded_cases import SentBytes, backward, held_bytes, prepared
from tests.strategies.tensor_parallel.tensor_cases import mean_square
from tests.strategies.tensor_parallel.test_tensor_values import assert_all_exact

STEPS = {"global_batch_size": 7, "samples": 58, "clip_norm": 0.4, "seed": 5}
HEADS = 6


class Apart(nn.Module):
    """Attention with a layer each for queries, keys and values, in one of the ways that it is written."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.heads, self.way = HEADS, way
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(12, 12) for _ in range(4))
        self.register_buffer("mask", torch.full((TOKENS, TOKENS), float("-inf")).triu(1))

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            layer(hidden).view(*hidden.shape[:2], self.heads, -1).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mask = self.mask.to(hidden)[: hidden.shape[1], : hidden.shape[1]]
        if self.way == "by hand":
            mixed = (query @ key.transpose(-2, -1) / 2 + mask).softmax(-1) @ value
        elif self.way == "masked":
            per_head = mask.expand(self.heads, -1, -1)
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=per_head)
        else:
            dropout = 0.5 if self.way == "dropping" and self.training else 0.0
            mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).reshape(hidden.shape))


class Fused(nn.Module):
    """Attention whose queries, keys and values come from one layer, cut in one of the ways that they are."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.num_heads, self.way = HEADS, way
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        cut = self.qkv(hidden)
        shape = (batch, length, self.num_heads, width // self.num_heads)
        if self.way == "viewed":
            query, key, value = cut.view(batch, length, 3, *shape[2:]).permute(2, 0, 3, 1, 4)
        elif self.way == "reshaped":
            query, key, value = cut.reshape((batch, length, 3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.way == "indexed":  # of which nothing is known: done with the whole
            query, key, value = (cut[..., i * width : (i + 1) * width].view(shape).transpose(1, 2) for i in range(3))
        else:
            thirds = cut.chunk(3, dim=-1) if self.way == "chunked" else cut.split(width, dim=2)
            query, key, value = (third.view(shape).transpose(1, 2) for third in thirds)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).contiguous().view(batch, length, width))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(12, 20), nn.Linear(12, 20, bias=False)
        self.down_proj = nn.Linear(20, 12)
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.dropout(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)))


class Transformer(nn.Module):
    """Each token, found by the size of its first number, with attention and a network of one kind."""

    def __init__(self, kind: str, way: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 12, padding_idx=3)
        self.inputs = nn.Linear(WIDTH, 12)
        if kind == "torch":
            self.block: nn.Module = nn.TransformerEncoderLayer(12, 2, 20, 0.0, batch_first=True)
        else:
            self.block = nn.Sequential(Apart(way) if kind == "apart" else Fused(way), nn.LayerNorm(12), Gated())
        self.head = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[..., 0] * 4).long().clamp(-5, 5) + 5
        return self.head(self.block(self.inputs(x) + self.embedding(tokens)))


class Attending(Regression):
    model: str = "apart"
    way: str = ""

    def build_model(self):
        return Transformer(self.model, self.way).to(getattr(torch, self.dtype))


# weights


@pytest.mark.slow
def test_weights_of_a_transformer_written_in_any_way_equal_one_process():
    ways = [
        *(("apart", way) for way in ("", "by hand", "masked")),
        *(("fused", way) for way in ("viewed", "reshaped", "chunked", "split", "indexed")),
        ("torch", ""),
    ]
    assert_all_exact([(partial(Transformer, *way), lambda: mean_square) for way in ways])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "way", "num_ranks", "mesh"),
    [("apart", "by hand", 3, None), ("fused", "viewed", 4, "data=2,tensor=2")],
)
def test_weights_of_a_transformer_equal_one_process(model, way, num_ranks, mesh, trained, tmp_path):
    task = Attending(model=model, way=way, kind="tokens", optimizer="adamw")
    steps = {**STEPS, "samples": 42}
    one = weights_of(trained(task, **steps))
    run = train_case(tmp_path, task, "tensor_parallel", num_ranks, mesh=mesh, microbatch_size=2, **steps)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


@pytest.mark.parametrize(
    ("num_ranks", "plan"),
    [
        (2, "0=column,2=row,7=gathered"),
        (2, "0=column,2=column,5=column,7=column"),
        (3, "0=row,2=row,5=row,7=row"),
    ],
)
def test_weights_under_any_plan_equal_one_process(num_ranks, plan):
    assert_all_exact([(partial(layered_model, torch.float64, 0.0), lambda: mean_square)], num_ranks, plan=plan)


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (3, {}),  # eight features over three ranks: three, three and two
        (4, {"mesh": "tensor=2,data=2", "backend": "gloo", "bucket_bytes": 100}),
        pytest.param(4, {"mesh": "data=4,tensor=1"}, marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_weights_under_any_mesh_equal_one_process(num_ranks, settings, trained, tmp_path):
    digests = tmp_path / "digests"
    digests.mkdir()
    task = Regression(kind="tokens", optimizer="adamw", layered=True)
    one = weights_of(trained(task, **STEPS))
    task = Regression(kind="tokens", optimizer="adamw", layered=True, digests=str(digests))
    run = train_case(tmp_path, task, "tensor_parallel", num_ranks, microbatch_size=2, **settings, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING
    assert len(evaluated_digests(digests)) == 1


@pytest.mark.slow
def test_weights_with_any_groups_and_class_of_optimiser_equal_one_process(trained, tmp_path):
    task = Grouped(way="all")
    one = weights_of(trained(task, **STEPS))
    run = train_case(tmp_path, task, "tensor_parallel", 4, mesh="data=2,tensor=2", **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


@pytest.mark.slow
def test_parameters_that_some_data_ranks_or_none_use_give_the_weights_of_one_process(tmp_path):
    task = Branching(never=True, optimizer="adamw")
    steps = {**STEPS, "samples": 44}
    one = weights_of(train_case(tmp_path, task, **steps))
    run = train_case(tmp_path, task, "tensor_parallel", 4, mesh="data=2,tensor=2", microbatch_size=1, **steps)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


# what is drawn


class Dropping(Regression):
    """Drops values that are divided, by a module and by a function, and such as are whole."""

    def build_model(self):
        return Sieve()


class Sieve(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 8).double(), nn.Linear(8, WIDTH).double()
        self.dropout = nn.Dropout(0.4)

    def forward(self, x):
        hidden = self.dropout(functional.dropout(torch.tanh(self.fc1(x)), 0.3, self.training))
        return self.dropout(self.fc2(hidden))


@pytest.mark.slow
def test_a_tensor_group_drops_what_one_device_drops(trained, tmp_path):
    one = trained(Dropping(), **STEPS)
    run = train_case(tmp_path, Dropping(), "tensor_parallel", 3, **STEPS)
    assert largest_difference(weights_of(run), weights_of(one)) < TO_ROUNDING


def test_draws_that_differ_in_a_tensor_group_are_found():
    def noisy(model: nn.Module, batch: Tensor) -> Tensor:
        torch.rand(1 + torch.distributed.get_rank())
        return model(batch).square().mean()

    def work(group: ProcessGroup) -> None:
        backward(prepared("tensor_parallel", group, nn.Sequential(nn.Linear(4, 4)), noisy), torch.ones(1, 4))

    for error in on_ranks(2, work):
        assert isinstance(error, RanksDisagree)
        assert "ranks of a tensor group did not draw the same random numbers" in str(error)


# memory and bytes on the wire


def network() -> nn.Module:
    """A pair whose middle three ranks cannot share evenly, a vocabulary, and a layer that stays whole."""
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4), nn.LayerNorm(4))


def parts(num_ranks: int) -> list[int]:
    """Return the trained numbers of each rank."""
    rows = [len(part) for part in torch.arange(10).chunk(num_ranks)]
    middle = [len(part) for part in torch.arange(7).chunk(num_ranks)]
    return [4 * row + (4 + 1 + 4) * mid + 4 + 2 * 4 for row, mid in zip(rows, middle, strict=True)]


TOKEN_BATCH = torch.arange(6).view(2, 3)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_hold_their_parts_of_what_is_divided_and_the_rest(num_ranks):
    def work(group: ProcessGroup) -> dict[str, int]:
        strategy = prepared("tensor_parallel", group, network())
        backward(strategy, TOKEN_BATCH)
        gradients = held_bytes(strategy)["gradients"]
        strategy.optimizer_step()
        found = held_bytes(strategy) | {"gradients": gradients}
        strategy.close()
        return found

    expected = [{"parameters": 4 * n, "gradients": 4 * n, "state": 8 * n} for n in parts(num_ranks)]
    assert on_ranks(num_ranks, work) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "mesh"), [(1, None), (3, None), (4, "data=2,tensor=2")])
def test_sent_bytes_are_what_the_process_groups_are_given(num_ranks, mesh):
    plans = [None, "0=vocab,1=gathered,3=row", "1=column,3=gathered"]
    cases = [*((network, plan, TOKEN_BATCH) for plan in plans), (lambda: Fused("viewed"), None, torch.ones(1, 2, 12))]

    def work(group: ProcessGroup) -> list[tuple[int, int]]:
        answers = []
        for build, plan, batch in cases:
            strategy = prepared("tensor_parallel", group, build(), mesh=mesh, plan=plan)
            with SentBytes() as sent:
                backward(strategy, batch, batch)
            answers.append((sent.num_bytes, strategy.sent_bytes(2)))
            strategy.close()
        return answers

    for counted, told in [answer for rank in on_ranks(num_ranks, work) for answer in rank]:
        assert counted == told


def test_a_pair_sends_its_output_in_forward_and_its_inputs_gradient_in_backward():
    def work(group: ProcessGroup) -> tuple[int, dict[str, int]]:
        strategy = prepared("tensor_parallel", group, nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)))
        batch = torch.ones(8, 4, requires_grad=True)
        with SentBytes() as sent:
            backward(strategy, batch)
        strategy.close()
        return strategy.division.traffic.sent_bytes, sent.calls

    # 2 (T-1)/T of eight samples' two outputs and four inputs, in float32; the third message is the facts
    assert on_ranks(2, work) == [(8 * (2 + 4) * 4, {"allreduce": 3})] * 2


def test_three_layers_with_one_input_send_its_gradient_once():
    def work(group: ProcessGroup) -> dict[str, int]:
        strategy = prepared("tensor_parallel", group, Apart(""))
        with SentBytes() as sent:
            backward(strategy, torch.ones(1, TOKENS, 12, requires_grad=True))
        strategy.close()
        return sent.calls

    assert on_ranks(2, work) == [{"allreduce": 3}] * 2


# halves


@pytest.mark.slow
def test_ranks_skip_the_same_steps_when_fp16_overflows_in_any_part(tmp_path):
    digests = tmp_path / "digests"
    digests.mkdir()
    task = Steep(dtype="float32", layered=True, digests=str(digests))
    settings = {"precision": "fp16", "microbatch_size": 2, "mesh": "data=2,tensor=2"}
    run = train_case(tmp_path, task, "tensor_parallel", 4, **settings, **HALF_STEPS)
    assert all(value.isfinite().all() for value in weights_of(run).values())
    assert len(evaluated_digests(digests)) == 1


# checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "num_saved", "mesh", "elsewhere", "num_elsewhere", "other_mesh"),
    [
        ("tensor_parallel", 3, None, "zero1", 2, None),
        ("tensor_parallel", 4, "data=2,tensor=2", "tensor_parallel", 3, None),
        ("fsdp", 3, None, "tensor_parallel", 4, "data=2,tensor=2"),
    ],
)
def test_resume_elsewhere_ends_with_the_same_weights(
    saved, num_saved, mesh, elsewhere, num_elsewhere, other_mesh, trained, tmp_path
):
    task = Regression(kind="tokens", optimizer="adamw", layered=num_saved != 3)  # the other has a tied weight
    whole = trained(task, saved, num_saved, mesh=mesh, **SETTINGS)
    run = back_to(whole, 58, tmp_path)
    resumed(run, strategy=elsewhere, nproc=num_elsewhere, mesh=other_mesh)
    assert largest_difference(weights_of(run), weights_of(whole)) < TO_ROUNDING


@pytest.mark.slow
def test_resume_in_the_same_place_is_bit_equal_with_dropout(tmp_path):
    settings = {"mesh": "data=2,tensor=2", "precision": "fp16", "deterministic": True}
    task = Regression(dtype="float32", dropout=0.3, kind="tokens", optimizer="adamw", layered=True)
    whole = train_case(tmp_path, task, "tensor_parallel", 4, **settings, **SETTINGS)
    run = resumed(back_to(whole, 58, tmp_path))
    assert are_same_bits(weights_of(run), weights_of(whole))
    assert losses_of(run) == losses_of(whole)


# what is refused


class Convolving(Regression):
    def build_model(self):
        return nn.Sequential(nn.Conv1d(TOKENS, TOKENS, 1), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))


class Sparse(Regression):
    def build_model(self):
        return nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 6))


@pytest.mark.parametrize(
    ("task", "settings", "match"),
    [
        (
            Convolving(),
            {},
            r"there is no layer to divide over 2 ranks, since the rules know nn\.Linear and nn\.Embedding and the "
            r"model's layers are 0-2; 2 whole: 1 is too few.*: use fsdp without an axis tensor, which divides any",
        ),
        (
            Sparse(),
            {"mesh": "data=2"},
            "0 gives sparse gradients .*, which are not added up over the data axis",
        ),
        (Regression(layered=True), {"plan": "9=row"}, "plan names 9, which fits no module of the model"),
        (Regression(), {"mesh": "tensor=3"}, "nproc is 2 but mesh tensor 3 needs 3"),
        (Regression(), {"mesh": "shard=2"}, "mesh names the axis shard.*it knows data and tensor"),
        (Regression(), {"compile": True}, "compile is True but strategy tensor_parallel cannot honour it"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_any_process_starts(task, settings, match, tmp_path):
    settings = grouped("tensor_parallel", settings)
    with pytest.raises(SpecInvalid, match=match):
        dure.train(task, strategy="tensor_parallel", nproc=2, runs_dir=tmp_path, start="fork", **settings)
    assert not list(tmp_path.iterdir())


# what is said


def test_the_start_says_what_is_divided_and_what_is_not():
    def work(group: ProcessGroup) -> list[str]:
        strategy = prepared("tensor_parallel", group, Transformer("torch", ""), mesh="data=2,tensor=2")
        lines = strategy.describe()
        strategy.close()
        return lines

    own, *styles, note = on_ranks(4, work)[0]
    assert own.startswith("2 ranks of a tensor group hold ")
    assert own.endswith(" of parameters, in 2 groups")
    assert styles == [
        "column (output features divided, and the output left divided): block.linear1",
        "gathered (output features divided, the output gathered): inputs, head",
        "row (input features divided, the output added up): block.linear2",
        "vocab (an Embedding's rows divided, the output added up): embedding",
        "whole on every rank of a tensor group: block.self_attn, block.self_attn.out_proj, block.norm1, block.norm2",
    ]
    assert note.startswith("block.self_attn whole: nn.MultiheadAttention keeps")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "num_texts"), [("tensor=4", 0), ("data=2,tensor=2", 1)])
def test_what_is_not_preserved_depends_on_the_data_ranks(mesh, num_texts, tmp_path):
    summary = dure.train(
        Regression(layered=True, dropout=0.5), strategy="tensor_parallel", nproc=4, mesh=mesh, runs_dir=tmp_path,
        start="fork", samples=7, quiet=True,
    )  # fmt: skip
    assert len(summary.not_preserved) == num_texts


@pytest.mark.slow
def test_dropout_inside_attention_then_its_draws_are_declared(tmp_path):
    run = train_case(tmp_path, Attending(way="dropping"), "tensor_parallel", 2, global_batch_size=7, samples=14)
    (text,) = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert text.startswith("random numbers inside scaled_dot_product_attention")


def test_a_plan_may_be_the_tasks_own(tmp_path):
    class Planned(Regression):
        defaults = {**Regression.defaults, "tensor_parallel": {"plan": "2=gathered"}}  # noqa: RUF012 - as a task does

    summary = dure.train(
        Planned(layered=True), strategy="tensor_parallel", nproc=2, runs_dir=tmp_path, start="fork", samples=7,
        quiet=True,
    )  # fmt: skip
    assert '"plan": "2=gathered"' in (tmp_path / summary.run / "spec.json").read_text()


def test_leaving_puts_torch_back_as_it_was():
    def work(group: ProcessGroup) -> list[Any]:
        before = torch.backends.mha.get_fastpath_enabled()
        strategy = prepared("tensor_parallel", group, network())
        during = torch.backends.mha.get_fastpath_enabled()
        strategy.close()
        return [before, during, torch.backends.mha.get_fastpath_enabled()]

    assert on_ranks(1, work) == [[True, False, True]]
