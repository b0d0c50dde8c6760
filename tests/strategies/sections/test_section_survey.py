"""Facts from a watched forward pass: order of blocks, what passes them by, what they keep for backward."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from dure.strategies.sections.costs import parameter_bytes
from dure.strategies.sections.plan import SURVEYED_SAMPLES, held_bytes
from dure.strategies.sections.trace import survey, switched, tensors_of
from dure.torchcompat.modules import module_call, replace_module_call
from tests.specs import spec_of

X = torch.arange(12.0).view(3, 4)


class Flow(nn.Module):
    """Four linear blocks, called by a function."""

    def __init__(self, flow):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.ones(4))
        self.flow = flow

    def forward(self, x, *others):
        return self.flow(self, x, *others)


def places(flow, *args):
    return survey(Flow(flow), (X, *args), {}).chain.places()


def why(flow, position, *args):
    return survey(Flow(flow), (X, *args), {}).chain.why_not(position)


def test_blocks_are_listed_as_they_are_called_and_not_as_they_are_registered():
    seen = survey(Flow(lambda m, x: m.a(m.d(m.c(m.b(x))))), (X,), {})
    assert seen.chain.calls == ("b", "c", "d", "a")
    assert seen.chain.places() == [1, 2, 3]


def test_what_the_model_does_between_two_blocks_hinders_no_cut():
    assert places(lambda m, x: m.d(functional.relu(m.c(m.b(torch.tanh(m.a(x)) + 1)).flatten(1)) * 2)) == [1, 2, 3]


def test_a_value_that_passes_a_block_by_forbids_the_cuts_that_it_would_cross():
    def skips(m, x):
        early = m.a(x)
        return m.d(m.c(m.b(early)) + early)

    assert places(skips) == [1]
    assert why(skips, 2) == "what a gives is needed again after c, where add uses it"
    assert why(skips, 3) == "what a gives is needed again after c, where add uses it"


def test_the_batch_may_be_used_anywhere_where_every_section_has_it():
    def masks(m, x, mask):
        return m.d(m.c(m.b(m.a(x)) * mask.float()))

    assert places(masks, X > 3) == [1, 2, 3]
    apart = survey(Flow(masks), (X, X > 3), {}).with_batch_on_first_device()
    assert apart.places() == [3]
    assert apart.why_not(1) == "the model's own code uses the batch together with what b gives (mul)"


def test_a_block_that_takes_what_an_earlier_one_gave_is_like_any_use():
    assert places(lambda m, x: [early := m.a(x), m.b(early), m.d(m.c(early))][-1]) == [1, 3]


def test_a_value_that_the_model_returns_beside_the_last_is_needed_at_its_end():
    assert places(lambda m, x: [early := m.b(m.a(x)), (early, m.d(m.c(early)))][-1]) == [1, 2]


def test_a_branch_on_a_value_forbids_all_later_cuts():
    def branches(m, x):
        y = m.b(m.a(x))
        return m.d(m.c(y if bool(y.sum() > 0) else -y))

    assert places(branches) == [1, 2]
    assert "reads a value of what b gives (__bool__)" in why(branches, 3)


def test_shapes_may_be_read_anywhere():
    def reads_a_shape(m, x):
        y = m.a(x)
        return m.d(m.c(m.b(y)).view(y.shape))

    assert places(reads_a_shape) == [1, 2, 3]


def test_writing_into_a_tensor_counts_as_making_it():
    def writes(m, x):
        y = torch.zeros(3, 4)
        y[:, :2] = m.a(x)[:, :2]
        m.b(x)
        return m.d(m.c(y))

    assert places(writes) == [1, 3]


def test_a_block_that_is_called_twice_stays_with_all_that_is_between():
    seen = survey(Flow(lambda m, x: m.d(m.b(m.c(m.b(m.a(x)))))), (X,), {})
    assert seen.chain.calls == ("a", "b", "c", "b", "d")
    assert seen.chain.places() == [1, 4]
    assert seen.chain.why_not(2) == "b is called more than once"


def test_parameters_and_buffers_outside_of_blocks_are_at_home_where_they_are_used():
    seen = survey(Flow(lambda m, x: m.d(m.c(m.b(m.a(x)) * m.gain) + m.offset)), (X,), {})
    assert dict(seen.homes) == {"gain": 2, "offset": 3}
    unused = survey(Flow(lambda m, x: m.b(m.a(x))), (X,), {})
    assert {"gain", "c.weight", "d.bias"} <= unused.homes.keys()
    assert seen.unused == ()
    assert {"gain", "c.weight", "d.bias"} <= set(unused.unused) == unused.homes.keys()


def test_a_parameter_that_is_used_in_two_places_keeps_them_together():
    def uses_twice(m, x):
        return m.d(m.c(m.b(m.a(x) * m.gain) * m.gain))

    assert places(uses_twice) == [1, 3]
    assert why(uses_twice, 2) == "gain is used in several places"

    def uses_a_blocks_own(m, x):
        return functional.linear(m.c(m.b(m.a(x))), m.b.weight)

    assert places(uses_a_blocks_own) == [1]


def test_statistics_of_the_model_are_put_back_and_its_own_forward_functions_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    own = model[0].forward = lambda x: x * 2
    call = partial(nn.Linear.forward, model[2])
    replace_module_call(model[2], call)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    survey(model, (X,), {})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].forward is own
    assert "_compiled_call_impl" not in model[0].__dict__
    assert module_call(model[2]) is call


def test_switches_are_taken_out_when_the_model_fails():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        survey(model, (X,), {})
    with pytest.raises(KeyError, match="x"), switched({"0": model[0]}, lambda name, forward: forward):
        raise KeyError("x")
    assert all("_compiled_call_impl" not in module.__dict__ for module in model)


def test_a_block_keeps_for_backward_what_autograd_saves_of_it_without_its_parameters():
    seen = survey(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2), nn.ReLU()), (X,), {})
    # a linear layer saves its input, tanh and relu their output; the input of the second is the output of tanh
    assert seen.saved_bytes == (3 * 4 * 4, 3 * 8 * 4, 3 * 8 * 4, 3 * 2 * 4)


def test_a_survey_lets_go_of_the_model_and_of_what_its_blocks_gave():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    seen = survey(model, (X,), {})
    held = [weakref.ref(tensor) for tensor in (model[0].weight, model[2].weight, *seen.outputs)]
    del model, seen
    gc.collect()
    assert [tensor() for tensor in held] == [None] * 5


def test_counted_cost_is_three_times_the_products_and_what_is_moved():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh())
    linear, tanh = survey(model, (X,), {}).operations
    assert linear == 3 * (2 * 3 * 4 * 8) + 16 * (3 * 4 + 3 * 8)
    assert tanh == 16 * (3 * 8 + 3 * 8)


def test_counted_cost_is_the_same_in_every_pass_and_whatever_the_precision():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    first = survey(model, (X,), {}).operations
    assert survey(model, (X,), {}).operations == first
    assert survey(model.double(), (X.double(),), {}).operations == first


class Layers(nn.Module):
    """Layers that take a sequence, called one by one."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x, *_ = layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else layer(x)
        return x


def test_recurrent_layers_and_attention_cost_their_products():
    layers = Layers(
        nn.LSTM(4, 4, batch_first=True, bias=False), nn.MultiheadAttention(4, 1, batch_first=True, bias=False)
    )
    lstm, attention = survey(layers, (torch.randn(2, 3, 4),), {}).operations
    assert lstm >= 3 * 2 * 6 * (4 * 4 * 4 + 4 * 4 * 4)
    assert attention >= 3 * 2 * (6 * 4 * 4 * 4 + 2 * 2 * 3 * 3 * 4)


def test_held_bytes_are_parameters_gradients_and_activations_of_a_microbatch():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2).requires_grad_(False), nn.BatchNorm1d(2))
    assert [parameter_bytes(block) for block in model] == [2 * 4 * 40, 4 * 18, 2 * 4 * 4 + 4 * 4 + 8]
    seen = survey(model, (X,), {})
    spec = spec_of(microbatch_size=10 * SURVEYED_SAMPLES)
    assert held_bytes(model, spec, seen)[0] == 2 * 4 * 40 + 10 * (3 * 4 * 4)


def test_tensors_are_found_in_nested_values():
    assert len(tensors_of({"a": (X, [X, 3]), "b": None})) == 2
