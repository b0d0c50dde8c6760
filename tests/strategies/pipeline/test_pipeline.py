"""The pipeline strategy: what each rank keeps and sends, any loss and any output, and who is refused."""

import functools
import re
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import dure
from dure.errors import SpecInvalid, WorkerFailed
from dure.measure.step_clock import StepClock
from dure.strategies.pipeline.pipeline import fault_of_backend
from dure.strategies.pipeline.schedule import Schedule, num_scheduled
from examples.char_gpt import CharGPT
from examples.digits import Digits
from tests.conformance.cases import TO_ROUNDING, largest_difference, losses_of, records_of, train_case, weights_of
from tests.conformance.tasks import Regression
from tests.specs import grouped
from tests.strategies.pipeline.test_pipeline_part import storage_bytes
from tests.strategies.sections.four_layers import LAYER_BYTES, on_four_layers

CPU = torch.device("cpu")
STEPS = {"global_batch_size": 7, "samples": 42, "seed": 5}
AS_FLOAT32 = 1e-6
"""The same float32 operations, but for the order in which a handful of values are added."""


on_pipeline = functools.partial(on_four_layers, "pipeline")


@pytest.mark.parametrize(
    ("num_ranks", "options", "layers"),
    [
        (2, {"cuts": "1"}, [[0], [1, 2, 3]]),
        (3, {"cuts": "1,2"}, [[0], [1], [2, 3]]),
        (2, {"cuts": "1,2,3", "schedule": "interleaved"}, [[0, 2], [1, 3]]),
        (4, {"cuts": "2", "mesh": "data=2,pipeline=2"}, [[0, 1], [2, 3], [0, 1], [2, 3]]),
    ],
)
def test_each_rank_holds_the_bytes_of_its_layers_and_of_their_optimiser_state(num_ranks, options, layers):
    def look(strategy, step):
        step(2, 1)
        state = [value for kept in strategy.optimizer.state.values() for value in kept.values() if value.dim()]
        gone = storage_bytes([*strategy.model.parameters()]) - storage_bytes(strategy.part.tensors())
        return storage_bytes(strategy.part.tensors()), storage_bytes(state), gone

    for (weights, state, others), mine in zip(on_pipeline(num_ranks, look, **options), layers, strict=True):
        assert weights == sum(LAYER_BYTES[layer] for layer in mine)
        assert state == 2 * weights  # AdamW keeps two numbers for each
        assert others == 4 * 2 * (4 - len(mine))  # one number in the place of each parameter of other layers


def test_each_rank_sends_its_activations_forward_and_their_gradients_back():
    def look(strategy, step):
        step(2, 1, 2)
        first = strategy.sent_bytes(3)
        step(1)
        return first, strategy.sent_bytes(1)

    # buffers are as long as the largest microbatch needs; 1F1B on three stages runs at least three microbatches
    first, middle, last = on_pipeline(3, look, cuts="1,2")
    over_cuts = [4 * 8, 4 * 16]
    assert first == (3 * 2 * over_cuts[0], 3 * over_cuts[0])
    assert middle == (3 * 2 * sum(over_cuts), 3 * sum(over_cuts))
    assert last == (3 * 2 * over_cuts[1], 3 * over_cuts[1])


def test_pipelines_side_by_side_also_add_up_their_gradients():
    def look(strategy, step):
        step(2)
        return strategy.sent_bytes(1)

    sent = on_pipeline(4, look, cuts="2", mesh="data=2,pipeline=2")
    over_the_cut = 2 * 2 * 4 * 16
    assert sent == [over_the_cut + sum(LAYER_BYTES[:2]), over_the_cut + sum(LAYER_BYTES[2:])] * 2


def test_without_a_size_there_are_four_microbatches_for_every_stage():
    def look(strategy, step):
        return strategy.parts.default_size(), strategy.parts.process_size(5)

    assert on_pipeline(2, look, global_batch_size=64) == [(8, 5)] * 2
    assert on_pipeline(2, look, global_batch_size=65) == [(9, 5)] * 2
    assert on_pipeline(4, look, global_batch_size=64, mesh="data=2,pipeline=2") == [(4, 5)] * 4
    assert on_pipeline(1, look, global_batch_size=2) == [(1, 5)]


