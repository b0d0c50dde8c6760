"""Inspection of a loss: every trait is found by trying, and nothing stays behind."""

import functools
import random
import warnings
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import dure
from dure.strategies.contract.loss_traits import LossTraits
from dure.training.inspection import additivity, constant_draws, loss_inspection
from dure.training.inspection.additivity import Additivity
from dure.training.inspection.loss_calls import LossCalls, aside
from dure.training.inspection.loss_inspection import LossInspection

AUTOCAST_BEGINS = torch.autocast.__enter__
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Learning(nn.Module):
    """Keeps one buffer that follows the samples, and one that counts calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return x


class Batchwise(nn.Module):
    def forward(self, x):
        return x - x.mean(0) if self.training else x


class Task:
    def __init__(self):
        self.calls = 0
        self.average = 0.0
        self.generator = torch.Generator().manual_seed(1)
        self.numbers = np.random.default_rng(0)


def plain(model, x, task):
    return model(x).square().mean()


def stop_clock(monkeypatch):
    """Let no inspection run out of time, however busy the machine is."""
    for module in (additivity, loss_inspection):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))


def inspection_of(loss, model, fetch, task=None, **options):
    calls = LossCalls(loss, model, fetch, {"task": task} if task else {}, nullcontext)
    return LossInspection(Additivity(calls, is_exact=True, **options))


def traits_of(loss=plain, layer=None, task=None, x=X, fetch=None, **options):
    task = task or Task()
    torch.manual_seed(0)
    model = nn.Sequential(*([layer] if layer else []), nn.Linear(4, 2)).double()
    own_fetch = fetch or (lambda places: x[list(places)])
    return inspection_of(lambda model, x: loss(model, x, task), model, own_fetch, task, **options).traits(len(x))


def limited(loss, num_samples):
    """Return a loss for which there is memory for so many samples at once."""

    def limited_loss(model, x, task):
        if len(x) > num_samples:
            raise torch.OutOfMemoryError("no memory for so many")
        return loss(model, x, task)

    return limited_loss


@pytest.mark.parametrize("num_samples", [2, 3, 4, 6])
def test_loss_without_memory_for_a_group_is_tried_on_as_many_samples_as_training_has_at_once(num_samples):
    settings = {"most_at_once": 2, "layer": Batchwise()}
    found = traits_of(limited(plain, num_samples), **settings)
    assert (found.reason_unknown, found.model_not_additive) == (None, True)
    assert traits_of(limited(plain, num_samples), most_at_once=2) == traits_of(plain)


def test_loss_without_memory_for_one_step_is_unknown():
    found = traits_of(limited(plain, 2), most_at_once=8)
    assert found.reason_unknown == "the loss failed with OutOfMemoryError when it was tried"
    assert traits_of(limited(plain, 1), most_at_once=1).reason_unknown is not None


def test_inspection_does_not_let_cudnn_time_algorithms_for_its_batches(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    seen = set()

    def noting(model, x, task):
        seen.add(torch.backends.cudnn.benchmark)
        return plain(model, x, task)

    assert traits_of(noting).not_additive is None
    assert (seen, torch.backends.cudnn.benchmark) == ({False}, True)


def test_plain_loss_has_no_traits():
    assert traits_of() == LossTraits(learns_statistics=False, has_dropout=False)


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x, task: model(x + torch.randn_like(x)).mean(),
        lambda model, x, task: model(x * np.random.rand()).mean(),
        lambda model, x, task: functional.dropout(model(x), 0.5).mean(),
        lambda model, x, task: model(x + torch.rand(1, generator=task.generator, dtype=x.dtype)).mean(),
        lambda model, x, task: model(x * task.numbers.random()).mean(),
    ],
)
def test_draws_of_any_generator_are_found(loss):
    assert traits_of(loss).draws


@pytest.mark.parametrize(
    ("layer", "draws"), [(nn.Dropout(0.5), True), (nn.Dropout(0.0), False), (nn.RReLU(), True), (nn.Tanh(), False)]
)
def test_draws_of_layers_are_found_whatever_their_class(layer, draws):
    assert traits_of(layer=layer).draws is draws


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x, task: model(x).square().sum(),
        lambda model, x, task: (model(x).square().mean(1) * (x[:, 0] > 0)).sum() / (x[:, 0] > 0).sum().clamp_min(1),
        lambda model, x, task: model(x).std(),
        lambda model, x, task: model(x).square().mean() + model(x.flip(0)).mul(model(x)).mean(),
        lambda model, x, task: dure.Sum(model(x).square().mean(), len(x)),
        lambda model, x, task: dure.Sum(model(x).square().sum(), 1),
    ],
)
def test_loss_that_is_no_mean_over_samples_is_found(loss):
    assert "for 8 samples at once" in traits_of(loss).not_additive


def halves():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def weighed(model, x):
    weights = 1 + 0.02 * x[:, 0]
    return (model(x).float().square().mean(1) * weights).sum() / weights.sum()


def in_halves(model, x):
    with halves():
        return model(x).float().square().mean()


def weighed_in_halves(model, x):
    with halves():
        return weighed(model, x)


def only_in_halves(model, x):
    with halves():
        return functional.linear(x.bfloat16(), model[0].weight).float().square().mean()


@pytest.mark.parametrize(
    ("loss", "is_exact", "is_mean"),
    [
        (in_halves, True, True),
        (weighed_in_halves, True, False),
        (only_in_halves, True, True),
        (weighed, False, False),
        (only_in_halves, False, True),
    ],
)
def test_parts_are_compared_in_full_precision_if_the_loss_accepts_it(loss, is_exact, is_mean):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)), X.float()
    calls = LossCalls(loss, model, lambda places: x[list(places)], {}, nullcontext if is_exact else halves)
    traits = LossInspection(Additivity(calls, is_exact=is_exact)).traits(len(x))
    assert (traits.not_additive is None) is is_mean
    assert traits.autocasts
    assert torch.autocast.__enter__ is AUTOCAST_BEGINS


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x, task: dure.Sum((model(x) * (x[:, :1] > 0)).sum(), (x[:, 0] > 0).sum()),
        lambda model, x, task: model(x).square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters()),
        lambda model, x, task: functional.cross_entropy(model(x), (x[:, 0] > 0).long()),
    ],
)
def test_loss_that_is_a_mean_over_samples_or_a_sum_with_its_count_is_left_alone(loss):
    assert traits_of(loss).not_additive is None


def attended(model, x, task):
    attention = functional.scaled_dot_product_attention
    return model(attention(x[:, None], x[:, None], x[:, None], dropout_p=0.2)[:, 0]).square().mean()


DRAWING = [
    lambda x, task: x + torch.randn_like(x),
    lambda x, task: x + torch.rand(x.shape, dtype=x.dtype),
    lambda x, task: x * torch.empty_like(x).uniform_(0.5, 1.5),
    lambda x, task: x * torch.empty_like(x).exponential_(2.0),
    lambda x, task: x * torch.empty_like(x).normal_(1.0, 0.1),
    lambda x, task: x * torch.randint(1, 5, (len(x), 1)),
    lambda x, task: x * torch.multinomial(torch.arange(1.0, 31.0), len(x), replacement=True)[:, None],
    lambda x, task: x * torch.bernoulli(x.sigmoid()),
    lambda x, task: torch.distributions.Normal(x, 0.1).rsample(),
    lambda x, task: torch.distributions.Categorical(logits=x).sample()[:, None] * x,
    lambda x, task: functional.gumbel_softmax(x),
    lambda x, task: functional.dropout(x, 0.3),
    lambda x, task: torch.native_dropout(x, 0.3, train=True)[0],
    lambda x, task: x[:, torch.randperm(x.shape[1])],
    lambda x, task: torch.stack([row * torch.rand(()) for row in x]),
    lambda x, task: x * torch.rand(1, generator=task.generator, dtype=x.dtype),
    lambda x, task: x * torch.from_numpy(np.random.rand(len(x), 1)),
]


@pytest.mark.parametrize("changed", DRAWING)
def test_loss_that_draws_is_not_said_to_compare_samples(changed):
    traits = traits_of(lambda model, x, task: model(changed(x, task)).square().mean())
    assert traits.draws
    assert traits.not_additive is None


@pytest.mark.parametrize("changed", DRAWING[:-1])
def test_loss_that_draws_and_compares_samples_is_found(changed):
    traits = traits_of(lambda model, x, task: model(changed(x, task)).square().mean() + model(x).std())
    assert traits.draws
    assert "with constants for its random numbers" in traits.not_additive


def until(condition, draw):
    while not condition(drawn := draw()):
        pass
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        lambda x: x * until(torch.any, lambda: torch.rand(x.shape) < 0.02),
        lambda x: x * until(lambda kept: not kept.all(), lambda: torch.rand(x.shape) < 0.6),
        lambda x: x * until(lambda seen: seen.unique().numel() > 1, lambda: torch.randint(0, 9, x.shape)),
    ],
)
def test_loss_that_draws_until_a_condition_holds_is_not_waited_for(changed):
    traits = traits_of(lambda model, x, task: model(changed(x)).square().mean())
    assert traits.draws
    assert traits.reason_unknown is None


def test_loss_that_computes_much_between_draws_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(constant_draws, "_MOST_SECONDS", 0.05)

    def loss(model, x, task):
        while True:
            model(x)
            if bool(torch.rand(()) > 0.6):  # which no constant is
                return model(x).square().mean()

    assert traits_of(loss).draws


def test_loss_that_fails_with_constants_for_its_random_numbers_keeps_its_other_traits():
    def loss(model, x, task):
        if torch.rand(8).unique().numel() == 1:
            raise ValueError("eight random numbers are the same")
        task.seen = float(x.sum())
        return model(x).square().mean()

    traits = traits_of(loss)
    assert traits.reason_unknown is None
    assert traits.learned_state == ("task.seen",)


def test_loss_that_mixes_samples_at_random_is_found():
    assert traits_of(lambda model, x, task: model(x * x[torch.randperm(len(x))]).square().mean()).not_additive


def test_loss_with_dropout_in_attention_is_not_said_to_compare_samples():
    traits = traits_of(attended)
    assert traits.draws
    assert traits.not_additive is None


def of_nonzero(model, x, task):
    return model(x[x[:, 0] != 0]).square().mean()


MANY = torch.cat([X] * 30)
RARE = MANY.clone()
RARE[150, 0] = 0


@pytest.mark.parametrize("layer", [None, nn.BatchNorm1d(4), Learning()])
def test_mean_that_leaves_out_one_sample_of_a_few_hundred_is_found(layer, monkeypatch):
    stop_clock(monkeypatch)  # or a busy machine takes fewer
    assert "for 64 samples at once" in traits_of(of_nonzero, layer, x=RARE).not_additive
    assert traits_of(of_nonzero, layer, x=MANY).not_additive is None


def test_more_samples_are_compared_only_as_far_as_batches_are_divided_and_there_is_memory(monkeypatch):
    stop_clock(monkeypatch)  # however busy the machine is
    assert "for 4 samples at once" in traits_of(of_nonzero, x=RARE, most_at_once=4).not_additive
    assert "for 2 samples at once" in traits_of(of_nonzero, x=RARE, most_at_once=1).not_additive  # one has no parts
    assert traits_of(of_nonzero, x=RARE, is_divided=False).not_additive is None


def test_loss_that_changes_from_call_to_call_is_not_taken_for_one_that_leaves_samples_out():
    def loss(model, x, task):
        task.calls += 1
        return model(x).square().mean() * task.calls

    assert traits_of(loss, x=MANY).not_additive is None


def test_part_in_which_nothing_is_counted_is_found(monkeypatch):
    stop_clock(monkeypatch)  # as above
    x = X.clone()
    x[0] = 0
    assert "nan for the same samples" in traits_of(of_nonzero, x=x).not_additive
    x = MANY.clone()
    x[64:66] = 0
    assert "nan for the same samples" in traits_of(of_nonzero, x=x, most_at_once=16).not_additive


def by_frequency(model, x, task):
    return model(x[:, 0].long()).square().mean()


@pytest.mark.parametrize(("scales", "is_mean"), [(True, False), (False, True)])
def test_gradient_that_depends_on_how_often_a_row_occurs_is_found_among_samples_of_different_rows(scales, is_mean):
    table = nn.Embedding(64, 4, scale_grad_by_freq=scales)
    traits = traits_of(by_frequency, table, x=torch.arange(64.0)[:, None], is_divided=True)
    assert (traits.not_additive is None) == is_mean
    assert is_mean or "(each sample twice)" in traits.not_additive


def test_layer_that_computes_over_the_batch_in_training_is_found_and_batchnorm_left_to_its_own_words():
    assert traits_of(layer=Batchwise()).not_additive is not None
    normalised = traits_of(layer=nn.BatchNorm1d(4))
    assert normalised.not_additive is None
    assert normalised.learned_buffers == normalised.counted_buffers == ()
    assert "Expected more than 1 value" in normalised.fails_alone


def standardised(model, x, task):
    advantage = x[:, :2] - x[:, :2].mean(dim=0)
    variance = advantage.square().sum(dim=0) / (len(x) - 1)
    return -(model(x) * advantage / variance.sqrt()).mean()


def test_loss_that_is_nan_for_every_single_sample_fails_alone_and_one_that_is_for_some_does_not():
    assert traits_of(standardised).fails_alone == "its value is nan"
    x = X.clone()
    x[0] = 0
    assert traits_of(of_nonzero, x=x).fails_alone is None


def of_classes(*weights, dtype=torch.float32):
    def loss(model, x):
        targets = (x[:, 0] > 0).long() + (x[:, 1] > 0)
        return functional.cross_entropy(model(x).to(dtype), targets, weight=torch.tensor(weights, dtype=dtype))

    return loss


@pytest.mark.parametrize("is_frozen", [False, True])
def test_small_difference_is_seen_although_the_model_rounds_to_half_precision(is_frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8).bfloat16(), nn.Tanh(), nn.Linear(8, 3).bfloat16())
    model[0].requires_grad_(not is_frozen)
    x = torch.randn(40, 4).bfloat16()

    def traits(loss):
        return inspection_of(loss, model, lambda places: x[list(places)]).traits(len(x))

    assert traits(of_classes(1.0, 1.1, 0.9)).not_additive is not None
    assert traits(of_classes(1.0, 1.0, 1.0)).not_additive is None
    assert traits(of_classes(1.0, 1.0, 1.0, dtype=torch.bfloat16)).not_additive is None
    assert "forward" not in vars(model)


class Dropped(nn.Module):
    def forward(self, x):
        return functional.dropout(x, 0.1, training=self.training)


def test_small_difference_is_seen_although_a_model_in_half_precision_draws():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Dropped(), nn.Tanh(), nn.Linear(8, 3)).bfloat16()
    x = torch.randn(40, 4).bfloat16()

    def traits(loss):
        return inspection_of(loss, model, lambda places: x[list(places)]).traits(len(x))

    assert "with constants for its random numbers" in traits(of_classes(1.0, 1.1, 0.9)).not_additive
    assert traits(of_classes(1.0, 1.0, 1.0)).not_additive is None
    assert traits(of_classes(1.0, 1.0, 1.0, dtype=torch.bfloat16)).not_additive is None


def test_calls_that_cannot_be_divided_are_compared_as_half_precision_allows():
    model = nn.Linear(4, 3).bfloat16()
    x = torch.randn(1, 4).bfloat16().expand(8, 4)

    def loss(model, x):
        return functional.cross_entropy(model(x[0].reshape(2, 2).flatten())[None], torch.tensor([0]))

    assert inspection_of(loss, model, lambda places: x[list(places)]).traits(len(x)).not_additive is None


def of_pairs(model, x, task):
    if len(x) < 2:
        raise ValueError("a pair is needed")
    task.calls += 1
    return (model(x[:1]) - model(x[1:])).square().mean()


def test_loss_that_fails_on_one_sample_is_inspected_in_parts_of_two_or_more():
    traits = traits_of(of_pairs)
    assert traits.fails_alone == "ValueError: a pair is needed"
    assert traits.reason_unknown is None
    assert "for the same samples in 3 parts" in traits.not_additive
    assert traits.counted_state == ("task.calls",)


@pytest.mark.parametrize("num_samples", range(2, 12))
def test_no_part_is_smaller_than_what_a_loss_takes(num_samples):
    parts = additivity._parts_of(range(5, 5 + num_samples), 2)
    assert [place for part in parts for place in part] == [*range(5, 5 + num_samples)]
    assert min(map(len, parts)) >= 2


def test_buffers_are_told_apart_by_what_they_follow():
    traits = traits_of(layer=Learning())
    assert (traits.learned_buffers, traits.counted_buffers) == (("0.mean",), ("0.calls",))


class LearningLate(Learning):
    """Learns from its third batch on."""

    num_batches = 0

    def forward(self, x):
        self.num_batches += self.training
        return super().forward(x) if self.num_batches >= 3 else x


def test_buffer_that_a_later_call_is_the_first_to_set_is_taken_for_a_learned_one():
    traits = traits_of(layer=LearningLate())
    assert {*traits.learned_buffers} == {*traits.model_buffers} == {"0.mean", "0.calls"}
    assert traits.counted_buffers == ()


class ScaledLater(nn.Module):
    """Scales its gradient by the size of the batch, after four calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls <= 4 or not x.requires_grad:
            return x
        kept = x.detach()
        scale = x.numel() ** -0.5
        return kept * (1 - scale) + x * scale


