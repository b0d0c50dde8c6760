"""Sections of a model, run one by one, are the model; where they are not, the rehearsal says so."""

import itertools
import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dure.errors import TaskInvalid
from dure.strategies.contract.loss_traits import NOTHING_SEEN
from dure.strategies.contract.precision import Precision
from dure.strategies.sections.plan import SectionPlan
from dure.strategies.sections.sectioned_model import SectionedModel
from dure.strategies.sections.stand_in import stand_in
from dure.strategies.sections.trace import Survey, survey
from dure.strategies.sections.values import describe
from dure.strategies.sections.verify import _Outcome, rehearse
from dure.torchcompat.imports import import_torchvision
from examples.char_gpt import GPT

CPU = torch.device("cpu")


class Tried(NamedTuple):
    """A model's survey, and what it was called with."""

    seen: Survey
    args: tuple
    kwargs: dict


def surveyed(model, *args, **kwargs):
    return Tried(survey(model, args, kwargs), args, kwargs)


def plan_of(tried, *begins):
    return SectionPlan(
        calls=list(tried.seen.chain.calls), begins=[0, *begins], homes=dict.fromkeys(tried.seen.homes, 0)
    )


def in_sections(model, tried, plan):
    """Run all sections one after the other."""
    sections = SectionedModel(model, plan)
    known = [describe(value, "block") for value in tried.seen.outputs]
    value = None
    for number in range(len(plan.begins)):
        begin, end = plan.bounds(number)
        bounds = (begin, None if number == len(plan.begins) - 1 else end)
        value = sections.run(bounds, tried.args, tried.kwargs, received=value, known=known, device=CPU)
    sections.close()
    return value


def rehearsed(model, plan, tried, loss=None, loss_section=-1):
    """Rehearse a loss, by default a sum over the squared output, as the last section or the first one computes it."""
    strategy = SimpleNamespace(
        example=lambda num_samples: tried.args,
        loss=loss or (lambda model, batch: model(*batch, **tried.kwargs).square().sum()),
        objects={},
        precision=Precision("fp32", "cpu"),
        phases=lambda: (phase for phase in ()),
        traits=NOTHING_SEEN,
    )
    return rehearse(strategy, model, plan, tried.seen, loss_section=loss_section % len(plan.begins))


def untied_gpt():
    gpt = GPT(9, layers=3, heads=1, width=4, context=3, dropout=0.0)
    gpt.head.weight = nn.Parameter(gpt.head.weight.detach().clone())
    return gpt


def vision(name, **kwargs):
    return getattr(import_torchvision().models, name)(weights=None, **kwargs)


IMAGES = torch.randn(2, 3, 64, 64)
MODELS = {
    "gpt": (untied_gpt, (torch.tensor([[1, 2, 3], [4, 5, 6]]),)),
    "alexnet": (partial(vision, "alexnet", dropout=0.0), (IMAGES,)),
    "resnet": (partial(vision, "resnet18"), (IMAGES,)),
    "vit": (partial(vision, "vit_b_16", image_size=32, num_classes=3), (torch.randn(1, 3, 32, 32),)),
    "transformer": (
        lambda: nn.Transformer(8, 2, 2, 2, 16, 0.0, batch_first=True),
        (torch.randn(2, 4, 8), torch.randn(2, 3, 8)),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_sections_of_known_models_cut_at_every_place_give_the_same_bits(name):
    build, args = MODELS[name]
    model = build().eval()
    seen = surveyed(model, *args)
    places = seen.seen.chain.places()
    assert len(places) >= 2
    with torch.no_grad():
        assert torch.equal(in_sections(model, seen, plan_of(seen, *places)), model(*args))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "alexnet", "transformer"])
