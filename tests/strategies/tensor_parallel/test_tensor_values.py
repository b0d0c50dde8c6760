"""Divided values and weights, whatever a model or a loss does with them: one process's result, or a sentence."""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import dure
from dure.comm.groups import ProcessGroup
from dure.errors import TaskInvalid
from dure.strategies.tensor_parallel.tensor_division import TensorDivision
from dure.strategies.tensor_parallel.tensor_parallel import TensorParallel
from tests.comm.gloo_ranks import on_ranks
from tests.conformance.cases import TO_ROUNDING as SUM_ROUNDING
from tests.conformance.cases import train_case, weights_of
from tests.conformance.tasks import WIDTH as TASK_WIDTH
from tests.conformance.tasks import Regression
from tests.specs import spec_of
from tests.strategies.sharded.sharded_cases import backward, prepared
from tests.strategies.tensor_parallel.tensor_cases import (
    LENGTH,
    TO_ROUNDING,
    WIDTH,
    differences,
    mean_square,
    tokens,
    trained_weights,
)


class Pair(nn.Module):
    """A column layer and a row layer, and what is done between them."""

    between = staticmethod(torch.tanh)

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.fc2(self.between(self.fc1(x)))


class Gathered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Attention(nn.Module):
    """Two heads; a subclass changes queries and keys, or the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def heads(self, x: Tensor) -> list[Tensor]:
        return [layer(x).view(*x.shape[:2], 2, 3).transpose(1, 2) for layer in (self.q, self.k, self.v)]

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.transpose(-2, -1)).softmax(-1) @ value

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.mixed(*self.heads(x)).transpose(1, 2).reshape(x.shape))


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 2, 3).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (query @ key.transpose(-2, -1)).softmax(-1) @ value
        return self.proj(mixed.transpose(1, 2).reshape(x.shape))


class Words(nn.Module):
    """An embedding that is divided by its rows, seven over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        ids = (2 * x[..., 0]).long().clamp(-3, 3) + 3
        return self.fc2(torch.tanh(self.fc1(self.embedding(ids) + x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x)


def assert_all_exact(cases: list[Any], num_ranks: int = 2, **options: Any) -> None:
    """Run cases on the same ranks, and show which of them differ."""
    found = differences(cases, num_ranks, **options)
    wrong = {index: value for index, value in enumerate(found) if not isinstance(value, float) or value > TO_ROUNDING}
    assert wrong == {}


class BeyondItsRows(Words):
    """Asks for a row that the embedding does not have."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.row = row

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + self.embedding(torch.tensor([0, self.row]))[0]


def test_rows_that_an_embedding_does_not_have_are_an_error_as_on_one_device():
    with pytest.raises(IndexError, match="out of range"):
        BeyondItsRows(7)(tokens(2)[0].float())

    def work(group: ProcessGroup) -> None:
        for row in (7, 8, -1):
            with pytest.raises(IndexError, match="out of range"):
                trained_weights("tensor_parallel", group, lambda row=row: BeyondItsRows(row), mean_square, tokens(2))

    on_ranks(2, work)


# autograd functions that run layers again in backward, and ask for gradients of parameters that they got


class RunAgain(torch.autograd.Function):
    """A checkpoint of one's own, as in diffusion models; gradients that are not there are left out or an error."""

    @staticmethod
    def forward(ctx: Any, run: Any, is_lenient: bool, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.is_lenient = run, is_lenient
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = ctx.run(x)
        return None, None, *torch.autograd.grad(output, (x, *parameters), gradient, allow_unused=ctx.is_lenient)


class WithRunAgain(Pair):
    def __init__(self, is_lenient: bool) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 8)
        self.is_lenient = is_lenient

    def run(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x))) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        layers = [self.fc1, self.fc2, *[self.unused] * self.is_lenient]
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        return x + RunAgain.apply(self.run, self.is_lenient, torch.tanh(self.fc2(self.fc1(x))), self.scale, *parameters)