@pytest.mark.parametrize(
    ("schedule", "microbatches", "ranks", "stages", "number"),
    [
        ("gpipe", 1, 4, 4, 1), ("1f1b", 1, 4, 4, 4), ("1f1b", 9, 4, 4, 9), ("interleaved", 1, 2, 4, 1),
        ("interleaved", 5, 2, 4, 6), ("interleaved", 10, 4, 8, 10), ("interleaved", 11, 4, 8, 12),
    ],
)  # fmt: skip
def test_schedules_get_as_many_microbatches_as_they_need(schedule, microbatches, ranks, stages, number):
    assert num_scheduled(schedule, microbatches, ranks, stages) == number


def test_bubble_is_the_share_of_the_schedule_in_which_nothing_was_computed():
    stages = [SimpleNamespace(marks=[1.0, 2.0, 3.0, 5.0]), SimpleNamespace(marks=[6.0, 7.0])]
    schedule = Schedule(engine=None, stages=stages, num_microbatches=1, clock=StepClock(CPU), span=(0.0, 10.0))
    assert schedule.bubble()() == {"bubble_fraction": pytest.approx(0.6)}


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.02)
        return gradient


class Sleeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x):
        return _Sleep.apply(self.linear(x))


class Sleepy(Regression):
    def build_model(self):
        return nn.Sequential(Sleeper(), Sleeper())


@pytest.mark.alone
@pytest.mark.slow
def test_measured_bubble_is_near_the_formula_when_computing_takes_long(tmp_path):
    for microbatch_size, formula in ((8, 1 / 2), (1, 1 / 9)):
        run = train_case(
            tmp_path, Sleepy(), "pipeline", 2, schedule="1f1b", cuts="1", global_batch_size=8, samples=40,
            microbatch_size=microbatch_size,
        )  # fmt: skip
        for rank in range(2):
            measured = [record["measured"]["bubble_fraction"] for record in records_of(run, rank)[1:]]
            # sending, and two cores for all, make it larger; one step in which this rank alone was held up is smaller
            assert formula - 0.02 < statistics.median(measured) < formula + 0.2


class Mixing(Regression):
    """Mixes its samples before it calls the model, with a draw of each generator."""

    def loss(self, model, batch):
        x, y, mask = batch
        share, order = float(np.random.uniform(0.3, 0.7)), torch.randperm(len(x))
        x, y = share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]
        return super().loss(model, (x, y, mask))


@pytest.mark.slow
def test_what_the_loss_draws_is_the_same_for_the_first_and_the_last_stage(tmp_path):
    """One process draws the first microbatch's numbers from the same state; later states differ."""
    steps = {"global_batch_size": 44, "samples": 44, "microbatch_size": 44, "seed": 3}
    one = weights_of(train_case(tmp_path, Mixing(layered=True), **steps))
    assert largest_difference(one, weights_of(train_case(tmp_path, Regression(layered=True), **steps))) > 1e-4
    run = train_case(tmp_path, Mixing(layered=True), "pipeline", 2, **steps)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


def test_dropout_draws_anew_for_each_microbatch_and_stage(tmp_path):
    run = train_case(tmp_path, Dropping(), "pipeline", 2, cuts="1", global_batch_size=2, samples=8, microbatch_size=1)
    assert len(set(losses_of(run))) == 4


class Dropping(Regression):
    """All samples are the same and nothing is learned: only dropout makes losses differ."""

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 6).double(), nn.Dropout(0.5), nn.Linear(6, 6).double())

    def train_data(self):
        return dure.data.TensorData(
            *(column[:1].expand(8, *column.shape[1:]).clone() for column in super().train_data().tensors)
        )

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.0)


class Output:
    """Output as a library's model may return it."""

    def __init__(self, logits):
        self.logits = logits


class Wrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(6, 8, dtype=torch.float64)
        self.place = nn.Parameter(0.1 * torch.ones(5, 8, dtype=torch.float64))
        self.register_buffer("weights", torch.linspace(0.5, 1.5, 8, dtype=torch.float64))
        self.blocks = nn.ModuleList(Gated() for _ in range(3))
        self.head = nn.Linear(8, 6, dtype=torch.float64)
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x, *, mask):
        hidden = (self.embedding(x) + self.place, mask.sum(1))
        for block in self.blocks:
            hidden = block(hidden, mask[..., None], gain=self.weights)
        return Output(self.head(hidden[0]) * self.temperature)


class Gated(nn.Module):
    """Takes and gives a tuple, with a tensor of whole numbers in it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, hidden, mask, *, gain):
        x, lengths = hidden
        return x + torch.tanh(self.linear(x)) * mask * gain / lengths[:, None, None], lengths


class Wrapped(Regression):
    def build_model(self):
        return Wrapping()

    def loss(self, model, batch):
        x, y, mask = batch
        error = functional.mse_loss(model(x, mask=mask).logits, y, reduction="none").mean(2)
        return dure.Sum((error * mask).sum(), mask.sum())

    def metrics(self, model, batch):
        x, y, mask = batch
        return {"error": dure.Sum((model(x, mask=mask).logits - y).abs().sum(), y.numel())}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "nproc", "settings"), [
    ("pipeline", 3, {"microbatch_size": 2}), ("pipeline", 2, {"schedule": "interleaved"}),
    ("pipeline", 2, {"cuts": "head"}), ("model_parallel", 3, {}),
], ids=str)  # fmt: skip
def test_a_model_with_stem_and_head_keywords_and_an_output_of_its_own_equals_one_process(
    strategy, nproc, settings, tmp_path
):
    one, many = [
        dure.train(
            Wrapped(), strategy=name, nproc=n, runs_dir=tmp_path, start="fork", quiet=True, device="cpu",
            clip_norm=0.3, eval_batch_size=5, **grouped(name, more), **STEPS,
        )
        for name, n, more in (("single", 1, {}), (strategy, nproc, settings))
    ]  # fmt: skip
    weights = [weights_of(Path(summary.run)) for summary in (one, many)]
    assert largest_difference(*weights) < TO_ROUNDING
    assert many.metrics["error"].value == pytest.approx(one.metrics["error"].value, rel=1e-12)


class Centring(nn.Module):
    """Takes its input out of the batch, and writes into it before its blocks and in them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4).double() for _ in range(4)])

    def forward(self, batch):
        return self.layers(batch.pop("x").sub_(0.5)).tanh_()


class ChangesBatch(Regression):
    """Takes values out of the batch and scales them in place, before and after it calls the model."""

    def build_model(self):
        return Centring()

    def train_data(self):
        x = torch.randn(25, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return [{"x": row, "y": row.sin(), "scale": [2.0]} for row in x]

    def eval_data(self):
        return self.train_data()[:10]

    def loss(self, model, batch):
        x, y = batch["x"], batch.pop("y").mul_(0.5)
        (scale,) = batch.pop("scale")
        return functional.mse_loss(model(batch) * scale[:, None], y) + 0.1 * x.square().mean()

    def metrics(self, model, batch):
        return {}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"schedule": "interleaved"}], ids=str)
def test_a_loss_and_a_model_that_change_their_batch_equal_one_process(settings, tmp_path):
    one, many = [
        dure.train(
            ChangesBatch(), strategy=name, nproc=n, runs_dir=tmp_path, start="fork", quiet=True, device="cpu",
            **grouped(name, more), **STEPS,
        )
        for name, n, more in (("single", 1, {}), ("pipeline", 2, settings))
    ]  # fmt: skip
    assert largest_difference(*[weights_of(Path(summary.run)) for summary in (one, many)]) < TO_ROUNDING
    assert many.metrics["loss"].value == pytest.approx(one.metrics["loss"].value, rel=1e-12)


class Partial(Regression):
    """Trains its last layer alone: most stages have nothing to step."""

    def build_optimizer(self, model):
        return torch.optim.AdamW(model[-1].parameters(), lr=0.01)


