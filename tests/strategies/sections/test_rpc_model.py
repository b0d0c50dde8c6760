"""rpc_model: what each rank keeps and sends, what a model and its loss may do, and who is refused."""

import functools
import os

import pytest
import torch
from torch import nn
from torch.nn import functional

import dure
from dure.errors import SpecInvalid, WorkerFailed
from dure.strategies.contract.batch_parts import DataShare
from dure.strategies.contract.local_sums import LocalSums
from dure.strategies.sections.rpc_calls import leads_to
from dure.strategies.sections.rpc_model import RpcModel
from tests.conformance.cases import TO_ROUNDING, largest_difference, train_case, weights_of
from tests.conformance.tasks import Normalised, Regression
from tests.specs import grouped
from tests.strategies.pipeline.test_pipeline_part import storage_bytes
from tests.strategies.sections.four_layers import LAYER_BYTES, on_four_layers

CPU = torch.device("cpu")
STEPS = {"global_batch_size": 7, "samples": 42, "clip_norm": 0.4, "seed": 5}


on_sections = functools.partial(on_four_layers, "rpc_model")


@pytest.mark.parametrize(("cuts", "layers"), [("1", [[0], [1, 2, 3]]), ("1,2", [[0], [1], [2, 3]])])
def test_each_rank_holds_the_bytes_of_its_layers_and_of_their_optimiser_state(cuts, layers):
    def look(strategy, step):
        step(2, 1)
        state = [value for kept in strategy.optimizer.state.values() for value in kept.values() if value.dim()]
        return storage_bytes(strategy.part.tensors()), storage_bytes(state)

    for (weights, state), mine in zip(on_sections(len(layers), look, cuts=cuts), layers, strict=True):
        assert weights == sum(LAYER_BYTES[layer] for layer in mine)
        assert state == 2 * weights  # AdamW keeps two numbers for each


def test_each_rank_sends_what_the_table_says():
    def look(strategy, step):
        step(2, 1)
        return strategy.sent_bytes(2)

    samples, batch, first_cut, second_cut, output = 3, 4 * 2, 4 * 8, 4 * 16, 4
    assert on_sections(3, look, cuts="1,2") == [
        samples * (2 * batch + first_cut + output),
        samples * (second_cut + first_cut),
        samples * (output + second_cut),
    ]


class Branched(Regression):
    """Code of its own between its blocks that uses the batch, outputs by name, one a weight, and a part unused."""

    def build_model(self):
        return Branches()

    def loss(self, model, batch):
        x, y, mask = batch
        # called twice, and with a keyword
        scaled, plain = model(x, scale=mask.to(x.dtype)[:, :, None]), model(0.5 * x, scale=None)
        out = scaled["y"] + plain["y"] * plain["weight"]
        error = functional.mse_loss(out, y, reduction="none").mean(2)
        return dure.Sum((error * mask).sum(), mask.sum())

    def metrics(self, model, batch):
        return {}


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)])
        self.spare = nn.Linear(6, 6, dtype=torch.float64)
        self.shift = nn.Parameter(torch.zeros(6, dtype=torch.float64))
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x, scale):
        for block in self.blocks:
            x = torch.tanh(block(x))
            if scale is not None:
                x = x * (1 + scale)
        return {"y": x + self.shift, "weight": self.weight}


class Weighted(Regression):
    """The loss is weighted by parameters of the model that its forward does not use."""

    def build_model(self):
        model = super().build_model()
        model.register_parameter("log_variance", nn.Parameter(torch.zeros((), dtype=torch.float64)))
        return model

    def loss(self, model, batch):
        return super().loss(model, batch) * torch.exp(-model.log_variance) + model.log_variance


def test_weights_that_the_loss_alone_uses_equal_one_process(tmp_path):
    one = weights_of(train_case(tmp_path, Weighted(), **STEPS))
    assert one["log_variance"] != 0
    assert largest_difference(weights_of(train_case(tmp_path, Weighted(), "rpc_model", 2, **STEPS)), one) < TO_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 3])