class ByWeight(torch.autograd.Function):
    """Computes with a weight by itself, and asks for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.view_as(weight)
            output = x @ weight.T
        return torch.autograd.grad(output, (x, weight), gradient)


class WithWeight(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(ByWeight.apply(x, self.fc1.weight) + self.fc1(x))


class Reversible(torch.autograd.Function):
    """Layers that are run again in backward, and asked for the gradients of their own parameters, not of those given.

    RevNets do so.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layers(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            output = ctx.layers(x)
        of_x, *others = torch.autograd.grad(output, [x, *ctx.layers.parameters()], gradient)
        return of_x, None, *others


class WithReversible(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair()

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + Reversible.apply(x, self.inner, *self.inner.parameters()))


def test_functions_that_run_layers_again_give_parameters_their_gradients():
    makers = [lambda: WithRunAgain(True), lambda: WithRunAgain(False), WithWeight, WithReversible]
    assert_all_exact([(make, lambda: mean_square) for make in makers])


# changes in place


class ChangedInput(nn.Module):
    """Two column layers of one input, which is changed between them; frozen, for backward needs the input."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for layer in (self.q, self.k, self.v):
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale
        query = self.q(x)
        key = self.k(x.mul_(2))
        return self.o(query + key + self.v(x.tanh_()))


class ChangedLayers(nn.Module):
    """Layers of each kind, whose outputs are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.fc1, self.fc2, self.fc3 = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH, bias=False), nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding((2 * x[..., 0]).long().clamp(-3, 3) + 3)
        hidden *= 2.5
        hidden[..., 0] = 1
        inner = self.fc1(hidden)
        inner += 0.1
        inner.relu_()
        hidden = hidden + self.fc2(inner).add_(x).tanh_()
        out = self.fc3(hidden)
        out[0].zero_()
        return out.mul_(0.5)


def changing_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sub_(1).square_().mean()


class ChangedAttention(Fused):
    """One of the three is scaled in place."""

    def forward(self, x: Tensor) -> Tensor:
        joint = self.qkv(x).view(*x.shape[:2], 3, 2, 3).permute(2, 0, 3, 1, 4)
        joint[0].mul_(0.5)
        query, key, value = joint
        mixed = (query @ key.transpose(-2, -1)).softmax(-1) @ value
        return self.proj(mixed.transpose(1, 2).reshape(x.shape).relu_())


class ChangedParts(Pair):
    """Parts of a divided value, which ranks have without asking the others."""

    def between(self, hidden: Tensor) -> Tensor:
        hidden[0].mul_(3)
        hidden.view(-1, 8).transpose(0, 1).add_(1)
        hidden[1:, :2] = 0.5
        return torch.nn.Hardshrink()(hidden).clamp_(-1, 1)


@pytest.mark.slow
def test_values_that_are_changed_in_place_are_exact():
    cases = (ChangedInput, ChangedLayers, ChangedAttention, ChangedParts)
    assert_all_exact([(build, lambda: mean_square) for build in cases])
    assert_all_exact([(build, lambda: changing_loss) for build in (Pair, ChangedLayers)])


CHANGED_SUMS = [
    lambda total: total.relu_(),
    lambda total: total.add_(1),
    lambda total: total.fill_(3.0),
    lambda total: total.normal_(),
    lambda total: total.sub_(total.mean()).div_(2),
    lambda total: (total[0].mul_(2), total.__setitem__(1, 0.5), total)[2],
]


@pytest.mark.parametrize("dim", [1, -1])
def test_sums_over_the_ranks_that_are_changed_in_place_are_exact(dim):
    def change_sum(change: Any) -> Any:
        return between(lambda hidden: hidden * change(hidden.sum(dim, keepdim=True)))

    assert_all_exact([(change_sum(change), lambda: mean_square) for change in CHANGED_SUMS])


