"""The optimiser's state is divided as the table says, whatever the optimiser, and what cannot be divided is refused."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from dure.comm.groups import ProcessGroup
from dure.errors import SpecInvalid, WorkerFailed
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.contract.step_facts import Requests
from dure.strategies.table import STRATEGIES, load_strategy
from dure.training.checkpoints.reader import verify
from tests.comm.gloo_ranks import on_ranks
from tests.conformance.cases import TO_ROUNDING, are_same_bits, largest_difference, train_case, weights_of
from tests.conformance.tasks import Regression
from tests.conformance.test_precision import STEPS as HALF_STEPS
from tests.conformance.test_precision import Steep
from tests.conformance.test_resume import SETTINGS, back_to, resumed
from tests.specs import spec_of

STEPS = {"global_batch_size": 7, "samples": 130, "clip_norm": 0.4, "seed": 5}
CPU = torch.device("cpu")


def prepared(group: ProcessGroup, model: nn.Module, build_optimizer: Callable[[nn.Module], optim.Optimizer]) -> Any:
    """Return the strategy over a model of vectors, ready to step."""
    info, precision = STRATEGIES["zero1"], Precision("fp32", "cpu")
    strategy = load_strategy("zero1")(StrategyContext(info, group, (CPU,), precision, spec_of("zero1")))
    strategy.prepare(model, build_optimizer, lambda model, batch: model(batch).square().mean())
    return strategy


def step(strategy: Any, width: int) -> None:
    """Make a step of one sample per rank."""
    batch = Microbatch(batch=torch.ones(1, width), num_samples=1)
    strategy.forward_backward([batch], global_samples=strategy.group.world_size, requests=Requests())
    strategy.sync_gradients()
    strategy.optimizer_step()


def state_bytes(optimizer: optim.Optimizer) -> list[int]:
    """Walk the tensors of an optimiser's state and return the bytes of each parameter's."""
    return [
        sum(value.numel() * value.element_size() for value in state.values() if isinstance(value, Tensor))
        for state in optimizer.state.values()
    ]


def held(build_model: Callable[[], nn.Module], width: int, kind: Any = optim.AdamW) -> Callable[[ProcessGroup], Any]:
    """Return work for ranks that says after a step: bytes of state, of its largest parameter, and what was sent."""

    def work(group: ProcessGroup) -> tuple[int, int, int]:
        strategy = prepared(group, build_model(), lambda model: kind(model.parameters(), lr=0.01))
        step(strategy, width)
        found = state_bytes(strategy.stepped)
        answer = sum(found), max(found, default=0), strategy.sent_bytes(1)
        strategy.close()
        return answer

    return work


def adamw_bytes(model: nn.Module) -> int:
    """Return what AdamW keeps of a model: two moments of each trainable element, a float32 step per parameter."""
    return sum(2 * p.numel() * p.element_size() + 4 for p in model.parameters() if p.requires_grad)


def six_equal_layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_state_when_layers_are_equal_then_every_rank_holds_its_even_share(world_size):
    everywhere = on_ranks(world_size, held(six_equal_layers, 8))
    assert [num_bytes for num_bytes, _, _ in everywhere] == [adamw_bytes(six_equal_layers()) // world_size] * world_size


def uneven() -> nn.Module:
    frozen = nn.Linear(5, 40).requires_grad_(False)  # the largest, and it has no state
    return nn.Sequential(frozen, nn.Linear(40, 9), nn.Linear(9, 9), nn.Linear(9, 2))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adagrad])  # Adagrad has state before the first step
def test_state_when_layers_differ_then_parts_add_up_and_differ_by_the_largest_parameters_at_most(world_size, kind):
    everywhere = on_ranks(world_size, held(uneven, 5, kind))
    per_rank = [num_bytes for num_bytes, _, _ in everywhere]
    alone = kind(uneven().parameters(), lr=0.01)
    for group in alone.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    alone.step()
    whole = [n for parameter, n in zip(alone.state, state_bytes(alone), strict=True) if parameter.requires_grad]
    assert sum(per_rank) == sum(whole)
    assert max(per_rank) - min(per_rank) <= max(whole)
    assert max(largest for _, largest, _ in everywhere) == max(whole)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sent_bytes_of_all_ranks_are_what_the_table_says(world_size):
    everywhere = on_ranks(world_size, held(uneven, 5))
    trainable = sum(p.numel() * p.element_size() for p in uneven().parameters() if p.requires_grad)
    gradients = trainable + 4 * 4  # with the step's facts, in float32
    formula = 2 * (world_size - 1) * gradients + (world_size - 1) * trainable
    # each rank's share of the all-reduce is rounded down to bytes
    assert formula - world_size < sum(sent for _, _, sent in everywhere) <= formula


def test_more_ranks_than_parameters_leave_some_with_an_empty_part():
    everywhere = on_ranks(3, held(lambda: nn.Linear(4, 1, bias=False), 4))
    assert sorted(num_bytes for num_bytes, _, _ in everywhere) == [0, 0, adamw_bytes(nn.Linear(4, 1, bias=False))]


def test_channels_last_parameters_keep_their_strides():
    def work(group: ProcessGroup) -> bool:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(memory_format=torch.channels_last)
        strategy = prepared(group, model, lambda model: optim.AdamW(model.parameters()))
        batch = Microbatch(batch=torch.ones(1, 3, 4, 4), num_samples=1)
        for _ in range(2):
            strategy.forward_backward([batch], global_samples=2, requests=Requests())
            strategy.sync_gradients()
            strategy.optimizer_step()
        is_kept = model[0].weight.is_contiguous(memory_format=torch.channels_last)
        strategy.close()
        return is_kept

    assert on_ranks(2, work) == [True, True]


def scale_gradients(optimizer, scale):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None if parameter.grad is None else parameter.grad * scale


class Warmer(optim.SGD):
    """Optimiser whose constructor takes what neither its defaults nor its groups hold."""

    def __init__(self, params, temperature, *, scale):
        super().__init__(params, lr=temperature * 0.1)
        self.scale = scale

    def step(self, closure=None):
        scale_gradients(self, self.scale)
        return super().step(closure)


class Gentler(optim.Adagrad):
    """The same, with state before the first step."""

    def __init__(self, params, temperature, *, scale):
        super().__init__(params, lr=temperature * 0.1, initial_accumulator_value=0.1)
        self.scale = scale

    def step(self, closure=None):
        scale_gradients(self, self.scale)
        return super().step(closure)


class Grouped(Regression):
    """Two groups with settings of their own, frozen parameters among them, or an optimiser from elsewhere.

    In the way `all` there are groups of named parameters for a class of its own, which has state from the start.
    """

    way: str = "groups"

    def build_optimizer(self, model):
        if self.way == "own class":
            return Warmer(model.parameters(), 1.5, scale=0.5)
        if self.way == "named":
            return optim.AdamW(model.named_parameters(), lr=0.02)
        if self.way == "all":
            heads = [(name, p) for name, p in model.named_parameters() if p.dim() < 2]
            rest = [(name, p) for name, p in model.named_parameters() if p.dim() == 2]
            return Gentler([{"params": heads, "lr": 0.1}, {"params": rest}], 0.5, scale=0.5)
        if self.way == "adagrad":
            return optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)
        heads = [model.scale, model.outer.bias]
        rest = [p for p in model.parameters() if all(p is not head for head in heads)]
        return optim.AdamW([{"params": heads, "lr": 0.05, "weight_decay": 0.0}, {"params": rest}], lr=0.01)


class Decaying(optim.SGD):
    """Counts its steps in its groups, and takes smaller ones."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.9