def test_rehearsed_gradients_of_known_models_are_those_of_the_whole(name):
    build, args = MODELS[name]
    model = build()
    tried = surveyed(model, *args)
    plan = plan_of(tried, *tried.seen.chain.places())
    plan = replace(plan, homes={name: plan.section_of(call) for name, call in tried.seen.homes.items()})
    for loss_section in (0, -1):
        assert rehearsed(model, plan, tried, loss_section=loss_section) is None
    assert all(parameter.grad is None for parameter in model.parameters())


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def test_a_recomputation_that_hides_the_graph_is_found_by_its_gradients():
    model = Checkpointed(use_reentrant=True)
    seen = surveyed(model, torch.randn(3, 2, requires_grad=True))
    said = rehearsed(model, plan_of(seen, 2), seen)
    assert said.startswith("Checkpointed cut before blocks.2 gives another gradient of blocks.")
    assert "use_reentrant=True" in said


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradient_that_is_zero_but_for_rounding_is_not_compared(dtype):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    anchors, positives, negatives = torch.randn(3, 5, 6).to(dtype)
    seen = surveyed(model, anchors)

    def loss(model, batch):
        return functional.triplet_margin_loss(model(anchors), model(positives), model(negatives))

    # the last bias is in both members of each distance, and its gradients cancel out
    assert rehearsed(model, plan_of(seen, 2), seen, loss, loss_section=0) is None


@pytest.mark.parametrize(
    ("largest", "small", "dtype"),
    [(1.0, 1e-5, torch.float32), (math.inf, 1e-5, torch.float32), (1.0, 0.1, torch.bfloat16)],
)
def test_small_gradient_that_lacks_a_path_is_found_beside_large_ones(largest, small, dtype):
    large = torch.tensor([largest, 0.5], dtype=dtype)
    whole = _Outcome(1.0, {"large": large, "small": torch.tensor([small], dtype=dtype)})
    parts = _Outcome(1.0, {"large": large, "small": torch.tensor([2 * small], dtype=dtype)})
    assert whole.other_gradients(parts, ["small"]) == ["small"]
    assert whole.other_gradients(whole, ["small"]) == []


class Remembering(nn.Module):
    """Model whose second block uses what its first one keeps."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.memory = [None]
        self.first.register_forward_hook(lambda module, args, output: self.second.memory.__setitem__(0, output))
        self.second.register_forward_hook(lambda module, args, output: output + module.memory[0])

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_value_that_blocks_exchange_by_themselves_is_found_by_its_gradients(dtype):
    torch.manual_seed(0)
    model = Remembering().to(dtype)
    seen = surveyed(model, torch.randn(3, 2, dtype=dtype))
    assert "gives another gradient of first.weight" in rehearsed(model, plan_of(seen, 1), seen)


class Masking(nn.Module):
    """Model that draws a mask before its first block, or has one given."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, mask=None):
        mask = torch.rand(x.shape) if mask is None else mask
        return self.second(torch.tanh(self.first(x)) * mask)


@pytest.mark.parametrize("loss_section", [0, -1])
def test_draws_between_blocks_are_named_as_what_differs_and_those_of_the_loss_do_not_differ(loss_section):
    model = Masking()
    seen = surveyed(model, torch.randn(3, 2))
    said = rehearsed(model, plan_of(seen, 1), seen, loss_section=loss_section)
    assert said.startswith("Masking cut before second draws other random numbers than the whole model, whose own code")

    def drawing(model, batch):
        return model(*batch, mask=torch.rand(batch[0].shape)).square().sum()

    assert rehearsed(model, plan_of(seen, 1), seen, drawing, loss_section) is None


def test_loss_that_is_another_one_at_each_call_is_named_as_what_differs():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    seen = surveyed(model, torch.randn(3, 2))
    numbers = itertools.count(1)
    said = rehearsed(model, plan_of(seen, 1), seen, lambda model, batch: model(*batch).square().sum() * next(numbers))
    assert "cannot be compared with the whole model, because the task's loss is another one at each call" in said


def test_output_whose_tensors_are_in_an_object_is_named_where_the_first_section_computes_the_loss():
    class Sure(nn.Sequential):
        def forward(self, x):
            return torch.distributions.Normal(super().forward(x), 1.0)

    model = Sure(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    seen = surveyed(model, torch.randn(3, 2))

    def likely(model, batch):
        return -model(*batch).log_prob(torch.zeros(3, 2)).mean()

    assert rehearsed(model, plan_of(seen, 1), seen, likely, 0).startswith(
        "Sure returned Normal: what goes from section"
    )
    assert rehearsed(model, plan_of(seen, 1), seen, likely, -1) is None


def test_a_model_that_calls_its_blocks_in_another_order_is_refused():
    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x, turned=False):
            return self.a(self.b(x)) if turned else self.b(self.a(x))

    model = Turning()
    seen = surveyed(model, torch.randn(1, 2))
    sections = SectionedModel(model, plan_of(seen, 1))
    known = [describe(value, "block") for value in seen.seen.outputs]
    with pytest.raises(TaskInvalid, match="Turning called b where a was called on the first samples"):
        sections.run((0, 1), (*seen.args, True), {}, received=None, known=known, device=CPU)
    # outside of a section it is the model that it was
    assert torch.equal(model(*seen.args, True), Turning.forward(model, *seen.args, True))
    sections.close()
    assert all("_compiled_call_impl" not in block.__dict__ for block in (model.a, model.b))