class Averaging(Pair):
    """Replaces a buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def between(self, hidden: Tensor) -> Tensor:
        self.average = 0.9 * self.average + hidden.detach().mean()
        return hidden * self.average


def test_buffers_that_a_model_replaces_by_divided_values_are_whole_between_steps():
    def work(group: ProcessGroup) -> list[type]:
        strategy = prepared("tensor_parallel", group, Averaging())
        kinds = []
        for _ in range(2):
            backward(strategy, torch.ones(2, LENGTH, WIDTH))
            kinds.append(type(strategy.model.average))
        strategy.close()
        return kinds

    assert on_ranks(2, work) == [[Tensor, Tensor]] * 2
    assert_all_exact([(Averaging, lambda: mean_square)])


class Empty(Pair):
    """Layers that get no tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x[:, :0]), super().forward(x)], 1)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_that_get_no_tokens_are_exact(sequence_parallel):
    assert_all_exact([(Empty, lambda: mean_square)], sequence_parallel=sequence_parallel)


def between(change: Any) -> Any:
    return type("Between", (Pair,), {"between": staticmethod(change)})


class UsedAgain(Fused):
    def forward(self, x: Tensor) -> Tensor:
        joint = self.qkv(x)
        parts = joint.view(*x.shape[:2], 3, WIDTH)
        parts[:, :, 0].mul_(2)
        return self.proj(parts.sum(2)) + joint[..., :WIDTH]


