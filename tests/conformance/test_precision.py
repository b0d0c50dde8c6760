"""bf16 and fp16 under accumulation do what a loop written by hand does; compiled is as uncompiled."""

import functools
import json
import shutil

import pytest
import torch
from torch import nn

import dure
from dure.errors import SpecInvalid
from dure.strategies.contract.precision import allow_tf32
from dure.training.seeds import seed_everything
from dure.training.session.sample_order import SampleOrder
from tests.conformance.cases import (
    MANY_PAIRS,
    TO_ROUNDING,
    crossed,
    evaluated_digests,
    is_layered,
    largest_difference,
    train_case,
    weights_of,
)
from tests.conformance.tasks import WIDTH, Regression

STEPS = {"global_batch_size": 8, "samples": 160, "seed": 6, "clip_norm": 0.3}
MICROBATCH = 4
AS_FLOAT32 = 1e-6
"""The same float32 operations, but for the order in which a handful of values are added."""
AS_HALVES = {"bf16": 0.03, "fp16": 0.004}
"""Two devices round other sums to eight (eleven) bits: near, in weights of about 1."""


class Steep(Regression):
    """Task whose loss is so large that fp16's first scales overflow: steps are skipped until the scale is small."""

    def loss(self, model, batch):
        return super().loss(model, batch) * 300.0


def by_hand(task, precision):
    """Train with autocast, accumulation and a gradient scaler as torch's documentation has it."""
    seed_everything(STEPS["seed"])
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    schedule = task.build_schedule(optimizer, STEPS["samples"])
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    data = task.train_data()
    rate = optimizer.param_groups[0]["lr"]
    for batch in SampleOrder(44, 8, seed=STEPS["seed"]).batches(0, STEPS["samples"]):
        for group in optimizer.param_groups:
            group["lr"] = rate * schedule(batch.samples_seen - len(batch.indices))
        for indices in torch.from_numpy(batch.indices).split(MICROBATCH):
            with torch.autocast("cpu", dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[precision]):
                loss = task.loss(model, data.__getitems__(indices))
            scaler.scale(loss * (len(indices) / len(batch.indices))).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), STEPS["clip_norm"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model.state_dict(), scaler.get_scale() if precision == "fp16" else None


@pytest.mark.parametrize("task_class", [Regression, Steep])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_halves_under_accumulation_equal_a_loop_by_hand(precision, task_class, tmp_path):
    task = task_class(dtype="float32", optimizer="adamw")
    expected, scale = by_hand(task, precision)
    if precision == "fp16":
        assert (scale < 2**16) == (task_class is Steep)
    run = train_case(tmp_path, task, precision=precision, microbatch_size=MICROBATCH, **STEPS)
    assert largest_difference(weights_of(run), expected) < AS_FLOAT32


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num_devices", "precision"), crossed(MANY_PAIRS, [("bf16",), ("fp16",)]))
def test_halves_on_many_devices_stay_near_one_process(strategy, num_devices, precision, trained, tmp_path):
    task = Regression(dtype="float32", layered=is_layered(strategy))
    one = weights_of(trained(task, precision=precision, **STEPS))
    many = train_case(tmp_path, task, strategy, num_devices, precision=precision, microbatch_size=2, **STEPS)
    assert largest_difference(weights_of(many), one) < AS_HALVES[precision]


def test_overflow_of_fp16_is_declared_where_ranks_compute_parts_of_a_batch(tmp_path):
    settings = {"precision": "fp16", "global_batch_size": 6, "checkpoint": {"every_samples": 12}}
    runs = [
        train_case(tmp_path, task(dtype="float32"), *place, samples=24, **settings)
        for task, place in ((Steep, ("ddp", 2)), (Steep, ("single", 1)), (Regression, ("ddp", 2)))
    ]
    declared = [json.loads((run / "summary.json").read_text())["not_preserved"] for run in runs]
    assert [any(text.startswith("loss scale of fp16") for text in texts) for texts in declared] == [True, False, False]
    dure.train(resume=runs[0], samples=30, quiet=True, start="fork")  # without a further overflow
    *kept, rates = json.loads((runs[0] / "summary.json").read_text())["not_preserved"]
    assert kept == declared[0]
    assert rates.startswith("learning rate: in earlier attempts that of a schedule over another length")


@pytest.mark.slow
def test_ranks_skip_the_same_steps_when_fp16_overflows(tmp_path):
    digests = tmp_path / "digests"
    digests.mkdir()
    task = Steep(dtype="float32", digests=str(digests))
    run = train_case(tmp_path, task, "ddp", 3, precision="fp16", microbatch_size=1, **STEPS)
    assert all(value.isfinite().all() for value in weights_of(run).values())
    assert len(evaluated_digests(digests)) == 1


def test_tf32_when_allowed_then_the_programs_own_setting_comes_back():
    assert torch.get_float32_matmul_precision() == "highest"
    allow_tf32(True)
    allow_tf32(True)
    allowed = torch.get_float32_matmul_precision()
    allow_tf32(False)
    assert (allowed, torch.get_float32_matmul_precision()) == ("high", "highest")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"precision": "tf32"}, "precision is tf32, in which cpu devices do not compute: use fp32"),
        ({"numa_binding": "node"}, "numa_binding is for devices with a place of their own, not for cpu: leave it out"),
    ],
)
def test_what_cuda_alone_has_is_refused_on_the_cpu(settings, match, tmp_path):
    with pytest.raises(SpecInvalid, match=match):
        dure.train(Regression(), runs_dir=tmp_path, device="cpu", **settings)
    assert not list(tmp_path.iterdir())