class Reset(optim.SGD):
    """Scales gradients by an attribute, which its schedule sets."""

    rho = 1.0

    def step(self, closure=None):
        scale_gradients(self, self.rho * getattr(self, "factor", 1.0))
        return super().step(closure)


class ReachesIntoOptimizer(Regression):
    """A schedule that sets attributes of the optimiser and decays its momentum, in place or by new state."""

    replaces_state: bool = False

    def build_optimizer(self, model):
        return Reset(model.parameters(), lr=0.1, momentum=0.9)

    def build_schedule(self, optimizer, total_samples):
        def factor(seen):
            optimizer.rho = 1 - 0.5 * seen / total_samples
            optimizer.factor = optimizer.rho + 0.1
            if self.replaces_state and 20 <= seen < 40:
                optimizer.state = defaultdict(dict)
            for state in optimizer.state.values():
                if seen and "momentum_buffer" in state:
                    state["momentum_buffer"].mul_(0.9)
            return 1.0

        return factor


@pytest.mark.slow
@pytest.mark.parametrize("replaces_state", [False, True])
def test_a_schedule_that_sets_attributes_and_state_sets_those_of_the_tasks_optimizer(replaces_state, tmp_path):
    task = ReachesIntoOptimizer(replaces_state=replaces_state)
    one, run = [weights_of(train_case(tmp_path, task, name, n, **STEPS)) for name, n in (("single", 1), ("zero1", 2))]
    assert largest_difference(run, one) < TO_ROUNDING


class Unscheduled(Grouped):
    """Task whose learning rate is the optimiser's own affair."""

    def build_schedule(self, optimizer, total_samples):
        return None

    def build_optimizer(self, model):
        return Decaying(model.parameters(), lr=0.3)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed_as"), [("zero1", "zero1"), ("zero1", "ddp"), ("ddp", "zero1")])
def test_what_the_optimiser_keeps_in_its_groups_goes_through_a_checkpoint(saved, resumed_as, tmp_path):
    whole = train_case(tmp_path, Unscheduled(), saved, 2, **SETTINGS)
    run = resumed(back_to(whole, 44, tmp_path), strategy=resumed_as)
    assert largest_difference(weights_of(run), weights_of(whole)) < TO_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("way", ["groups", "own class", "named", "adagrad"])