CHANGED_COPIES = {
    "a column": lambda hidden: (hidden[..., 1].mul_(3), hidden)[1],
    "windows": lambda hidden: (hidden.unfold(-1, 2, 2).tanh_(), hidden)[1],
    "a view across ranks": lambda hidden: (hidden.reshape(-1)[::3].zero_(), hidden)[1],
    "an assignment": lambda hidden: (hidden[..., 3:6].__setitem__(0, 1.0), hidden)[1],
    "columns together": lambda hidden: (torch._foreach_zero_([hidden[..., 1], hidden[..., 2]]), hidden)[1],
    "without gradients": lambda hidden: (torch.no_grad()(lambda: hidden.detach().diagonal().zero_())(), hidden)[1],
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_changes_in_place_that_would_be_lost_are_refused(mode):
    cases = [between(change) for change in CHANGED_COPIES.values()]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with mode():
            model(x)
        return mean_square(model, x)

    found = dict(zip(CHANGED_COPIES, differences([(case, lambda: loss) for case in cases]), strict=True))
    assert {name: str(one) for name, one in found.items() if not isinstance(one, TaskInvalid)} == {}
    assert all("the model changes part of a value that is divided" in str(one) for one in found.values())


PARTS_FROM_BEFORE = {
    "a column": lambda hidden: hidden[..., 1],
    "windows": lambda hidden: hidden.unfold(-1, 2, 2),
    "a view across ranks": lambda hidden: hidden.reshape(-1)[::3],
}


def test_parts_that_would_miss_a_later_change_are_refused_and_those_that_nobody_has_are_not():
    def changed(take: Any) -> Any:
        def change(hidden: Tensor) -> Tensor:
            part = take(hidden)
            hidden *= 2
            return hidden * part.mean()

        return between(change)

    refused = differences([(changed(take), lambda: mean_square) for take in PARTS_FROM_BEFORE.values()])
    assert all("keeps a part of it from before" in str(one) for one in refused), refused
    used = [changed(lambda hidden, take=take: take(hidden).sum()) for take in PARTS_FROM_BEFORE.values()]
    assert_all_exact([(case, lambda: mean_square) for case in used])


def test_parts_of_one_layer_that_are_used_again_after_a_change_are_refused():
    (found,) = differences([(UsedAgain, lambda: mean_square)])
    assert "uses queries, keys and values of one layer again after it changed one of them in place" in str(found)


def cached_norms() -> Any:
    """Return a loss that computes the norm of a weight again if the weight is at another place, or has changed."""
    norms: dict[tuple[int, int], float] = {}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        for weight in (model.fc1.weight, model.fc2.weight):
            key = (weight.data_ptr(), weight._version)
            norms.setdefault(key, float(weight.detach().norm()))
        return mean_square(model, x) * norms[key] / len(norms)

    return loss


def test_weights_are_told_apart_by_their_places_and_versions():
    assert_all_exact([(Pair, cached_norms)])


# derivatives of derivatives


def input_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out.square().mean() + gradient.square().sum() / len(x)


def weight_penalty(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    gradients = torch.autograd.grad(out.square().mean(), list(model.parameters()), create_graph=True)
    return out.square().mean() + sum(gradient.square().sum() for gradient in gradients)


def third_derivative(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(gradient.square().sum(), x, create_graph=True)
    return out.square().mean() + curvature.square().sum() / 1000


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_penalties_on_gradients_are_exact(num_ranks):
    cases = [(model, lambda: input_penalty) for model in (Pair, Gathered, Attention, Fused)]
    assert_all_exact([*cases, (Words, lambda: weight_penalty), (Pair, lambda: third_derivative)], num_ranks)


class Penalised(Regression):
    """A penalty whose mean over the samples is that of each sample's own."""

    def loss(self, model, batch):
        x, y, _ = batch
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            out = model(x)
            (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return functional.mse_loss(out, y) + gradient.square().sum() / len(x)


@pytest.mark.slow
def test_a_penalty_on_gradients_is_exact_over_data_and_tensor_ranks(tmp_path):
    settings = {"global_batch_size": 7, "samples": 28, "seed": 5}
    one = weights_of(train_case(tmp_path, Penalised(layered=True), **settings))
    run = train_case(tmp_path, Penalised(layered=True), "tensor_parallel", 4, mesh="data=2,tensor=2", **settings)
    found = weights_of(run)
    assert max(float((one[name] - found[name]).abs().max()) for name in one) < SUM_ROUNDING


# recomputation


class Recomputing(nn.Module):
    """Computes layers and dropout again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inputs, self.fused, self.pair = nn.Linear(WIDTH, WIDTH), Fused(), Pair()
        self.dropout, self.reentrant = nn.Dropout(0.3), reentrant

    def block(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.fused(x))
        return self.pair.fc2(functional.dropout(torch.tanh(self.pair.fc1(hidden)), 0.4))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.inputs(x), use_reentrant=self.reentrant)


@pytest.mark.slow
def test_what_is_computed_again_in_backward_is_what_it_was():
    assert_all_exact([(lambda kind=kind: Recomputing(kind), lambda: mean_square) for kind in (True, False)])


class SeenBefore(nn.Module):
    """A column layer has the same input twice, at first without gradients."""

    def __init__(self, *, computes_again: bool) -> None:
        super().__init__()
        self.inputs, self.gate_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.computes_again = computes_again

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inputs(x)
        if self.computes_again:
            gate = checkpoint(self.gate_proj, hidden, use_reentrant=True)
        else:
            with torch.no_grad():
                gate = self.gate_proj(hidden)
        return self.down_proj(gate.sigmoid() * self.up_proj(hidden))


def test_inputs_of_layers_that_computed_without_gradients_before_get_theirs():
    assert_all_exact(
        [(lambda again=again: SeenBefore(computes_again=again), lambda: mean_square) for again in (True, False)]
    )


# plain parameters among divided values


class NormedQueries(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.query_norm, self.key_norm = nn.LayerNorm(3), nn.RMSNorm(3)
        self.temperature = nn.Parameter(torch.ones(2, 1, 1))

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = self.query_norm(query) @ self.key_norm(key).transpose(-2, -1)
        return (self.temperature * scores).softmax(-1) @ value


class Biased(Attention):
    shape: tuple[int, ...] = (2, LENGTH, LENGTH)

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, LENGTH**2).expand(*self.shape[:-2], -1).clone())

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bias = self.bias.view(self.shape)
        return (query @ key.transpose(-2, -1) + bias).softmax(-1) @ value


class BiasedBelow(Biased):
    """Gives the bias to torch's attention, for all samples (as T5)."""

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bias = self.bias.view(self.shape).expand(len(query), -1, -1, -1)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)


class BiasedAlike(Biased):
    """One bias for all heads."""

    shape = (LENGTH, LENGTH)

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=self.bias.view(self.shape))


class Caching(Attention):
    """Appends to what is empty at first (as the caches of transformers)."""

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (torch.cat([torch.tensor([], dtype=x.dtype), x], dim=-2) for x in (key, value))
        return super().mixed(query, key, value)


class Scaled(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.norm, self.slope = nn.Parameter(torch.ones(8)), nn.LayerNorm(8), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(self.slope(self.fc1(x)) * self.gain))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.inputs = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        return self.fc2(torch.tanh(hidden) + self.inputs(x)) + hidden


class HandTied(Words):
    """Model whose output layer is the embedding's weight."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.hidden(x), self.embedding.weight) + self.hidden(x) @ self.embedding.weight.t()


@pytest.mark.slow
def test_plain_parameters_among_divided_values_get_the_gradients_of_all_ranks():
    models = [NormedQueries, Biased, BiasedBelow, BiasedAlike, Caching, Scaled, Residual, HandTied]
    assert_all_exact([(model, lambda: mean_square) for model in models])


# any operation


def bounded(value: Tensor) -> Tensor:
    return torch.tanh(value)


def with_rows_set(value: Tensor) -> Tensor:
    value = value.clone()
    value[value < 0] = 0.1
    return value


def added_to_plain(value: Tensor) -> Tensor:
    total = torch.zeros(value.shape, dtype=value.dtype)
    total += value
    return total


OPERATIONS = {
    "item": lambda x: x * float(x.detach().abs().max()),
    "truth": lambda x: x if bool(x.detach().sum() > 0) else -x,
    "numpy": lambda x: x * torch.tensor(x.detach().numpy().std()),
    "tolist": lambda x: x * x.detach().flatten().tolist()[-1],
    "count": lambda x: x * len((x.detach() > 0).nonzero()),
    "histogram": lambda x: x * torch.histc(x.detach(), 3).max(),
    "selected": lambda x: x * torch.masked_select(x.detach(), x.detach() > 0).sum(),
    "unique": lambda x: x * len(torch.unique(x.detach())),
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: functional.layer_norm(x, (8,)),
    "group norm": lambda x: functional.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
    "standard deviation": lambda x: x / x.std(-1, keepdim=True),
    "order": lambda x: x.sort(-1).values,
    "reversed": lambda x: x.flip(-1),
    "sum up": lambda x: x.cumsum(-1),
    "indexed": lambda x: x[..., [1, 0, 3, 2, 5, 4, 7, 6]],
    "halves": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "columns": lambda x: x * sum(x.unbind(-1))[..., None],
    "einsum": lambda x: torch.einsum("btc,btc->bt", x, x)[..., None] * x,
    "products": lambda x: torch.bmm(x, x.transpose(1, 2)) @ x,
    "convolution": lambda x: functional.conv1d(x.transpose(1, 2), torch.ones(8, 1, 1).to(x), groups=8).transpose(1, 2),
    "set": with_rows_set,
    "added to plain": added_to_plain,
    "in place": lambda x: x.clone().mul_(2).add_(1),
    "folded": lambda x: x.unfold(-1, 2, 2).sum(-1).repeat_interleave(2, -1),
    "maximum": lambda x: torch.maximum(x, torch.zeros(())),
}  # fmt: skip


def pair_with(operation: Any) -> Any:
    def build() -> nn.Module:
        model = Pair()
        model.between = lambda value: bounded(operation(bounded(value)))
        return model

    return build


@pytest.mark.slow
def test_any_operation_on_divided_values_is_that_of_the_whole():
    assert_all_exact([(pair_with(operation), lambda: mean_square) for operation in OPERATIONS.values()])


def test_activations_that_dtensor_cannot_differentiate_are_exact():
    kinds = (nn.Hardtanh, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid)
    assert_all_exact([(pair_with(kind()), lambda: mean_square) for kind in kinds])


DRAWS = [
    lambda x: x * torch.rand_like(x),
    lambda x: x + torch.randn_like(x),
    lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    lambda x: x * x.new_empty((len(x), 1, 1)).bernoulli_(0.5),
    lambda x: functional.alpha_dropout(x, 0.3, True),
    lambda x: functional.dropout1d(x, 0.4, True),
    lambda x: functional.dropout(x, 0.4, True),
    lambda x: functional.rrelu(x, training=True),
    lambda x: functional.gumbel_softmax(x, dim=-1),
    lambda x: torch.dropout(x, 0.4, True),
]


@pytest.mark.slow
def test_random_numbers_for_divided_values_are_those_of_one_device():
    assert_all_exact([(pair_with(draw), lambda: mean_square) for draw in DRAWS])


# what a loss does with divided weights


def max_norm(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)
        model.fc1.weight.mul_((0.5 / model.fc1.weight.norm(dim=1, keepdim=True)).clamp(max=1))
    return mean_square(model, x)


class Averages:
    """Keeps a running mean of the weights."""

    def __init__(self) -> None:
        self.mean: dict[str, Tensor] = {}

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                self.mean.setdefault(name, parameter.clone()).lerp_(parameter, 0.1)
        named = model.named_parameters()
        return mean_square(model, x) + sum((p - self.mean[name]).square().sum() for name, p in named)


def changed_by_out(model: nn.Module, x: Tensor) -> Tensor:
    """Change divided weights by `out=`, which `nn.init.eye_` uses too."""
    with torch.no_grad():
        torch.clamp(model.fc2.weight, -0.1, 0.1, out=model.fc2.weight)
        norms = torch.stack([model.fc2.weight.norm(), model.fc1.weight.norm()])
        nn.init.eye_(model.fc1.weight)
    return mean_square(model, x) * norms[0]


def given_to_copies(model: nn.Module, x: Tensor) -> Tensor:
    """Give plain tensors the memory of divided ones, as `nn.utils.vector_to_parameters` does for a teacher."""
    copies = [nn.Parameter(torch.zeros(parameter.shape)) for parameter in model.parameters()]
    nn.utils.vector_to_parameters(0.5 * nn.utils.parameters_to_vector(model.parameters()), copies)
    copies[0].data = model.fc1.weight.data
    return mean_square(model, x) + sum(
        ((p - c.detach()) ** 2).sum() for p, c in zip(model.parameters(), copies, strict=True)
    )


def changed_together(model: nn.Module, x: Tensor) -> Tensor:
    """Change divided and whole weights, and an average of them, by functions of lists."""
    weights = [*model.parameters()]
    with torch.no_grad():
        averages = [weight.clone() for weight in weights]
        torch._foreach_mul_(weights, 0.9)
        torch._foreach_lerp_(averages, weights, 0.5)
    return mean_square(model, x) + sum((w - a).square().sum() for w, a in zip(weights, averages, strict=True))


def decayed(model: nn.Module, x: Tensor) -> Tensor:
    return mean_square(model, x) + 0.1 * sum(parameter.square().sum() for parameter in model.parameters())


def normed(model: nn.Module, x: Tensor) -> Tensor:
    vector = nn.utils.parameters_to_vector(model.parameters())
    read = model.fc1.weight[0].sum() * float(model.fc2.weight.detach().sum())
    return mean_square(model, x) + 0.01 * vector.norm() + read


def with_vectors(model: nn.Module, x: Tensor) -> Tensor:
    """Multiply a divided weight by a vector on its left, on both sides as a spectral norm does, and as a layer does."""
    left = (x[0, 0].new_ones(len(model.fc1.weight)) @ model.fc1.weight).sum(0)
    scale = torch.tanh(model.fc1.bias) @ model.fc1.weight @ x[0, 0]
    one = functional.linear(x[0, 0], model.fc1.weight).sum(0)
    return mean_square(model, x) + left.square() + scale + one


def of_layers(model: nn.Module, x: Tensor) -> Tensor:
    return model.fc2(torch.tanh(model.fc1(x))).square().mean() + model.fc1(x).square().mean()


def of_a_copy(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - copy.deepcopy(model)(-x).detach()).square().mean()


def functional_call(model: nn.Module, x: Tensor) -> Tensor:
    doubled = {name: 2 * parameter for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, doubled, x).square().mean()


def test_weights_that_are_changed_in_lists_or_by_out_or_given_to_plain_tensors_are_exact():
    assert_all_exact([(Pair, lambda loss=loss: loss) for loss in (changed_together, changed_by_out, given_to_copies)])


def test_products_of_vectors_and_divided_weights_are_exact():
    assert_all_exact([(Pair, lambda: with_vectors)])


@pytest.mark.slow
def test_a_loss_may_use_and_change_the_weights_in_any_way():
    losses = [max_norm, decayed, normed, of_layers, of_a_copy, functional_call]
    assert_all_exact([*((Pair, lambda loss=loss: loss) for loss in losses), (Pair, lambda: Averages().loss)])


class Aliasing(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.listed, self.named = [self.fc1.weight], {"weight": self.fc2.weight}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.listed[0].mean() + self.named["weight"].mean()


class Hooked(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.fc1.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class Overridden(Pair):
    def __init__(self) -> None:
        super().__init__()
        plain = self.fc1.forward
        self.fc1.forward = lambda value: 2 * plain(value)


class Pruned(Pair):
    def __init__(self) -> None:
        super().__init__()
        prune.ln_structured(self.fc1, "weight", 0.5, n=2, dim=0)


class Keyword(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(input=torch.tanh(self.fc1(input=x)))


class TiedThrough(nn.Module):
    """An embedding, a layer with its weight, and a module that has the layer's bias (as BERT's head)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH)
        self.predictions = nn.Module()
        self.predictions.decoder = nn.Linear(WIDTH, 8)
        self.predictions.decoder.weight = self.embedding.weight
        self.predictions.bias = self.predictions.decoder.bias
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ids = (2 * x[..., 0]).long().clamp(-3, 3) + 3
        return self.predictions.decoder(torch.tanh(self.dense(self.embedding(ids) + x)))