def test_gradient_that_the_model_scales_by_the_batch_in_later_calls_is_that_of_the_model():
    layer = nn.Sequential(nn.Linear(4, 4), ScaledLater())
    assert traits_of(layer=layer, is_divided=True).model_not_additive
    assert not traits_of(layer=nn.Linear(4, 4), is_divided=True).model_not_additive


class Balancing(nn.Module):
    """Moves a buffer by a step of one size, up or down (an expert's bias)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.bias += 0.01 * (x[:, :1].sum(0) - 1).sign().detach()
        return x


def test_buffer_that_moves_alike_on_large_groups_of_samples_follows_them_too(monkeypatch):
    stop_clock(monkeypatch)  # as above
    x = X.clone()
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    traits = traits_of(layer=Balancing(), x=x)
    assert (traits.learned_buffers, traits.counted_buffers) == (("0.bias",), ())


def test_plain_state_is_told_apart_by_what_it_follows():
    def loss(model, x, task):
        task.calls += 1
        value = model(x).square().mean()
        task.average = 0.9 * task.average + 0.1 * value.item()
        return value

    task = Task()
    traits = traits_of(loss, task=task)
    assert (traits.learned_state, traits.counted_state) == (("task.average",), ("task.calls",))
    assert (task.calls, task.average) == (0, 0.0)


class Table(nn.Module):
    """Makes a table when it first needs it, and keeps other state beside it."""

    table = first_mean = sign = None
    calls = 0

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(4, dtype=x.dtype)
            self.first_mean = x.mean().item()
        self.calls += 1
        self.sign = bool(x.mean() > 0)
        return x * self.table


def test_tables_that_the_first_call_makes_are_told_from_what_follows_samples_and_calls():
    traits = traits_of(layer=Table())
    assert traits.cached_state == ("model.0.table",)
    assert {"model.0.first_mean", "model.0.calls", "model.0.sign"} <= {*traits.learned_state, *traits.counted_state}


def weighed_at_first(model, x, task):
    factor, task.is_first = (0.5 if getattr(task, "is_first", True) else 1.0), False
    return factor * model(x).square().mean()


def following(model, x, task):
    weight = model[0].weight.detach()
    if not hasattr(task, "teacher"):
        task.teacher = weight.clone()
    task.teacher = task.teacher.lerp(weight, 0.1)
    return model(x).square().mean()


def test_teacher_that_begins_as_a_copy_of_the_weights_is_no_table():
    traits = traits_of(following)
    assert (traits.counted_state, traits.cached_state) == (("task.teacher",), ())


def test_state_after_which_the_loss_is_another_is_no_table():
    traits = traits_of(weighed_at_first)
    assert (traits.counted_state, traits.cached_state) == (("task.is_first",), ())


class CachedOutputs:
    """Task that computes the targets of its rows once, by the model as it is then."""

    def __init__(self, only_frozen=False):
        self.only_frozen = only_frozen

        @functools.lru_cache(maxsize=1000)
        def target(row):
            layers = self.model[:1] if self.only_frozen else self.model
            return layers(torch.tensor(row, dtype=torch.float64)).detach().mean()

        self.target = target


def distilled(model, x, task):
    task.model = model
    targets = torch.stack([task.target(tuple(row)) for row in x.tolist()])
    return (model(x).mean(1) - targets - 1).square().mean()


@pytest.mark.parametrize("only_frozen", [False, True])
def test_values_that_a_cache_keeps_are_found_if_they_follow_from_trained_weights(only_frozen):
    task = CachedOutputs(only_frozen)
    traits = traits_of(distilled, nn.Linear(4, 4).requires_grad_(False), task=task)
    assert traits.outer_state == (() if only_frozen else ("task.target",))
    assert task.target.cache_info().currsize == 0


def halved(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= 2


def norms(model):
    return sum(parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize(
    ("loss", "uses"),
    [
        (lambda model, x, task: model(x).square().mean(), False),
        (lambda model, x, task: model(x).square().mean() + norms(model), True),
        (lambda model, x, task: model(x).mean() * (1 if model[0].weight.grad is None else 2), True),
        (lambda model, x, task: model(x).mean() * (model[0].weight.grad is None or 1 / 0), True),
        (lambda model, x, task: model(x + torch.randn_like(x)).mean(), False),
        (lambda model, x, task: (model.zero_grad(), model(x).mean())[1], True),
        (lambda model, x, task: (halved(model), model(x).mean())[1], True),
    ],
)
def test_loss_that_reads_or_changes_gradients_is_found(loss, uses):
    assert traits_of(loss).uses_gradients is uses


def test_data_that_change_are_not_taken_for_a_loss_that_reads_gradients():
    scale = iter(range(1, 100))
    assert not traits_of(fetch=lambda places: X[list(places)] * next(scale)).uses_gradients


def test_parameters_that_the_loss_writes_to_and_hooks_are_found():
    def loss(model, x, task):
        model[0].bias.data.clamp_(-1, 1)
        return model(x).mean()

    assert traits_of(loss).changed_parameters == ("0.bias",)
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(lambda gradient: gradient)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    assert traits_of(layer=layer).hooked_parameters == ("0.weight", "0.bias")


def test_hooks_of_modules_are_found_and_gradients_that_do_not_add_up():
    layer = nn.Linear(4, 4)
    layer.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] / inputs[0].norm(),))
    traits = traits_of(layer=nn.Sequential(nn.Linear(4, 4), layer))
    assert traits.hooked_parameters == ("0.1",)
    assert "the gradient of 0.0.weight for all samples at once" in traits.not_additive


def test_loss_that_fails_or_an_iterator_is_said_to_be_unknown(capsys):
    def failing(model, x, task):
        print("before it fails")
        raise KeyError("x")

    assert traits_of(failing).reason_unknown == "the loss failed with KeyError when it was tried"
    task = Task()
    task.stream = iter(range(100))
    assert "task.stream is an iterator" in traits_of(task=task).reason_unknown
    assert capsys.readouterr().out == ""


def test_late_comparison_does_not_call_a_loss_that_may_read_an_iterator():
    task, calls = Task(), []
    inspection = inspection_of(
        lambda model, x: calls.append(x) or model(x).sum(), nn.Linear(4, 2).double(), lambda places: X, task
    )
    task.stream = iter(range(100))  # made after the inspection before training
    assert inspection.late_difference(0, len(X)) == (None, len(X))
    assert not calls


def test_slow_loss_is_compared_on_fewer_samples_and_a_very_slow_one_is_called_once(monkeypatch):
    calls = []

    def loss(model, x, task):
        calls.append(len(x))
        return model(x).sum()

    monkeypatch.setattr("dure.training.inspection.loss_inspection._MOST_SECONDS", 0.0)
    assert "for 5 samples at once" in traits_of(loss).not_additive
    assert max(calls) == 5
    calls.clear()
    monkeypatch.setattr("dure.training.inspection.loss_inspection._SLOWEST_CALL_SECONDS", 0.0)
    assert "too long to try it on parts" in traits_of(loss).reason_unknown
    assert traits_of(loss, is_divided=False).reason_unknown is None
    assert calls == [5, 5]


def test_loss_in_double_over_a_model_in_single_precision_is_rounded_as_that():
    model = nn.Linear(4, 2)
    inspection = inspection_of(
        lambda model, x: model(x).double().square().mean(), model, lambda places: X[list(places)].float()
    )
    assert inspection.traits(len(X)).not_additive is None


@pytest.mark.parametrize(("factor", "names"), [(0.5, ("0.bias",)), (0.0, ())])
def test_writes_to_parameters_that_a_second_call_repeats_are_told_from_those_that_it_leaves(factor, names):
    def loss(model, x, task):
        model[0].bias.data.mul_(factor).add_(1 - factor)
        return model(x).square().mean()

    traits = traits_of(loss)
    assert (traits.changed_parameters, traits.repeated_writes) == (("0.bias",), names)


def test_state_that_forward_leaves_outside_the_model_is_told_from_what_the_loss_keeps():
    def keeping(model, x, task):
        hook = model[0].register_forward_hook(lambda module, args, output: setattr(task, "average", 1.5))
        task.calls += 1
        value = model(x).square().mean()
        hook.remove()
        return value

    assert traits_of(keeping).forward_state == ("task.average",)


def weighted_mean(model, batch):
    weights = batch[:, 0]
    return (model(batch).sum(1) * weights).sum() / weights.sum()


def test_late_comparison_goes_on_from_a_place_until_it_finds_what_is_rare():
    x = torch.ones(300, 4, dtype=torch.float64)
    x[280] = 5.0  # counts more than its number
    model = nn.Linear(4, 2).double()

    inspection = inspection_of(weighted_mean, model, lambda places: x[list(places)], most_at_once=8)
    figures, place = inspection.late_difference(0, 200)
    assert (figures, place) == (None, 200)
    figures, place = inspection.late_difference(place, 300)
    assert figures is not None
    assert 280 < place <= 288


def test_late_comparison_with_one_sample_per_call_takes_two_which_alone_can_be_parted():
    x = torch.ones(300, 4, dtype=torch.float64)
    x[150] = 5.0
    model = nn.Linear(4, 2).double()

    inspection = inspection_of(weighted_mean, model, lambda places: x[list(places)], most_at_once=1)
    figures, place = inspection.late_difference(0, 300)
    assert figures is not None
    assert place == 152


def test_late_comparison_of_a_slow_loss_goes_on_with_other_samples_and_with_more_time_to_more_of_them(monkeypatch):
    monkeypatch.setattr(additivity, "_WIDE_SECONDS", 1e-5)
    x = torch.ones(300, 4, dtype=torch.float64)
    inspection = inspection_of(weighted_mean, nn.Linear(4, 2).double(), lambda places: x[list(places)], most_at_once=8)
    assert [inspection.late_difference(place, 300)[1] for place in (0, 8, 296)] == [8, 16, 300]
    assert inspection.late_difference(0, 300, most_seconds=60.0)[1] == 300


@pytest.mark.parametrize("period", [4, 16])
def test_loss_that_has_a_term_of_the_batch_in_one_of_several_calls_is_found(period):
    class Lazy:
        step = 0

        def __call__(self, model, batch):
            self.step += 1
            out = model(batch)
            term = out.mean(0).square().sum() if self.step % period == 0 else 0.0
            return out.square().mean() + term

    lazy, x = Lazy(), torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inspection = inspection_of(lazy, nn.Linear(4, 2).double(), lambda places: x[list(places)])
    inspection.calls.objects = {"loss": lazy}
    assert "in some of its calls" in inspection.traits(64).not_additive


def surrogate(output):
    """Return the mean square, with a gradient that is divided by its norm over the batch."""
    gradient = output.detach() / (1e-9 + output.detach().norm())
    term = (output * gradient).sum()
    return term - term.detach() + output.detach().square().mean()


def test_late_comparison_finds_gradients_alone_that_no_longer_add_up_without_their_hooks():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = nn.Linear(4, 2).double()
    is_late = False
    reduced = []
    model.weight.register_post_accumulate_grad_hook(reduced.append)

    def loss(model, batch):
        return surrogate(model(batch)) if is_late else model(batch).square().mean()

    inspection = inspection_of(loss, model, lambda places: x[list(places)])
    assert inspection.late_difference(0, 40) == (None, 40)
    is_late = True
    assert "the gradient of weight for all samples" in inspection.late_difference(0, 40)[0]
    assert (reduced, model.weight.grad) == ([], None)
    noisy = inspection_of(
        lambda model, x: surrogate(model(x + torch.randn_like(x))), model, lambda places: x[list(places)]
    )
    assert noisy.late_difference(0, 40)[0] is None


class Cosines(nn.Module):
    """Similarities of each sample with the others, or the samples alone."""

    def __init__(self, mixes):
        super().__init__()
        self.mixes = mixes

    def forward(self, x):
        return x @ x.T if self.mixes else x


@pytest.mark.parametrize("mixes", [True, False])
def test_whether_the_model_or_the_loss_mixes_samples_is_found(mixes):
    task = Task()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), Cosines(mixes)).double()

    def loss(model, x):
        outputs = model(x)
        return (outputs if mixes else outputs @ outputs.T).square().sum()

    traits = inspection_of(loss, model, lambda places: X[list(places)], task).traits(len(X))
    assert traits.not_additive is not None
    assert traits.model_not_additive is mixes


class LearningByData(nn.Module):
    """Learns through `.data`, which counts as no version of the tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.data.mul_(0.9).add_(x.data.mean(0), alpha=0.1)
        return x - self.mean