def test_weights_of_a_model_with_code_between_its_blocks_equal_one_process(nproc, trained, tmp_path):
    one = weights_of(trained(Branched(), **STEPS))
    run = train_case(tmp_path, Branched(), "rpc_model", nproc, microbatch_size=3, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


@pytest.mark.slow
def test_weights_with_batchnorm_equal_one_process(tmp_path):
    """Every section sees the whole microbatch, so statistics are those of one process."""
    one = weights_of(train_case(tmp_path, Normalised(), **STEPS))
    many = weights_of(train_case(tmp_path, Normalised(), "rpc_model", 2, **STEPS))
    assert any(name.endswith("running_var") for name in many)
    assert largest_difference(many, one) < TO_ROUNDING


@pytest.mark.slow
def test_a_section_without_parameters_keeps_the_scale_of_the_others(tmp_path):
    class Bare(Regression):
        def build_model(self):
            return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    task, settings = Bare(dtype="float32"), {**STEPS, "precision": "fp16"}
    one = weights_of(train_case(tmp_path, task, **settings))
    run = train_case(tmp_path, task, "rpc_model", 3, cuts="1,2", **settings)
    assert largest_difference(weights_of(run), one) < 1e-6  # the same halves, clipped by a norm added in another order


class Breaking(Regression):
    """A block that raises in the third step of rank 1."""

    how: str = "at once"

    def build_model(self):
        return nn.Sequential(super().build_model(), Breaks(self.how))


class Breaks(nn.Module):
    calls = 0

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        self.calls += self.training
        if self.calls == 3 and os.environ.get("RANK") == "1":
            if self.how == "in a hook":
                x.register_hook(_fail)
                return 2 * x
            raise {"at once": ValueError("a planned failure"), "by leaving": SystemExit(4)}[self.how]
        return x


def _fail(gradient):
    raise ValueError("a planned failure")


@pytest.mark.parametrize(
    ("how", "said"), [("at once", "ValueError: a planned failure"), ("by leaving", "SystemExit: 4")]
)
def test_an_exception_in_a_section_elsewhere_is_what_the_run_ends_with(how, said, tmp_path):
    task = Breaking(layered=True, how=how)
    with pytest.raises(WorkerFailed, match=f"^rank 1 failed in its section: {said}") as caught:
        train_case(tmp_path, task, "rpc_model", 2, cuts="1", **STEPS)
    assert 'in forward: raise {"at once": ValueError("a planned failure")' in str(caught.value)
    (log,) = tmp_path.glob("*/logs/*rank1.log")
    assert "Traceback (most recent call last)" in log.read_text()


def test_an_exception_in_the_backward_pass_elsewhere_is_told_with_its_rank(tmp_path):
    with pytest.raises(WorkerFailed, match=r"^rank 1 failed in the backward pass of its section: a hook, or the"):
        train_case(tmp_path, Breaking(layered=True, how="in a hook"), "rpc_model", 2, cuts="1", **STEPS)


class Together(Regression):
    def build_optimizer(self, model):
        return torch.optim.LBFGS(model.parameters())


@pytest.mark.parametrize(
    ("task", "settings", "match"),
    [
        (Regression(), {"nproc": 4}, "can be cut into at most"),
        (Together(layered=True), {"nproc": 2}, "the optimiser LBFGS cannot step each section by itself, because its"),
        (Regression(layered=True), {"nproc": 2, "cuts": "9"}, "cuts names 9"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(task, settings, match, tmp_path):
    with pytest.raises(SpecInvalid, match=match):
        dure.train(task, runs_dir=tmp_path, strategy="rpc_model", **grouped("rpc_model", settings))
    assert list(tmp_path.iterdir()) == []


class Told(RpcModel):
    """A rank that computes no loss, and hears from rank 0 that it expected 64 items."""

    drives = False

    def __init__(self, device):
        self.device, self.expectation = device, None
        self.share = DataShare(index=0, count=1, leads=False)
        self.sums, self.group = LocalSums(device), self

    def all_reduce_sum(self, tensor):
        tensor[-1] += 64.0


def test_expected_count_when_told_on_a_device_then_reaches_the_host():
    # a device of another name than the host's: moving a tensor there makes a copy, as on a GPU
    strategy = Told(torch.device("cpu", 0))
    strategy.sync_gradients()
    assert strategy.expectation == 64.0


def test_backward_is_said_to_come_to_an_input_only_if_it_does():
    received = torch.ones(2, requires_grad=True) * 2
    assert leads_to([(received * 3).sum()], [received])
    assert not leads_to([(received.detach() * torch.ones(2, requires_grad=True)).sum()], [received])
    assert leads_to([torch.ones(())], [torch.ones(2)])


class Added(nn.Linear):
    """A layer that adds a number to its input."""

    number = 0.0

    def forward(self, x):
        return super().forward(x + self.number)


class Carrying(nn.Module):
    """Layers whose model carries the mean of its last output over: in a number of its own or a block's, or a buffer."""

    def __init__(self, where):
        super().__init__()
        self.first, self.second = (Added(6, 6, dtype=torch.float64) for _ in range(2))
        self.where, self.own = where, 0.0
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        output = self.second(torch.tanh(self.first(x + self.own + self.mean)))
        mean = output.detach().mean()
        if self.where == "own":
            self.own = float(mean)
        elif self.where == "first.number":
            self.first.number = float(mean)
        elif self.where == "mean":
            self.mean = 0.5 * self.mean + 0.5 * mean
        elif self.where == "last":
            self.last = mean
        return output


class Carried(Regression):
    where: str = "own"

    def build_model(self):
        return Carrying(self.where)


@pytest.mark.parametrize("strategy", ["rpc_model", "pipeline"])
@pytest.mark.parametrize("where", ["own", "first.number", "mean"])
def test_state_between_blocks_that_one_rank_sets_and_another_uses_is_refused(where, strategy, tmp_path):
    with pytest.raises(WorkerFailed, match=f"separates the code that sets .*{where} from") as caught:
        train_case(tmp_path, Carried(where=where), strategy, 2, **STEPS)
    assert caught.value.exit_code == 2


def test_state_between_blocks_that_nothing_uses_changes_nothing(tmp_path):
    runs = [train_case(tmp_path, Carried(where="last"), *place, **STEPS) for place in ((), ("rpc_model", 2))]
    assert largest_difference(*map(weights_of, runs)) < TO_ROUNDING


class Looking(Regression):
    """Metrics add up the norms of the gradients that a backward pass of their own leaves."""

    def metrics(self, model, batch):
        with torch.enable_grad():
            model(batch[0]).square().sum().backward()
        norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
        return {"norm": dure.Sum(float(sum(norms)), 1)}


def test_metrics_that_use_gradients_of_which_a_rank_has_a_part_are_refused(tmp_path):
    with pytest.raises(
        WorkerFailed, match="metrics would need gradients, of which a rank has those of its own"
    ) as caught:
        train_case(tmp_path, Looking(layered=True), "rpc_model", 2, **STEPS)
    assert caught.value.exit_code == 2


class Centred(Regression):
    """Subtracts from each gradient its mean, once it is in `.grad`."""

    def build_optimizer(self, model):
        def centre(parameter):
            parameter.grad.sub_(parameter.grad.mean())

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(centre)
        return super().build_optimizer(model)


def test_hook_when_it_waits_for_a_gradient_in_place_then_the_run_is_refused(tmp_path):
    with pytest.raises(WorkerFailed, match="which torch's distributed backward does not call") as caught:
        train_case(tmp_path, Centred(kind="mean", optimizer="sgd", layered=True), "rpc_model", 2, **STEPS)
    assert caught.value.exit_code == 2


class LatePenalty(Regression):
    """Adds a gradient penalty from the third batch on, which no trial of the loss before training sees."""

    def loss(self, model, batch):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls < 3 or not torch.is_grad_enabled():
            return super().loss(model, batch)
        x = batch[0].clone().requires_grad_()
        output = model(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return functional.mse_loss(output, batch[1]) + gradient.square().mean()


@pytest.mark.parametrize("strategy", ["rpc_model", "pipeline"])
def test_derivatives_through_the_model_that_begin_late_are_refused(strategy, tmp_path):
    with pytest.raises(WorkerFailed, match=r"the output of Sequential alone, without derivatives") as caught:
        train_case(tmp_path, LatePenalty(kind="mean", layered=True), strategy, 2, **STEPS)
    assert caught.value.exit_code == 2