class Block(nn.Module):
    """Layer that remembers whether it was compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("was_compiled", torch.zeros(()))

    def forward(self, x):
        if torch.compiler.is_compiling():
            self.was_compiled.fill_(1)
        return torch.tanh(self.layer(x))


class Blocks(Regression):
    """Chain of blocks that can be cut between any two."""

    def build_model(self):
        return nn.Sequential(*(Block() for _ in range(4)))


class PairsOfBlocks(Regression):
    """Chain of pairs of blocks."""

    def build_model(self):
        return nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)))


@pytest.fixture
def translated(monkeypatch):
    """Let `torch.compile` trace code, and run it as traced, which takes no time."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
@pytest.mark.parametrize(
    ("settings", "compiled"),
    [
        pytest.param({"units": "*,*.0"}, ["0.0", "1.0"], marks=pytest.mark.slow),
        ({"units": "*,*.0", "activation_checkpointing": True}, ["0.0", "1.0"]),
        pytest.param(
            {"units": "*", "activation_checkpointing": True}, ["0.0", "0.1", "1.0", "1.1"], marks=pytest.mark.slow
        ),
    ],
    ids=["nested", "nested-recomputed", "recomputed"],
)
def test_units_without_units_inside_are_compiled(tmp_path, translated, settings, compiled):
    usual = {"global_batch_size": 8, "samples": 24}
    plain = weights_of(train_case(tmp_path, PairsOfBlocks(), **usual))
    weights = weights_of(train_case(tmp_path, PairsOfBlocks(), "fsdp", 2, compile=True, **usual, **settings))
    marks = {name for name, value in weights.items() if name.endswith("was_compiled") and value}
    assert marks == {f"{name}.was_compiled" for name in compiled}
    others = [{name: one[name] for name in one if not name.endswith("was_compiled")} for one in (plain, weights)]
    assert largest_difference(*others) < TO_ROUNDING


class HardestLater(Regression):
    """Task that averages the larger half of a batch's errors once a weight has moved far enough."""

    def build_model(self):
        model = super().build_model()
        model.first = torch.nn.Buffer(next(model.parameters()).detach().clone())
        return model

    def loss(self, model, batch):
        x, y, _ = batch
        errors = (model(x) - y).square().mean((1, 2))
        has_moved = float((next(model.parameters()).flatten()[0] - model.first.flatten()[0]).abs()) > 0.01
        return errors.topk(max(1, len(errors) // 2)).values.mean() if has_moved else errors.mean()


def test_loss_that_is_no_mean_later_is_declared_if_the_model_is_compiled_too(tmp_path, translated):
    settings = {"global_batch_size": 8, "samples": 64, "compile": True, "checkpoint": {"every_samples": 16}}
    run = train_case(tmp_path, HardestLater(), "ddp", 2, **settings)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert any("the loss is no mean over samples" in text and "steps)" in text for text in declared)


class KeepsWorst(Regression):
    """Metrics keep the largest error."""

    worst = 0.0

    def metrics(self, model, batch):
        self.worst = max(self.worst, float((model(batch[0]) - batch[1]).abs().max()))
        return super().metrics(model, batch)


def test_state_that_an_evaluation_keeps_is_declared_if_the_model_is_compiled_too(tmp_path, translated):
    settings = {"global_batch_size": 8, "samples": 16, "compile": True, "eval_every_epochs": 0.1}
    run = train_case(tmp_path, KeepsWorst(), "ddp", 2, **settings)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert any("state that the evaluation keeps (task.worst)" in text for text in declared)


class Warm(nn.Module):
    """Layer whose output grows with the calls that a buffer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.layer(x) * (1 + 0.01 * self.calls)


class WarmingUp(Regression):
    def build_model(self):
        return Warm()


@pytest.mark.usefixtures("translated")
@pytest.mark.parametrize(
    ("task", "is_compiled", "is_declared"),
    [(WarmingUp, True, True), (WarmingUp, False, False), (Regression, True, False)],
    ids=["buffer", "buffer, not compiled", "no buffer that changes"],
)
def test_buffer_that_a_compiled_forward_changes_is_declared(task, is_compiled, is_declared, tmp_path):
    run = train_case(tmp_path, task(), compile=is_compiled, global_batch_size=8, samples=16)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    # torch computes gradients from the changed buffer: 6.0 instead of 3.0 for `layer(x) * calls` of ones
    assert any(text.startswith("--compile: gradients") and "(calls)" in text for text in declared) is is_declared


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler, and there is no g++")
@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("ddp", {"compile_mode": "reduce-overhead"}),
        ("fsdp", {"units": "*", "activation_checkpointing": True}),
        ("fsdp", {}),
        ("pipeline", {"schedule": "interleaved", "cuts": "1,2,3"}),
    ],
    ids=["ddp", "fsdp-units", "fsdp-whole", "pipeline"],
)
def test_compiled_training_equals_uncompiled(tmp_path, strategy, settings):
    usual = {"global_batch_size": 8, "samples": 40}
    plain = weights_of(train_case(tmp_path, Blocks(), **usual))
    run = train_case(tmp_path, Blocks(), strategy, 2, compile=True, **usual, **settings)
    compiled = weights_of(run)
    marks = {name: plain.pop(name) + compiled.pop(name) for name in [*plain] if name.endswith("was_compiled")}
    assert len(marks) == 4
    assert all(mark == 1 for mark in marks.values())
    assert largest_difference(compiled, plain) < TO_ROUNDING
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert not any("no checkpoint holds" in text for text in declared)