@pytest.mark.slow
def test_a_stage_without_anything_to_train_steps_along(trained, tmp_path):
    task = Partial(layered=True, dtype="float32", kind="tokens")
    settings = {"precision": "fp16", "clip_norm": 0.1, "microbatch_size": 2, **STEPS}
    one = weights_of(trained(task, **settings))
    many = weights_of(train_case(tmp_path, task, "pipeline", 3, **settings))
    assert largest_difference(one, many) < AS_FLOAT32


class Frozen(Regression):
    def build_model(self):
        model = super().build_model()
        model[0].requires_grad_(False)
        return model


@pytest.mark.slow
def test_a_frozen_first_stage_gets_gradients_that_it_does_not_need(tmp_path):
    task = Frozen(layered=True)
    one = weights_of(train_case(tmp_path, task, **STEPS))
    assert (
        largest_difference(weights_of(train_case(tmp_path, task, "pipeline", 2, cuts="1", **STEPS)), one) < TO_ROUNDING
    )


class Steep(Regression):
    """Task whose loss is so large that fp16's first scales overflow, in some stages and not in others."""

    def loss(self, model, batch):
        return super().loss(model, batch) * 3000.0


@pytest.mark.slow
def test_all_stages_skip_the_steps_in_which_one_overflows(tmp_path):
    task = Steep(layered=True, dtype="float32")
    settings = {"precision": "fp16", "microbatch_size": 2, "clip_norm": 0.5, "global_batch_size": 7, "samples": 130}
    one = weights_of(train_case(tmp_path, task, **settings))
    many = weights_of(train_case(tmp_path, task, "pipeline", 3, **settings))
    assert all(value.isfinite().all() for value in many.values())
    assert largest_difference(one, many) < AS_FLOAT32


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.rare, self.never = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))

    def forward(self, x):
        y = self.always(x)
        chosen = x[:, 0, 0] > 0.8
        return y + self.rare(x) * chosen[:, None, None] if bool(chosen.any()) else y


class Branching(Regression):
    def build_model(self):
        return nn.Sequential(Sometimes(), nn.Tanh(), Sometimes())


@pytest.mark.slow
def test_parameters_that_no_replica_used_are_left_alone_as_on_one_device(tmp_path):
    """Weight decay would shrink them if they had a gradient of zeros."""
    steps = {**STEPS, "microbatch_size": 1}
    one = weights_of(train_case(tmp_path, Branching(optimizer="adamw"), **steps))
    run = train_case(tmp_path, Branching(optimizer="adamw"), "pipeline", 4, mesh="data=2,pipeline=2", **steps)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


# who is refused


@pytest.mark.parametrize(
    ("device", "backend", "num_ranks", "goes"),
    [("cpu", "gloo", 2, True), ("cuda", "nccl", 2, True), ("cuda", "gloo", 1, True), ("cuda", "gloo", 2, False)],
)
def test_stages_that_share_a_gpu_over_gloo_are_refused_with_what_to_do(device, backend, num_ranks, goes):
    fault = fault_of_backend(device, backend, num_ranks)
    assert (fault is None) is goes
    assert goes or re.search(
        "which gloo cannot: give every rank a device of its own .* or use --device cpu, or model", fault
    )


class Twice(Regression):
    def loss(self, model, batch):
        return super().loss(model, batch) + super().loss(model, batch)


class Aside(Regression):
    def loss(self, model, batch):
        x, y, _ = batch
        for layer in model:
            x = layer(x)
        return functional.mse_loss(x, y)


class Breaking(Regression):
    def build_model(self):
        return nn.Sequential(nn.Linear(6, 6).double(), Broken(), nn.Linear(6, 6).double())


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        if self.calls > 40:
            raise KeyError("a block that fails")
        return x


class Reading(Regression):
    """Penalises all weights by hand, of which no stage has all."""

    def loss(self, model, batch):
        return super().loss(model, batch) + 1e-3 * sum(p.square().sum() for p in model.parameters())


class ReadingOfLast(Regression):
    """Penalises the last layer's weights by hand, which the last stage has, in evaluations too."""

    def loss(self, model, batch):
        return super().loss(model, batch) + 1e-3 * model[-1].weight.square().sum()