def test_weights_with_any_groups_and_class_equal_one_process(way, trained, tmp_path):
    task = Grouped(way=way)
    one = weights_of(trained(task, **STEPS))
    run = train_case(tmp_path, task, "zero1", 3, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", ["single", "ddp", "zero1"])
def test_a_checkpoint_of_groups_with_frozen_parameters_goes_on_anywhere(elsewhere, tmp_path):
    whole = train_case(tmp_path, Grouped(), "zero1", 3, **SETTINGS)
    run = back_to(whole, 44, tmp_path)
    resumed(run, strategy=elsewhere, nproc=1 if elsewhere == "single" else 2)
    assert largest_difference(weights_of(run), weights_of(whole)) < TO_ROUNDING


@pytest.mark.slow
def test_every_rank_writes_its_own_part_into_a_checkpoint(tmp_path):
    run = train_case(tmp_path, Regression(optimizer="adamw"), "zero1", 3, **STEPS)
    checkpoint = next((run / "checkpoints").glob("samples-*"))
    files = {name: [piece.file for piece in entry.pieces] for name, entry in verify(checkpoint).optimizer.items()}
    assert all(len(pieces) == 1 for pieces in files.values())
    assert {pieces[0] for pieces in files.values()} == {
        "optimizer.safetensors", "optimizer-00001.safetensors", "optimizer-00002.safetensors"
    }  # fmt: skip


@pytest.mark.slow
def test_ranks_skip_the_same_steps_as_ddp_when_fp16_overflows(tmp_path):
    task = Steep(dtype="float32", optimizer="adamw")
    settings = {"precision": "fp16", "microbatch_size": 1, **HALF_STEPS}
    ddp, zero1 = [weights_of(train_case(tmp_path, task, name, 3, **settings)) for name in ("ddp", "zero1")]
    assert are_same_bits(ddp, zero1)


class NeedsAll(Regression):
    """Has an optimiser that cannot be divided; in one way its model cannot be built without values."""

    reads_values: bool = False

    def build_model(self):
        model = super().build_model()
        if self.reads_values:
            float(model.scale)
        return model

    def build_optimizer(self, model):
        return optim.LBFGS(model.parameters())


def test_an_optimiser_that_needs_all_parameters_is_refused_before_any_process_starts(tmp_path):
    match = "strategy is zero1: the optimiser LBFGS cannot be divided over ranks, because its step asks for a closure"
    with pytest.raises(SpecInvalid, match=match):
        train_case(tmp_path, NeedsAll(), "zero1", 2, **STEPS)
    assert list(tmp_path.iterdir()) == []


def test_the_worker_refuses_it_when_the_model_could_not_be_looked_at_before(tmp_path):
    with pytest.raises(
        WorkerFailed, match=r"returned LBFGS, whose step asks for a closure .*such as AdamW or SGD"
    ) as caught:
        train_case(tmp_path, NeedsAll(reads_values=True), "zero1", 2, **STEPS)
    assert caught.value.exit_code == 2


class TwoDtypes(Regression):
    def build_model(self):
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, dtype=torch.float64))

    def build_optimizer(self, model):
        return optim.SGD(model.parameters(), lr=0.1)


def test_parameters_of_two_dtypes_are_refused(tmp_path):
    with pytest.raises(
        SpecInvalid, match=r"have several dtypes \(torch\.float32, torch\.float64\), which torch's Zero"
    ):
        train_case(tmp_path, TwoDtypes(), "zero1", 2, **STEPS)


class TrainsNothing(Regression):
    def build_optimizer(self, model):
        return optim.SGD(model.frozen.parameters(), lr=0.1)


def test_an_optimiser_without_a_trainable_parameter_is_refused(tmp_path):
    with pytest.raises(SpecInvalid, match="the optimiser SGD holds no trainable parameter, so there is nothing to"):
        train_case(tmp_path, TrainsNothing(), "zero1", 2, **STEPS)


class FrozenBySchedule(Regression):
    """Task whose schedule freezes a layer before the last step."""

    def build_model(self):
        self.model = super().build_model()
        return self.model

    def build_optimizer(self, model):
        self.model = model
        return super().build_optimizer(model)

    def build_schedule(self, optimizer, total_samples):
        def schedule(samples: int) -> float:
            self.model.inner.requires_grad_(samples < total_samples - 7)
            return 1.0

        return schedule


def test_schedule_that_freezes_is_refused_before_the_step(tmp_path):
    with pytest.raises(WorkerFailed, match="the task froze inner") as caught:
        train_case(tmp_path, FrozenBySchedule(), "zero1", 2, global_batch_size=7, samples=28)
    assert caught.value.exit_code == 2