@pytest.mark.slow
def test_weights_that_are_held_hooked_made_or_shared_in_other_ways_are_exact():
    models = [Aliasing, Hooked, Overridden, Pruned, Keyword, TiedThrough]
    assert_all_exact([(model, lambda: mean_square) for model in models])


# outputs


@dataclass
class Answer:
    logits: Tensor
    hidden: Any = None


class Items(OrderedDict):
    """A mapping whose items are attributes too (as Hugging Face's outputs)."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__.update(items)


class Returning(Pair):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        hidden = self.fc1(x)
        return self.form(self.fc2(torch.tanh(hidden)), hidden)


def test_outputs_of_any_class_are_whole():
    def whole(value: Any) -> Tensor:
        assert type(value) is Tensor
        return value.square().mean()

    forms = [Answer, lambda y, h: Items(logits=y, hidden=h)]
    losses = [lambda: lambda model, x: whole(model(x).logits) + whole(model(x).hidden)] * 2
    assert_all_exact([(lambda form=form: Returning(form), loss) for form, loss in zip(forms, losses, strict=True)])


class Measured(Regression):
    """A loss and a metric with weights in them, which ranks have parts of."""

    def build_model(self):
        return nn.Sequential(nn.Linear(TASK_WIDTH, 8), nn.Tanh(), nn.Linear(8, TASK_WIDTH)).double()

    def loss(self, model, batch):
        return super().loss(model, batch) + model[0].weight.square().sum()

    def metrics(self, model, batch):
        return {"norm": dure.Sum(model[0].weight.norm(), 1), "first": dure.Sum(model[0](batch[0]).sum(), len(batch[0]))}


@pytest.mark.slow
def test_an_evaluation_of_what_is_divided_is_that_of_one_process(tmp_path):
    settings = {"runs_dir": tmp_path, "start": "fork", "quiet": True, "samples": 14, "threads": 1}
    one = dure.train(Measured(), strategy="single", **settings)
    other = dure.train(Measured(), strategy="tensor_parallel", nproc=2, **settings)
    for name, metric in one.metrics.items():
        assert other.metrics[name].value == pytest.approx(metric.value, rel=1e-12)


# ranks that round differently


class Rounding(Pair):
    """An undivided layer whose gradient is a little other on each rank, as that of a kernel with atomics is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        normed.register_hook(lambda gradient: gradient * (1 + 1e-3 * dist.get_rank()))
        return super().forward(normed)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "mesh"),
    [
        ("tensor_parallel", 2, "data=1,tensor=2"),
        ("tensor_parallel", 4, "data=2,tensor=2"),
        ("fsdp", 4, "shard=2,tensor=2"),
    ],
)
def test_undivided_weights_of_ranks_that_round_differently_stay_the_same(strategy, num_ranks, mesh, monkeypatch):
    monkeypatch.setattr(TensorDivision, "may_drift", lambda self: True)

    def work(group: Any) -> tuple[dict[str, Tensor], list[float]]:
        return trained_weights(strategy, group, Rounding, mean_square, tokens(4, 3), mesh=mesh)

    first, *others = [weights for weights, _ in on_ranks(num_ranks, work)]
    for weights in others:
        torch.testing.assert_close(weights, first, rtol=0, atol=0)


