"""Parameters, gradients and optimiser state are divided as the table says, and what cannot be is refused."""

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import dure
from dure.comm.groups import ProcessGroup
from dure.errors import SpecInvalid, TaskInvalid, WorkerFailed
from dure.strategies.sharded import fsdp_units
from dure.strategies.sharded.fsdp import FSDP
from dure.training.checkpoints.reader import verify
from tests.comm.gloo_ranks import on_ranks
from tests.conformance.cases import (
    TO_ROUNDING,
    are_same_bits,
    evaluated_digests,
    largest_difference,
    losses_of,
    records_of,
    train_case,
    weights_of,
)
from tests.conformance.tasks import WIDTH, Normalised, Regression
from tests.conformance.test_failures import Branching
from tests.conformance.test_precision import STEPS as HALF_STEPS
from tests.conformance.test_precision import Steep
from tests.conformance.test_resume import SETTINGS, back_to, resumed
from tests.conformance.zoo.feature import STEPS as ZOO_STEPS
from tests.conformance.zoo.feature import ZooTask
from tests.conformance.zoo.gradients_and_weights import AdjointMethod, GradientPenalty
from tests.specs import grouped, spec_of
from tests.strategies.data_parallel.test_zero1 import Grouped
from tests.strategies.sharded.sharded_cases import SentBytes, backward, held_bytes, num_bytes, prepared

STEPS = {"global_batch_size": 7, "samples": 130, "clip_norm": 0.4, "seed": 5}
ROW = 5  # a width that neither two nor three ranks divide


def blocks() -> nn.Module:
    """Two units, and a parameter of one number and a frozen bias outside them."""
    model = nn.Sequential(nn.Linear(ROW, ROW), nn.Tanh(), nn.Linear(ROW, ROW), nn.Flatten())
    model.scale = nn.Parameter(torch.ones(()))
    model.shift = nn.Parameter(torch.zeros(ROW), requires_grad=False)
    return model


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return ((model(batch) + model.shift) * model.scale).square().mean()


UNITS = {"units": "0,2"}


# memory


def shard_bytes(model: nn.Module, num_ranks: int, *, trained: bool) -> list[int]:
    """Return the bytes of each rank's shards: rows rounded up, and the rest for the last ones; scalars on all."""
    found = [0] * num_ranks
    for parameter in model.parameters():
        if trained and not parameter.requires_grad:
            continue
        rows = torch.empty(parameter.shape, device="meta").chunk(num_ranks) if parameter.dim() else [parameter]
        for rank in range(num_ranks):
            part = rows[rank] if rank < len(rows) else torch.empty(0)
            found[rank] += 4 * (parameter if not parameter.dim() else part).numel()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_hold_their_shards_of_parameters_gradients_and_state_and_no_more(num_ranks):
    def work(group: ProcessGroup) -> dict[str, int]:
        strategy = prepared("fsdp", group, blocks(), loss, **UNITS)
        backward(strategy, torch.ones(2, ROW), torch.ones(2, ROW))
        gradients = held_bytes(strategy)["gradients"]
        strategy.optimizer_step()
        found = held_bytes(strategy) | {"gradients": gradients}
        strategy.close()
        return found

    held = on_ranks(num_ranks, work)
    assert [rank["parameters"] for rank in held] == shard_bytes(blocks(), num_ranks, trained=False)
    trained = shard_bytes(blocks(), num_ranks, trained=True)
    assert [rank["gradients"] for rank in held] == trained
    assert [rank["state"] for rank in held] == [
        2 * (size - 4) for size in trained
    ]  # scalars' moments have no dimension