def test_values_of_skipped_blocks_are_nan_so_that_their_use_would_be_heard():
    taken = []

    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(2, 2) for _ in range(3))

        def forward(self, x):
            x = self.a(x)
            taken.append(x)
            return self.c(self.b(x))

    model = Looking()
    seen = surveyed(model, torch.randn(1, 2))
    in_sections(model, seen, plan_of(seen, 2))
    assert [bool(value.isnan().all()) for value in taken] == [False, False, True]


def test_hooks_of_skipped_blocks_do_not_run():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    seen = surveyed(model, torch.randn(1, 2))
    calls = []
    for number, block in enumerate(model):
        block.register_forward_pre_hook(lambda module, args, number=number: calls.append(number))
        block.register_full_backward_hook(lambda module, inputs, outputs: None)
    in_sections(model, seen, plan_of(seen, 1, 2))
    assert calls == [0, 1, 2]


def test_block_that_was_not_called_on_the_first_samples_is_refused_when_it_is():
    class Rare(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.rare = (nn.Linear(2, 2) for _ in range(3))

        def forward(self, x):
            x = self.a(x)
            return self.b(self.rare(x) if x.shape[0] > 1 else x)

    model = Rare()
    seen = surveyed(model, torch.randn(1, 2))
    with pytest.raises(TaskInvalid, match="Rare called rare where b was called on the first samples"):
        in_sections(model, seen._replace(args=(torch.randn(2, 2),)), plan_of(seen, 1))


LOSSES = {
    "weights of the first section": lambda m, x: m(x).square().sum() + m[0].weight.square().sum(),
    "weights of the last section": lambda m, x: m(x).square().sum() + m[2].weight.square().sum(),
    "a factor from the last section": lambda m, x: m(x).square().sum() * m[2].weight.square().sum(),
    "values of weights": lambda m, x: m(x).square().sum() * (1 + m[0].weight.detach().square().sum()),
    "derivatives by the batch": lambda m, x: _penalised(m, x.requires_grad_()),
    "two calls": lambda m, x: (m(x) * m(x)).sum(),
}


def _penalised(model, x):
    total = model(x).square().sum()
    (gradient,) = torch.autograd.grad(total, x, create_graph=True)
    return total + gradient.square().sum()


@pytest.mark.parametrize(("loss", "section", "said"), [
    ("weights of the first section", -1, "^Sequential cut before 1 separates the task's loss from 0.weight, which the"),
    ("weights of the first section", 0, None),
    ("weights of the last section", -1, None),
    ("weights of the last section", 0, "separates the task's loss from 2.weight, which the loss uses itself"),
    ("a factor from the last section", 0, "separates the task's loss from 2.weight, which the loss uses itself"),
    ("values of weights", -1, "separates the task's loss from 0.weight, which the loss uses itself"),
    ("derivatives by the batch", -1, "cannot be computed .RuntimeError: .*without derivatives through it"),
    ("derivatives by the batch", 0, "cannot be computed .RuntimeError: .*without derivatives through it"),
    ("two calls", 0, None),
    ("two calls", -1, "calls Sequential more than once"),
])  # fmt: skip
def test_loss_that_uses_more_than_the_output_is_found(loss, section, said):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    seen = surveyed(model, torch.randn(3, 2))
    found = rehearsed(model, plan_of(seen, 1), seen, lambda model, batch: LOSSES[loss](model, *batch), section)
    assert found is None if said is None else re.search(said, found)
    assert all(parameter.grad is None and not parameter.isnan().any() for parameter in model.parameters())


def test_slice_of_a_stand_in_is_a_model_of_the_same_blocks_and_no_stand_in():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    part = stand_in(model, lambda x: x)[:1]
    assert type(part) is nn.Sequential
    assert part[0] is model[0]
    assert part(torch.ones(1, 2)).shape == (1, 3)