def test_ranks_may_drift_on_accelerators_that_are_not_asked_to_repeat(monkeypatch):
    division = object.__new__(TensorDivision)
    division.mesh = SimpleNamespace(size=lambda axis: 2)
    asked = []
    for kind, is_deterministic in (("cpu", False), ("cuda", True), ("cuda", False)):
        division._device = torch.device(kind)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda answer=is_deterministic: answer)
        asked.append(division.may_drift())
    assert asked == [False, False, True]


# what is refused


class Closing(Pair):
    def __init__(self) -> None:
        super().__init__()
        weight = self.fc1.weight
        self.extra = lambda: weight.sum()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.extra()


class InPlace(Fused):
    def forward(self, x: Tensor) -> Tensor:
        joint = self.qkv(x)
        joint.mul_(2)
        query, key, value = joint.chunk(3, -1)
        return self.proj(query * key * value)


class FusedHook(Fused):
    def forward(self, x: Tensor) -> Tensor:
        joint = self.qkv(x)
        joint.register_hook(lambda gradient: 2 * gradient)
        query, key, value = joint.chunk(3, -1)
        return self.proj(query * key * value)


def test_weights_that_something_else_holds_and_parts_changed_in_place_are_refused():
    cases = [(case, lambda: mean_square) for case in (Closing, InPlace, FusedHook)]
    held, in_place, hooked = differences(cases)
    assert isinstance(hooked, TaskInvalid)
    assert "asks for the gradient of queries, keys and values of one layer together (register_hook)" in str(hooked)
    assert isinstance(held, TaskInvalid)
    assert str(held).startswith("fc1.weight is kept by something besides the model's layers")
    assert isinstance(in_place, TaskInvalid)
    assert "the model changes queries, keys and values of one layer in place (mul_)" in str(in_place)