def test_draws_and_buffers_are_told_apart_by_the_model_and_the_loss():
    def of_loss(model, x, task):
        model[0].mean = model[0].mean + 1
        return (model(x) * torch.rand(len(x), 1)).mean()

    inside, outside = traits_of(layer=Learning()), traits_of(of_loss, layer=Learning())
    assert set(inside.model_buffers) == {"0.mean", "0.calls"}
    assert traits_of(layer=LearningByData()).model_buffers == ("0.mean",)
    assert outside.draws
    assert not outside.model_draws
    assert traits_of(layer=nn.Dropout(0.5)).model_draws


class OwnNoise(nn.Module):
    """Layer with noise of a generator of its own."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x * (1 + float(self.draw.random()))


def test_draws_of_a_generator_that_the_model_holds_are_draws_of_the_model():
    for generator in (np.random.default_rng(3), random.Random(3)):
        traits = traits_of(layer=OwnNoise(generator))
        assert (traits.draws, traits.model_draws) == (True, True)


class Unprintable(ValueError):
    def __str__(self):
        raise ZeroDivisionError


def test_loss_that_takes_no_single_sample_when_its_error_cannot_be_printed_then_its_type_is_there():
    def loss(model, x, task):
        if len(x) == 1 and model[0].training:
            raise Unprintable
        return model(x).square().mean()

    assert traits_of(loss, layer=nn.Dropout(0.0)).fails_alone == "Unprintable: <exception str() failed>"


def test_gradients_of_few_calls_are_in_memory_at_a_time(monkeypatch):
    living = weakref.WeakSet()
    numbers = []
    of_loss = LossCalls._gradients

    def counted(self, *args):
        found = of_loss(self, *args)
        living.update(gradient for gradient in found.values() if gradient.dim() == 2)
        numbers.append(len(living))
        return found

    stop_clock(monkeypatch)
    monkeypatch.setattr(LossCalls, "_gradients", counted)
    assert traits_of() == LossTraits(learns_statistics=False, has_dropout=False)
    assert len(numbers) > 6
    assert max(numbers) <= 3


def test_warning_when_a_trial_has_discarded_it_then_it_is_shown_afterwards():
    def warn():
        warnings.warn("shown once for each line", stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        with aside():
            warn()
        shown.clear()
        warn()
        warn()
    assert len(shown) == 1
