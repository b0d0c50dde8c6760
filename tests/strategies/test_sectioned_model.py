"""Sections of a model, run one by one, are the model; where they are not, the rehearsal says so."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dure.errors import TaskInvalid
from dure.strategies.pipeline_values import describe
from dure.strategies.section_plan import SectionPlan, Surveyed
from dure.strategies.section_rehearsal import rehearse
from dure.strategies.section_survey import survey
from dure.strategies.sectioned_model import SectionedModel
from dure.torchcompat import import_torchvision
from examples.char_gpt import GPT

CPU = torch.device("cpu")


def surveyed(model, *args, **kwargs):
    return Surveyed(seen=survey(model, args, kwargs), num_samples=1, args=args, kwargs=kwargs)


def plan_of(seen, *begins):
    return SectionPlan(calls=list(seen.seen.chain.calls), begins=[0, *begins], homes={})


def in_sections(model, seen, plan):
    """Run all sections one after the other."""
    sections = SectionedModel(model, plan)
    known = [describe(value, "block") for value in seen.seen.outputs]
    value = None
    for number in range(len(plan.begins)):
        begin, end = plan.bounds(number)
        bounds = (begin, None if number == len(plan.begins) - 1 else end)
        value = sections.run(bounds, seen.args, seen.kwargs, received=value, known=known, device=CPU)
    sections.close()
    return value


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


@pytest.mark.parametrize("name", ["gpt", "alexnet", "transformer"])
def test_rehearsed_gradients_of_known_models_are_those_of_the_whole(name):
    build, args = MODELS[name]
    model = build()
    seen = surveyed(model, *args)
    assert rehearse(model, plan_of(seen, *seen.seen.chain.places()), seen, torch.enable_grad) is None
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
    said = rehearse(model, plan_of(seen, 2), seen, torch.enable_grad)
    assert said.startswith("Checkpointed cut before blocks.2 gives another gradient of blocks.")
    assert "use_reentrant=True" in said


class Remembering(nn.Module):
    """Its second block uses what its first one keeps."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.memory = [None]
        self.first.register_forward_hook(lambda module, args, output: self.second.memory.__setitem__(0, output))
        self.second.register_forward_hook(lambda module, args, output: output + module.memory[0])

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def test_a_value_that_blocks_exchange_by_themselves_is_found_by_its_gradients():
    model = Remembering()
    seen = surveyed(model, torch.randn(3, 2))
    assert "gives another gradient of first.weight" in rehearse(model, plan_of(seen, 1), seen, torch.enable_grad)


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
    assert all("forward" not in block.__dict__ for block in (model.a, model.b))


def test_values_of_skipped_blocks_are_nan_so_that_their_use_would_be_heard():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    seen = surveyed(model, torch.randn(1, 2))
    taken = []
    model[1].register_forward_pre_hook(lambda module, args: taken.append(args[0]))
    in_sections(model, seen, plan_of(seen, 2))
    assert not taken[0].isnan().any()
    assert taken[1].isnan().all()