class NotEvaluated(ReadingOfLast):
    """Is never evaluated, so that no other rank needs these weights."""

    def eval_data(self):
        return None


@pytest.mark.slow
def test_weights_of_the_last_stage_when_only_training_reads_them_then_equal_one_process(tmp_path):
    task = NotEvaluated(layered=True)
    one, run = (
        train_case(tmp_path, task, name, num_ranks, **STEPS) for name, num_ranks in [("single", 1), ("pipeline", 2)]
    )
    assert largest_difference(weights_of(one), weights_of(run)) < TO_ROUNDING


@pytest.mark.parametrize(
    ("task", "said", "exit_code"),
    [
        (Twice(layered=True), "the task's loss calls Sequential more than once: a pipeline runs it once for each", 2),
        (Aside(layered=True), "the task's loss computed Sequential without calling it: .*or use ddp or fsdp", 2),
        (Breaking(), "KeyError: 'a block that fails'", 1),
        (Reading(layered=True), "cut before 4 separates the task's loss from 0.weight, 0.bias, 2.weight, .*itself", 2),
        (
            ReadingOfLast(layered=True),
            "^in an evaluation the task's loss would need the weights of 7.weight on a rank that has those of other",
            2,
        ),
    ],
    ids=["twice", "aside", "broken", "reading", "reading of last"],
)
def test_a_loss_or_block_that_does_not_go_is_told_in_its_own_words(task, said, exit_code, tmp_path):
    with pytest.raises(WorkerFailed, match=said) as caught:
        train_case(tmp_path, task, "pipeline", 2, **STEPS)
    assert caught.value.exit_code == exit_code


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))

    def forward(self, x):
        early = self.a(x)
        return self.c(self.b(torch.tanh(early)) + early)


class Shortcut(Regression):
    def build_model(self):
        return Skipping()


@pytest.mark.slow
def test_a_cut_over_which_another_value_goes_is_refused_with_its_name(tmp_path):
    said = "strategy is pipeline: no section can begin with c: what a gives is needed again after b, where add uses it"
    with pytest.raises(WorkerFailed, match=said) as caught:
        train_case(tmp_path, Shortcut(), "pipeline", 2, cuts="c", **STEPS)
    assert caught.value.exit_code == 2
    one = weights_of(train_case(tmp_path, Shortcut(), **STEPS))
    assert largest_difference(weights_of(train_case(tmp_path, Shortcut(), "pipeline", 2, **STEPS)), one) < TO_ROUNDING


@pytest.mark.parametrize(
    ("task", "nproc", "settings", "said"),
    [
        (CharGPT(), 2, {}, "GPT is 7 blocks .* cannot be cut (embedding.weight and head.weight are one and the"),
        (Digits(), 8, {}, "Sequential is 7 blocks (0, 1, 2, 3, 4, 5, 6) and can be cut into at most 7 sections, but 8"),
        (
            Digits(),
            4,
            {"schedule": "interleaved"},
            "at most 7 sections, but 8 sections are wanted: use fewer devices, or ddp or",
        ),
        (Digits(), 2, {"cuts": "2,4"}, "cuts names 2 module(s) (2, 4), which makes 3 sections, but 2 are wanted"),
        (Digits(), 2, {"stages_per_rank": 2}, "stages_per_rank is for the schedule interleaved"),
        (Digits(), 4, {"mesh": "data=2,pipeline=3"}, "nproc is 4 but mesh data 2 x pipeline 3 needs 6"),
    ],
    ids=["tied", "few", "interleaved", "cuts", "stages", "mesh"],
)
def test_what_cannot_be_cut_so_is_refused_before_a_folder_or_a_process_is_there(task, nproc, settings, said, tmp_path):
    said = re.escape(said).replace(r"\.\*", ".*")
    settings = grouped("pipeline", settings)
    with pytest.raises(SpecInvalid, match=said):
        dure.train(task, strategy="pipeline", nproc=nproc, device="cpu", runs_dir=tmp_path / "runs", **settings)
    assert not (tmp_path / "runs").exists()
