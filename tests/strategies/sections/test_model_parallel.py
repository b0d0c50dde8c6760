"""Sections on several devices of one process: where they are, what crosses the cuts, who is refused."""

import itertools

import pytest
import torch
from torch import nn

import dure
from dure.comm.groups import Solo
from dure.errors import SpecInvalid
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.sections.model_parallel import ModelParallel
from dure.strategies.table import STRATEGIES
from examples.char_gpt import CharGPT
from tests.specs import grouped, spec_of
from tests.strategies.contract.test_base import ROWS, step

CPU = torch.device("cpu")


def prepared(model, num_devices, loss=lambda model, batch: model(batch).mean(), **options):
    strategy = ModelParallel(
        StrategyContext(
            STRATEGIES["model_parallel"],
            Solo(),
            (CPU,) * num_devices,
            Precision("fp32", "cpu"),
            spec_of("model_parallel", **options),
        ),
    )
    strategy.example = lambda num_samples: ROWS[:num_samples]
    strategy.prepare(model, lambda m: torch.optim.SGD(m.parameters(), lr=1.0), loss)
    return strategy


def layers(*widths):
    return nn.Sequential(*(nn.Linear(a, b, dtype=torch.float64) for a, b in itertools.pairwise(widths)))


def linear_bytes(a, b):
    return 8 * (a * b + b)


def test_given_cuts_put_the_stated_bytes_on_each_device():
    strategy = prepared(layers(2, 8, 16, 3, 1), 3, cuts="1,3")
    stated = [linear_bytes(2, 8), linear_bytes(8, 16) + linear_bytes(16, 3), linear_bytes(3, 1)]
    assert strategy.section_bytes() == stated
    assert sum(stated) == sum(p.numel() * p.element_size() for p in strategy.model.parameters())


def test_found_cuts_are_even_in_parameters_gradients_and_activations():
    # parameters count twice (their gradients); a linear layer keeps its input, of 4 samples
    strategy = prepared(layers(2, 30, 30, 30, 2), 2, microbatch_size=4)
    held = [2 * linear_bytes(a, b) + 8 * 4 * a for a, b in ((2, 30), (30, 30), (30, 30), (30, 2))]
    assert strategy.plan.begins == [0, 2]
    assert max(sum(held[:2]), sum(held[2:])) == min(max(sum(held[:k]), sum(held[k:])) for k in (1, 2, 3))


def test_large_microbatches_move_the_cut_to_where_activations_are():
    # numbers of parameters 600, 804, 20, 20; kept inputs 2, 200, 4, 4 for each sample
    assert prepared(layers(2, 200, 4, 4, 4), 2, microbatch_size=1).plan.begins == [0, 1]
    assert prepared(layers(2, 200, 4, 4, 4), 2, microbatch_size=100_000).plan.begins == [0, 2]


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
def test_sent_bytes_are_the_activations_over_each_cut_and_the_output_both_ways(num_devices):
    model = layers(2, 5, 7, 3, 1)
    strategy = prepared(model, num_devices, cuts=",".join(str(k) for k in range(1, num_devices)) or None)
    step(strategy, ROWS[:2], ROWS[2:])
    activations = [5, 7, 3][: num_devices - 1]
    per_sample = 2 * 8 * (sum(activations) + 1) if num_devices > 1 else 0
    assert strategy.sent_bytes(2) == 3 * per_sample
    step(strategy, ROWS[:1])
    assert strategy.sent_bytes(1) == per_sample


def test_what_has_no_gradient_crosses_once():
    class Masked(nn.Module):
        def forward(self, x):
            return x[0] * x[1]

    class Masking(nn.Module):
        def forward(self, x):
            return x, x > 3

    model = nn.Sequential(nn.Linear(2, 4, dtype=torch.float64), Masking(), Masked(), nn.Linear(4, 1).double())
    strategy = prepared(model, 2, cuts="2")
    step(strategy, ROWS)
    assert strategy.sent_bytes(1) == 3 * (4 * 8 * 2 + 4 * 1 + 1 * 8 * 2)


def test_step_over_sections_is_that_of_the_whole_model():
    whole, cut = prepared(layers(2, 4, 4, 1), 1), prepared(layers(2, 4, 4, 1), 3)
    cut.model.load_state_dict(whole.model.state_dict())
    assert step(cut, ROWS) == step(whole, ROWS)
    for ours, theirs in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Skipping(nn.Module):
    """Adds what its first layer gives to what its third takes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(2, 2, dtype=torch.float64) for _ in range(4))

    def forward(self, x):
        early = self.a(x)
        return self.d(self.c(self.b(early) + early))


def test_a_cut_over_which_another_value_goes_is_refused_with_its_name():
    said = "strategy is model_parallel: no section can begin with c: what a gives is needed again after b, where add"
    with pytest.raises(SpecInvalid, match=said):
        prepared(Skipping(), 2, cuts="c")
    assert prepared(Skipping(), 2).plan.begins == [0, 1]


@pytest.mark.parametrize(
    ("nproc", "settings", "said"),
    [
        (
            2,
            {},
            r"model_parallel: GPT is 7 blocks .*cannot be cut \(embedding\.weight and head\.weight are one and",
        ),
        (2, {"cuts": "blocks.9"}, r"cuts names blocks\.9, but the blocks of GPT are embedding, position, blocks\.0"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_before_a_folder_or_a_process_is_there(nproc, settings, said, tmp_path):
    settings = grouped("model_parallel", settings)
    with pytest.raises(SpecInvalid, match=said):
        dure.train(CharGPT(), strategy="model_parallel", nproc=nproc, runs_dir=tmp_path / "runs", **settings)
    assert not (tmp_path / "runs").exists()


def test_cuts_are_refused_with_strategies_that_do_not_cut(tmp_path):
    with pytest.raises(SpecInvalid, match=r"cuts.*choose strategy=.model_parallel. \(or pipeline, rpc_model\)"):
        dure.train(CharGPT(), strategy="ddp", nproc=2, model_parallel={"cuts": "blocks.1"}, runs_dir=tmp_path)