@pytest.mark.parametrize("keeps", [True, False])
def test_whole_parameters_are_freed_after_forward_unless_they_are_kept(keeps):
    def work(group: ProcessGroup) -> list[bool]:
        whole: list[torch.Tensor] = []

        def watched(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            hook = model[0].register_forward_pre_hook(lambda module, inputs: whole.append(module.weight))
            value = loss(model, batch)
            hook.remove()
            seen.append(bool(whole[-1].untyped_storage().size()))
            return value

        seen: list[bool] = []
        strategy = prepared("fsdp", group, blocks(), watched, reshard_after_forward=keeps, **UNITS)
        backward(strategy, torch.ones(2, ROW))
        seen.append(bool(whole[-1].untyped_storage().size()))
        strategy.close()
        return seen

    after_forward = keeps is False
    assert on_ranks(2, work) == [[after_forward, False]] * 2


def test_activations_inside_a_unit_are_computed_twice_instead_of_kept(tmp_path):
    def work(group: ProcessGroup) -> tuple[int, int]:
        calls: list[int] = []

        class Counting(nn.Linear):
            def forward(self, value):
                calls.append(1)
                return super().forward(value)

        model = nn.Sequential(Counting(ROW, ROW), nn.Linear(ROW, ROW))
        strategy = prepared("fsdp", group, model, units="*", activation_checkpointing=True)
        backward(strategy, torch.ones(2, ROW))
        in_training = len(calls)
        with torch.no_grad():
            strategy.evaluation_models()[0](torch.ones(2, ROW))
        strategy.close()
        return in_training, len(calls) - in_training

    assert on_ranks(2, work) == [(2, 1)] * 2


# bytes on the wire


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("microsteps", [1, 3])
@pytest.mark.parametrize(("num_ranks", "mesh"), [(1, None), (3, None), (4, "replica=2,shard=2")])
def test_sent_bytes_are_what_the_process_groups_are_given(num_ranks, mesh, microsteps, keeps):
    def work(group: ProcessGroup) -> tuple[int, int, dict[str, int]]:
        strategy = prepared("fsdp", group, blocks(), loss, mesh=mesh, reshard_after_forward=keeps, **UNITS)
        # the batch asks for a gradient, as an activation does: else autograd need not come back to the first unit
        batches = [torch.ones(2, ROW, requires_grad=True) for _ in range(microsteps)]
        backward(strategy, *batches)
        strategy.optimizer_step()
        with SentBytes() as sent:
            backward(strategy, *batches)
        answer = sent.num_bytes, strategy.sent_bytes(microsteps), sent.calls
        strategy.close()
        return answer

    for counted, told, calls in on_ranks(num_ranks, work):
        assert counted == told
        if num_ranks > 1:
            # of two units, the rest being frozen: gradients are sent once, however many microsteps
            assert calls["reduce_scatter_base"] == 2
            assert calls["allgather_base"] == (3 if keeps is False else 5 * microsteps)


@pytest.mark.parametrize("options", [{"reshard_size": 2}, {"reduce_dtype": "bf16"}, {"prefetch": 2}], ids=repr)
def test_sent_bytes_follow_the_options(options):
    def work(group: ProcessGroup) -> tuple[int, int]:
        strategy = prepared("fsdp", group, blocks(), loss, **options, **UNITS)
        batches = [torch.ones(2, ROW, requires_grad=True) for _ in range(2)]
        backward(strategy, *batches)
        strategy.optimizer_step()
        with SentBytes() as sent:
            backward(strategy, *batches)
        answer = sent.num_bytes, strategy.sent_bytes(2)
        strategy.close()
        return answer

    for counted, told in on_ranks(4, work):
        assert counted == told


class CountsCalls(nn.Linear):
    """Layer that counts its calls and scales by their number."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return super().forward(x) * (1 + self.calls / 100)


class Counted(Regression):
    """Task whose model counts calls in the first layers."""

    num_counted: int = 1

    def build_model(self):
        layers = [CountsCalls(WIDTH) for _ in range(self.num_counted)]
        return nn.Sequential(*layers, *(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2 - len(layers))))


RECOMPUTED = {"global_batch_size": 8, "samples": 24, "units": "*", "activation_checkpointing": True}


def test_unit_that_counts_its_calls_is_not_computed_twice(tmp_path):
    plain = weights_of(train_case(tmp_path, Counted(), global_batch_size=8, samples=24))
    assert plain["0.calls"] == 3
    assert largest_difference(plain, weights_of(train_case(tmp_path, Counted(), "fsdp", 2, **RECOMPUTED))) < TO_ROUNDING


def test_units_that_all_count_their_calls_are_not_taken_to_be_computed_twice(tmp_path):
    with pytest.raises(WorkerFailed, match=r"finds no unit to compute twice, because 0.calls, 1.calls would change"):
        train_case(tmp_path, Counted(num_counted=2), "fsdp", 2, **RECOMPUTED)


class ChangesInput(nn.Linear):
    def forward(self, x):
        x += super().forward(x.clone())
        return x


class InPlace(Regression):
    """Task whose layers change their inputs."""

    def build_model(self):
        return nn.Sequential(*(ChangesInput(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)))

    def loss(self, model, batch):
        return super().loss(model, (batch[0].clone(), *batch[1:]))


class CopiesUnits(Regression):
    """Task that keeps a copy of the model, made in build_optimizer."""

    def build_model(self):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)))

    def build_optimizer(self, model):
        self.teacher = copy.deepcopy(model)
        return super().build_optimizer(model)


class WeighsWeights(CopiesUnits):
    """Task that measures in build_optimizer how much each weight matters (elastic weight consolidation)."""

    def build_optimizer(self, model):
        self.importance = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        x = torch.ones(1, WIDTH, dtype=torch.float64)
        gradients = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
        for importance, gradient in zip(self.importance.values(), gradients, strict=True):
            importance += gradient.square()
        return super().build_optimizer(model)


class ChoosesBlock(nn.Module):
    """Model that after some steps uses one of two blocks of the same size, depending on the samples."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += self.training
        x = self.first(x)
        order = [0, 1] if self.seen < 20 or x[:, 0].sum() > 0 else [1, 0]
        return self.blocks[order[1]](self.blocks[order[0]](x))


class Choosing(Regression):
    def build_model(self):
        torch.manual_seed(2)
        return ChoosesBlock()


def test_ranks_that_gather_different_units_of_the_same_size_are_told(tmp_path):
    with pytest.raises(WorkerFailed, match="ranks called different units of the model in a step") as caught:
        train_case(tmp_path, Choosing(), "fsdp", 2, global_batch_size=4, samples=160, units="blocks.*")
    assert caught.value.exit_code == 2


class SkipsBlocks(nn.Module):
    """Model whose blocks are skipped depending on the samples, as stochastic depth skips them by chance."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if x[:, 0].mean() > x[:, 0].detach().mean().round(decimals=1):
                x = x + block(x)
        return x


class Skipping(Regression):
    def build_model(self):
        torch.manual_seed(2)
        return SkipsBlocks()


def test_units_that_nobody_named_are_none_that_ranks_may_skip(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(fsdp_units, "_LEAST_BYTES", 0)
    steps = {"global_batch_size": 4, "samples": 24}
    run = train_case(tmp_path, Skipping(), "fsdp", 2, **steps)
    record = json.loads((run / "summary.json").read_text())
    difference = largest_difference(weights_of(run), weights_of(trained(Skipping(), **steps)))
    assert difference < TO_ROUNDING or record["not_preserved"]


@pytest.mark.parametrize(
    ("task", "units", "why"),
    [
        (Skipping, "blocks.*", r"some calls of the model use blocks.0, blocks.1 and others do not"),
        (
            WeighsWeights,
            "1",
            "with weights that the strategy has divided over the ranks: compute with them in build_model",
        ),
        (InPlace, "1", "a unit changes one of its inputs in place"),
        (CopiesUnits, "1", r"the task copies the model or a part of it \(copy.deepcopy\)"),
    ],
)
def test_what_units_cannot_do_is_refused_in_a_sentence(task, units, why, tmp_path):
    with pytest.raises(WorkerFailed, match=why) as caught:
        train_case(tmp_path, task(), "fsdp", 2, global_batch_size=8, samples=16, units=units)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("recompute", "num_products"), [("all", 2), ("cheap", 1)])
def test_results_of_products_are_kept_if_only_what_is_cheap_is_computed_again(recompute, num_products):
    class Products(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten.addmm.default
            return func(*args, **(kwargs or {}))

    def work(group: ProcessGroup) -> int:
        model = nn.Sequential(nn.Sequential(nn.Linear(ROW, ROW), nn.Tanh()))
        options = {"units": "0", "activation_checkpointing": True, "recompute": recompute}
        strategy = prepared("fsdp", group, model, **options)
        with Products() as products, torch.autograd.set_multithreading_enabled(False):
            backward(strategy, torch.ones(2, ROW))
        strategy.close()
        return products.count

    assert on_ranks(2, work) == [num_products] * 2


# weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (3, {"units": "0,5", "reshard_after_forward": False}),
        (3, {"units": "*", "activation_checkpointing": True, "recompute": "cheap", "recompute_every": 2}),
        (4, {"units": "*", "reshard_size": 2, "prefetch": 2}),
        (4, {"mesh": "replica=2,shard=2", "reshard_after_forward": False, "units": "2,5"}),
        (4, {"mesh": "replica=4,shard=1"}),
        (4, {"mesh": "shard=4", "backend": "gloo"}),
    ],
    ids=repr,
)
def test_weights_under_any_setting_equal_one_process(num_ranks, settings, trained, tmp_path):
    digests = tmp_path / "digests"
    digests.mkdir()
    task = Regression(kind="tokens", optimizer="adamw", layered=True)
    one = weights_of(trained(task, **STEPS))
    task = Regression(kind="tokens", optimizer="adamw", layered=True, digests=str(digests))
    run = train_case(tmp_path, task, "fsdp", num_ranks, microbatch_size=1, **settings, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING
    assert len(evaluated_digests(digests)) == 1


@pytest.mark.slow
def test_weights_with_any_groups_and_class_of_optimiser_equal_one_process(trained, tmp_path):
    task = Grouped(way="all")
    one = weights_of(trained(task, **STEPS))
    run = train_case(tmp_path, task, "fsdp", 3, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("has_torchs_own_way", [True, False])
def test_parameters_that_some_ranks_or_none_use_give_the_weights_of_one_process(
    has_torchs_own_way, trained, tmp_path, monkeypatch
):
    if not has_torchs_own_way:  # as 2.11
        monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    task = Branching(never=True, optimizer="adamw")  # which decays what has a gradient, be it zero
    one = weights_of(trained(task, **STEPS))
    run = train_case(tmp_path, task, "fsdp", 3, microbatch_size=1, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


def test_autograd_function_that_gets_parameters_of_a_unit_is_refused(tmp_path):
    with pytest.raises(WorkerFailed, match=r"used outside that unit's forward, .* \(Adjoint.apply\)") as found:
        train_case(tmp_path, AdjointMethod(), "fsdp", 2, units="slope", **ZOO_STEPS)
    assert found.value.exit_code == 2


class DecayOfKeptParameters(Regression):
    """Loss with a penalty of parameters that `build_optimizer` kept, in training and in evaluations."""

    def build_optimizer(self, model):
        self.decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        return super().build_optimizer(model)

    def loss(self, model, batch):
        return super().loss(model, batch) + 0.001 * sum(weight.pow(2).sum() for weight in self.decayed)


def test_penalty_of_parameters_that_the_task_keeps_is_refused_with_evaluation_data_too(tmp_path):
    with pytest.raises(WorkerFailed, match="used outside that unit's forward") as found:
        train_case(tmp_path, DecayOfKeptParameters(), "fsdp", 2, global_batch_size=4, samples=8)
    assert found.value.exit_code == 2


def test_derivatives_of_derivatives_through_a_unit_are_refused(tmp_path):
    with pytest.raises(WorkerFailed, match=r"derivatives of derivatives .* use ddp") as found:
        train_case(tmp_path, GradientPenalty(), "fsdp", 2, units="0,2", **ZOO_STEPS)
    assert found.value.exit_code == 2


class Encoded(Regression):
    """Task whose loss calls a method of the model other than forward, and reads a weight."""

    def build_model(self):
        return Encoder(super().build_model())

    def loss(self, model, batch):
        x, y, _ = batch
        return functional.mse_loss(model.encode(x), y) + 0.01 * model.main.inner.weight.square().sum()

    def metrics(self, model, batch):
        return {"size": dure.Sum(model.encode(batch[0]).abs().sum(), len(batch[0]))}


class Encoder(nn.Module):
    def __init__(self, main):
        super().__init__()
        self.main = main

    def encode(self, x):
        return self.main(x)


@pytest.mark.slow
def test_a_task_may_use_parameters_outside_the_units_in_any_way(tmp_path):
    one = weights_of(train_case(tmp_path, Encoded(), **STEPS))
    run = train_case(tmp_path, Encoded(), "fsdp", 2, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


@pytest.mark.slow
def test_activation_checkpointing_draws_the_same_dropout_and_leaves_batchnorm_alone(tmp_path):
    settings = {"units": "2,3,4", "deterministic": True, **STEPS}
    for task in (Regression(layered=True, dropout=0.5), Normalised(dropout=0.5, num_samples=45)):
        plain, twice = [
            weights_of(train_case(tmp_path, task, "fsdp", 2, activation_checkpointing=value, **settings))
            for value in (False, True)
        ]
        assert are_same_bits(plain, twice)


# halves


def test_shards_stay_float32_and_are_gathered_in_halves():
    def work(group: ProcessGroup) -> tuple[set[str], set[str], set[str], float]:
        gathered: list[torch.Tensor] = []

        def watched(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            value = loss(model, batch)
            gathered.append(model.shift)
            return value

        strategy = prepared("fsdp", group, blocks(), watched, precision="bf16", **UNITS)
        before = strategy.gathered[0].gather_bytes
        backward(strategy, torch.ones(2, ROW))
        names = [{str(t.dtype) for t in tensors} for tensors in (
            strategy.model.parameters(), gathered, [p.grad for p in strategy.trainable]
        )]  # fmt: skip
        strategy.close()
        return (*names, before)

    for shards, gathered, gradients, sent in on_ranks(2, work):
        assert (shards, gathered, gradients) == ({"torch.float32"}, {"torch.bfloat16"}, {"torch.float32"})
        assert sent == 2 * (3 * ROW + 3)  # the longer shard, in halves


def test_no_halves_of_whole_weights_are_kept_for_backward():
    """Autocast by itself would keep those that it made; what is freed must not live on as a copy."""

    def work(group: ProcessGroup) -> list[int]:
        kept: list[torch.Tensor] = []

        def watched(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            def keep(tensor: torch.Tensor) -> torch.Tensor:
                kept.append(tensor)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                value = loss(model, batch)
            sizes.extend(t.untyped_storage().size() for t in kept if t.numel() == ROW * ROW)
            return value

        sizes: list[int] = []
        strategy = prepared("fsdp", group, blocks(), watched, precision="bf16", **UNITS)
        backward(strategy, torch.ones(2, ROW))
        strategy.close()
        return sizes

    for sizes in on_ranks(2, work):
        assert sizes  # the second unit's weight is needed again
        assert set(sizes) == {0}


@pytest.mark.slow
def test_ranks_skip_the_same_steps_when_fp16_overflows_in_any_shard(tmp_path):
    digests = tmp_path / "digests"
    digests.mkdir()
    task = Steep(dtype="float32", digests=str(digests))
    run = train_case(tmp_path, task, "fsdp", 3, precision="fp16", microbatch_size=1, **HALF_STEPS)
    assert all(value.isfinite().all() for value in weights_of(run).values())
    assert len(evaluated_digests(digests)) == 1


class ReadsWeights(ZooTask):
    """Uses a number that is read from a weight: each time, or again when the weight has another version."""

    caches: bool = False

    def build_model(self):
        self.norms = {}
        return super().build_model()

    def loss(self, model, batch):
        weight = model[0].weight
        version = weight._version if self.caches else len(self.norms)
        if version not in self.norms:
            self.norms = {version: float(weight.detach().norm())}
        return super().loss(model, batch) * self.norms[version]


@pytest.mark.parametrize(
    ("strategy", "settings", "caches"),
    [
        ("fsdp", {}, False),
        ("fsdp", {"units": "0"}, True),
        ("zero1", {}, True),
        pytest.param("fsdp", {}, True, marks=pytest.mark.slow),
        pytest.param("fsdp", {"units": "0"}, False, marks=pytest.mark.slow),
        pytest.param("zero1", {}, False, marks=pytest.mark.slow),
    ],
)
def test_number_of_a_weight_is_that_of_the_whole_and_of_each_step(strategy, settings, caches, trained, tmp_path):
    task = ReadsWeights(caches=caches)
    one = weights_of(trained(task, **ZOO_STEPS))
    run = train_case(tmp_path, task, strategy, 2, **settings, **ZOO_STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


# checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "num_saved", "mesh", "elsewhere", "num_elsewhere", "other_mesh"),
    [
        ("fsdp", 3, None, "single", 1, None),
        ("fsdp", 4, "replica=2,shard=2", "fsdp", 3, None),
        ("zero1", 3, None, "fsdp", 4, "replica=2,shard=2"),
    ],
)
def test_resume_elsewhere_ends_with_the_same_weights(
    saved, num_saved, mesh, elsewhere, num_elsewhere, other_mesh, trained, tmp_path
):
    task = Regression(kind="tokens", optimizer="adamw")
    whole = trained(task, saved, num_saved, mesh=mesh, **SETTINGS)
    run = back_to(whole, 58, tmp_path)
    resumed(run, strategy=elsewhere, nproc=num_elsewhere, mesh=other_mesh)
    assert largest_difference(weights_of(run), weights_of(whole)) < TO_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [(4, {"mesh": "replica=2,shard=2", "units": "*", "activation_checkpointing": True}),
     (2, {"precision": "fp16", "microbatch_size": 2})],
    ids=repr,
)  # fmt: skip
def test_resume_in_the_same_place_is_bit_equal_with_dropout(num_ranks, settings, tmp_path):
    task = Regression(dtype="float32", dropout=0.3, kind="tokens", optimizer="adamw", layered=True)
    whole = train_case(tmp_path, task, "fsdp", num_ranks, deterministic=True, **settings, **SETTINGS)
    run = resumed(back_to(whole, 58, tmp_path))
    assert are_same_bits(weights_of(run), weights_of(whole))
    assert losses_of(run) == losses_of(whole)


def test_every_rank_writes_its_shards_alone(tmp_path):
    run = train_case(tmp_path, Regression(dtype="float32", optimizer="adamw"), "fsdp", 3, samples=14)
    (path,) = (run / "checkpoints").glob("samples-*")
    manifest = verify(path)
    shards = {"inner.weight": [(2, 6)] * 3, "outer.bias": [(2,)] * 3, "scale": [()]}
    assert {name: [piece.sizes for piece in manifest.model[name].pieces] for name in shards} == shards
    moments = [entry for name, entry in manifest.optimizer.items() if "inner.weight" in name and len(entry.shape)]
    assert [[piece.sizes for piece in entry.pieces] for entry in moments] == [[(2, 6)] * 3] * 2


# what is offloaded


def test_offloaded_shards_give_the_same_gradients():
    """On the CPU nothing is moved, but the way is the same."""

    def work(group: ProcessGroup) -> list[list[float]]:
        found = []
        for offloads in (False, True):
            torch.manual_seed(0)
            strategy = prepared("fsdp", group, blocks(), loss, cpu_offload=offloads, clip_norm=0.1, **UNITS)
            backward(strategy, torch.ones(2, ROW), torch.zeros(1, ROW))
            strategy.optimizer_step()
            found.append(torch.cat([p.flatten() for p in strategy.trainable]).tolist())
            strategy.close()
        return found

    for plain, offloaded in on_ranks(2, work):
        assert plain == offloaded


def test_state_stays_in_its_memory_when_it_is_captured(monkeypatch):
    """State of offloaded shards is on the host, and their mesh has CUDA devices; here it has meta devices."""

    def work(group: ProcessGroup) -> list[str]:
        strategy = prepared("fsdp", group, blocks(), loss, **UNITS)
        backward(strategy, torch.ones(2, ROW))
        strategy.optimizer_step()
        monkeypatch.setattr(DeviceMesh, "device_type", "meta")
        saved = [state["exp_avg"] for state in strategy.state_dict().optimizer["state"].values()]
        shards = [value.to_local() for value in saved if isinstance(value, DTensor)]
        assert len(shards) == 4
        moments = [state["exp_avg"] for state in strategy.optimizer.state.values()]
        devices = [tensor.device.type for tensor in shards + moments]
        strategy.close()
        return devices

    assert {device for devices in on_ranks(2, work) for device in devices} == {"cpu"}


@pytest.mark.gpu
def test_shards_and_state_are_in_host_memory_when_offloaded(tmp_path):
    task = Regression(dtype="float32", optimizer="adamw")
    plain, offloaded = [
        weights_of(train_case(tmp_path, task, "fsdp", 1, device="cuda", cpu_offload=value, **STEPS))
        for value in (False, True)
    ]
    # the optimiser's step on the host rounds otherwise: float32, twenty steps
    assert largest_difference(plain, offloaded) < 1e-4


# what is refused


class Odd(Regression):
    """A model, or an optimiser, that cannot be sharded."""

    what: str = ""

    def build_model(self):
        if self.what == "sparse":
            return nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 6))
        if self.what == "empty":
            return nn.Sequential(nn.Linear(6, 6), nn.ParameterList([torch.empty(0)]))
        if self.what == "dtypes":
            return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, dtype=torch.float64))
        return super().build_model()

    def build_optimizer(self, model):
        if self.what == "adafactor":
            return optim.Adafactor(model.parameters())
        return super().build_optimizer(model)


@pytest.mark.parametrize(
    ("what", "settings", "match"),
    [
        ("empty", {}, r"1\.0 has no elements, which fully_shard does not take: leave it out, or use ddp"),
        ("sparse", {}, r"0 gives sparse gradients \(sparse=True\), which have no shards: set sparse=False, or use ddp"),
        ("dtypes", {}, "the model, outside its units, trains parameters in float32 and float64.*: use one, or ddp"),
        ("adafactor", {}, "the optimiser Adafactor cannot step a part of a parameter.*such as AdamW.*strategy=.ddp"),
        ("", {"units": "body.*"}, r"units names body\.\*, which fits no module of the model: its own are"),
        ("", {"units": "inner"}, "names inner, whose weight is shared with a module outside it"),
        ("", {"activation_checkpointing": True}, "activation_checkpointing finds no unit to compute .*fsdp=..units"),
        ("", {"cpu_offload": True}, "cpu_offload moves shards from the device .* and the device is cpu: leave it out"),
        ("", {"reshard_size": 2}, "reshard_size is 2, and parameters are divided over 2 ranks: choose a smaller"),
        ("", {"reshard_size": 2, "reshard_after_forward": False}, "without reshard_after_forward they stay whole"),
        ("", {"prefetch": 1}, "prefetch gathers units ahead of others, and the model has fewer than two: name some"),
        ("", {"recompute": "cheap"}, "recompute is cheap but nothing is computed again: set activation_checkpoint"),
        ("", {"recompute_every": 2}, "recompute_every is 2 but nothing is computed again: set activation_checkpoint"),
        (
            "",
            {"recompute": "cheap", "activation_checkpointing": True, "compile": True},
            "recompute is cheap, with which compiled units that work in place would compute something else",
        ),
        ("", {"mesh": "replica=2,shard=2"}, "nproc is 2 but mesh replica 2 x shard 2 needs 4"),
        ("", {"mesh": "data=2"}, "mesh names the axis data.*it knows replica and shard"),
    ],
)  # fmt: skip
def test_what_cannot_be_sharded_is_refused_before_any_process_starts(what, settings, match, tmp_path):
    settings = grouped("fsdp", settings)
    with pytest.raises(SpecInvalid, match=match):
        dure.train(Odd(what=what), strategy="fsdp", nproc=2, runs_dir=tmp_path, device="cpu", start="fork", **settings)
    assert not list(tmp_path.iterdir())


class RateInTensor(Regression):
    def build_optimizer(self, model):
        return optim.AdamW(model.parameters(), lr=torch.tensor(0.01))


def test_settings_in_tensors_are_compared_between_ranks_by_value(tmp_path):
    train_case(tmp_path, RateInTensor(), "fsdp", 2, global_batch_size=4, samples=8)


@pytest.mark.parametrize("setting", ["reshard_after_forward", "activation_checkpointing", "cpu_offload"])
def test_settings_of_fsdp_are_refused_elsewhere(setting, tmp_path):
    match = rf"argument fsdp\[.{setting}.\]: strategy ddp has no option {setting}: choose strategy=.fsdp"
    with pytest.raises(SpecInvalid, match=match):
        dure.train(Regression(), strategy="ddp", nproc=2, runs_dir=tmp_path, start="fork", fsdp={setting: True})


def test_a_unit_whose_parameters_are_used_outside_it_is_named_as_the_cause():
    def outside(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return functional.linear(model(batch), model[0].weight).square().mean()

    def work(group: ProcessGroup) -> None:
        backward(prepared("fsdp", group, blocks(), outside, **UNITS), torch.ones(2, ROW))

    for error in on_ranks(2, work):
        assert isinstance(error, TaskInvalid)
        assert "a parameter of a unit was used outside that unit's forward" in str(error)


def test_a_list_that_is_never_called_is_no_unit():
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2)])})
    faults = FSDP.check_model(model, spec_of("fsdp", nproc=2, device="cpu", units="blocks"))
    assert faults == ["units names blocks, a ModuleList, which is never called: name blocks.*"]


# what is said


def test_the_start_says_what_is_gathered_together():
    def work(group: ProcessGroup) -> list[str]:
        strategy = prepared("fsdp", group, blocks(), loss, activation_checkpointing=True, **UNITS)
        lines = strategy.describe()
        strategy.close()
        return lines

    assert on_ranks(2, work)[0] == [
        "264 B of parameters in 2 shard(s)",
        "units, each whole only while it computes: 0+2 (at most 120 B)",
        "gathered once per microstep: 20 B outside the units",
        "forward computed twice, activations not kept: 0+2",
    ]


@pytest.mark.slow
def test_halves_and_dropout_are_told_as_not_preserved_only_where_there_are_some(tmp_path):
    def told(**settings: Any) -> str:
        task = Regression(dtype="float32", dropout=settings.pop("dropout", 0.0))
        summary = dure.train(
            task, strategy="fsdp", nproc=2, runs_dir=tmp_path, start="fork", quiet=True, samples=7, **settings
        )
        return " ".join(summary.not_preserved)

    assert told() == ""
    assert "bf16" in told(precision="bf16")
    assert "dropout" in told(dropout=0.5)


def test_records_say_what_was_sent(tmp_path):
    run = train_case(tmp_path, Regression(), "fsdp", 2, samples=14, global_batch_size=7)
    # weights and biases of three layers in two shards of three rows, gathered and reduced; one number, facts and flags
    whole, reduced = 8 * 3 * (6 + 1 + 6 + 1 + 1), 8 * 3 * (6 + 1 + 1)
    facts = 8 * (4 + 4 + 1)
    assert {record["sent_bytes"] for record in records_of(run)} == {whole + reduced + facts}


def test_shards_are_dtensors_under_the_models_own_names():
    def work(group: ProcessGroup) -> tuple[list[str], bool, int]:
        strategy = prepared("fsdp", group, blocks(), loss, **UNITS)
        state = strategy.state_dict()
        is_sharded = all(isinstance(value, DTensor) for value in state.model.values() if value.dim())
        named = [group["params"] for group in state.optimizer["groups"]]
        answer = [*state.model], is_sharded, num_bytes(state.model.values())
        assert named == [[name for name, _ in blocks().named_parameters()]]
        strategy.close()
        return answer

    for names, is_sharded, _ in on_ranks(2, work):
        assert names == [*blocks().state_dict()]
        assert is_sharded