def along_a_direction(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent.square().mean()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, as it imports its rules
def test_derivatives_in_forward_mode_are_refused():
    (fault,) = differences([(Pair, lambda: along_a_direction)])
    assert isinstance(fault, TaskInvalid)
    assert "uses derivatives in forward mode (torch.autograd.forward_ad), which cannot go through" in str(fault)


def test_hooks_on_gradients_with_data_ranks_are_refused():
    (fault,) = TensorParallel.check_model(Hooked(), spec_of("tensor_parallel", nproc=2, mesh="data=2,tensor=1"))
    assert fault.startswith("fc1.weight has a hook on its gradient, which would get the gradient of one data rank's")
    assert TensorParallel.check_model(Hooked(), spec_of("tensor_parallel", nproc=2)) == []


@pytest.mark.skipif("2.11" in torch.__version__, reason="its DTensor has a rule for group_norm")
def test_what_dtensor_cannot_do_in_backward_is_told_with_the_way_out(monkeypatch):
    from dure.strategies.tensor_parallel import values as tensor_values

    monkeypatch.setattr(tensor_values, "COMPUTED", tensor_values.COMPUTED | {"group_norm"})

    def work(group: ProcessGroup) -> None:
        model = Pair()
        model.between = lambda value: functional.group_norm(value.transpose(1, 2), 2).transpose(1, 2)
        backward(prepared("tensor_parallel", group, model), torch.ones(2, LENGTH, WIDTH))

    for error in on_ranks(2, work):
        assert isinstance(error, TaskInvalid)
        assert "does something with divided values that DTensor has no rule for" in str(error)
        assert "--tensor-parallel.plan" in str(error)
