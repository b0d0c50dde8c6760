"""Hooks on the optimiser's step: averages of the weights, changes of gradients, counters; exact or refused."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from dure.errors import SpecInvalid, WorkerFailed
from dure.strategies.division.optimizer_trial import reason_not_to_divide
from dure.strategies.table import STRATEGIES
from tests.commands import RunFiles
from tests.conformance.cases import TO_ROUNDING, largest_difference, train_case, weights_of
from tests.conformance.tasks import Regression, layered_model

STEPS = {"global_batch_size": 7, "samples": 88, "seed": 4}
NUM_STEPS = 14
"""Seven in each epoch of 44 samples."""
WHOLE = ("dp", "ddp", "ring_ddp", "naive_ddp", "zero1", "model_parallel")
"""Strategies whose ranks, or whose one process, have all parameters between two steps."""
DIVIDED = ("fsdp", "tensor_parallel", "pipeline", "rpc_model", "parameter_server")
LOCAL = ("averaging", "diloco")


class Averaged(nn.Module):
    """A model with an average of each weight, and what else hooks keep, in buffers."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        for name, parameter in inner.named_parameters():
            self.register_buffer(f"mean {name}".replace(".", " "), parameter.detach().clone())
        for name in ("steps", "all_steps", "norm"):
            self.register_buffer(name, torch.zeros(()))

    def means(self):
        return [buffer for name, buffer in self.named_buffers() if name.startswith("mean ")]

    def forward(self, x):
        return self.inner(x)


class WithHooks(Regression):
    """Keeps averages of its weights by a hook, by way of the model or of the optimiser that it has made."""

    through: str = "model"
    frozen: bool = False
    reads_state: bool = False
    is_global: bool = False
    late: bool = False
    """Registers the hook when training begins."""
    is_wrapped: bool = False
    """Wraps the step of the object, as torch's schedulers do."""

    def build_model(self):
        model = layered_model(torch.float64, 0.0)
        if self.frozen:
            model[0].bias.requires_grad_(False)
        return Averaged(model)

    def build_optimizer(self, model):
        optimizer = torch.optim.AdamW(model.inner.named_parameters(), lr=0.01)
        sources = {
            "model": lambda given: list(model.inner.parameters()),
            "own": lambda given: [p for group in optimizer.param_groups for p in group["params"]],
            "given": lambda given: [p for group in given.param_groups for p in group["params"]],
        }

        @torch.no_grad()
        def average(given, args, kwargs):
            assert args[0] is given
            for mean, parameter in zip(model.means(), sources[self.through](given), strict=True):
                mean.lerp_(parameter, 0.1)
            model.steps += 1
            if self.reads_state:
                model.norm += sum(state["exp_avg"].norm() for state in given.state.values())

        @torch.no_grad()
        def clip(given, args, kwargs):
            """Scale each gradient by the norm of all: parts of them would give another one."""
            gradients = [p.grad for p in sources[self.through](given) if p.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            for gradient in gradients:
                gradient.div_(1 + norm)

        def register():
            optimizer.register_step_pre_hook(clip)
            optimizer.register_step_post_hook(average)

        if self.is_wrapped:
            step = optimizer.step

            def counting(*args, **kwargs):
                model.all_steps.add_(1)
                return step(*args, **kwargs)

            optimizer.step = counting
        self.register = register
        if not self.late:
            register()
        if self.is_global:
            register_optimizer_step_post_hook(lambda given, args, kwargs: model.all_steps.add_(1))
        return optimizer

    def build_schedule(self, optimizer, total_samples):
        if self.late:
            self.register()


@pytest.mark.parametrize(
    ("strategy", "through"),
    [
        ("ddp", "model"),
        ("zero1", "own"),
        *(pytest.param(name, "model", marks=pytest.mark.slow) for name in WHOLE if name != "ddp"),
        pytest.param("zero1", "given", marks=pytest.mark.slow),
    ],
)
def test_hooks_where_every_rank_has_all_parameters_then_their_work_is_that_of_one_process(
    strategy, through, trained, tmp_path
):
    task = WithHooks(through=through)
    many = weights_of(train_case(tmp_path, task, strategy, 3, **STEPS))
    one = weights_of(trained(WithHooks(), **STEPS))
    assert largest_difference(many, one) < TO_ROUNDING
    assert many["steps"] == one["steps"] == NUM_STEPS


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"is_global": True}, {"frozen": True, "through": "own"}, {"late": True}])
def test_other_hooks_when_the_optimizer_is_divided_then_their_work_is_that_of_one_process(options, trained, tmp_path):
    # a process of its own for each: a global hook stays registered
    many = weights_of(train_case(tmp_path, WithHooks(**options), "zero1", 2, **STEPS))
    one = weights_of(train_case(tmp_path, WithHooks(**options), "single", 1, **STEPS))
    assert largest_difference(many, one) < TO_ROUNDING
    assert many["all_steps"] == (NUM_STEPS if "is_global" in options else 0)


def test_hook_when_it_reads_state_that_other_ranks_have_then_is_refused_before_it_is_wrong(tmp_path):
    with pytest.raises(WorkerFailed, match="a hook on the optimiser's step uses the optimiser's state, of which every"):
        train_case(tmp_path, WithHooks(reads_state=True), "zero1", 2, **STEPS)


@pytest.mark.parametrize("strategy", DIVIDED)
def test_hooks_where_ranks_have_parts_of_the_parameters_then_are_refused_before_training(strategy, tmp_path):
    words = r"AdamW has a hook on its step \(.*clip, .*average\).*use strategy=.ddp. or zero1"
    settings = {"plan": "inner.0=column,inner.2=row"} if strategy == "tensor_parallel" else {}
    with pytest.raises((SpecInvalid, WorkerFailed), match=words):
        train_case(tmp_path, WithHooks(), strategy, 2, **STEPS, **settings)


@pytest.mark.parametrize("strategy", ["zero1", "parameter_server"])
def test_step_when_replaced_where_ranks_step_parts_then_is_refused(strategy, tmp_path):
    task = WithHooks(is_wrapped=True, late=True)
    with pytest.raises(
        (SpecInvalid, WorkerFailed), match="the step of the optimiser AdamW was replaced by another fun"
    ):
        train_case(tmp_path, task, strategy, 2, **STEPS)


def test_step_when_a_scheduler_of_torch_counts_its_calls_then_it_is_none_that_was_replaced():
    from dure.strategies.division.step_hooks import fault_of_hooks

    optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" in vars(optimizer)
    assert fault_of_hooks(optimizer) is None
    optimizer.step = lambda closure=None: None
    assert "was replaced" in fault_of_hooks(optimizer)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_hooks_when_registered_as_training_begins_then_are_refused_too(strategy, tmp_path):
    with pytest.raises(WorkerFailed, match=r"a hook \(.*clip\) was registered on the optimiser's step, and on each ra"):
        train_case(tmp_path, WithHooks(late=True), strategy, 2, **STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", LOCAL)
def test_hooks_where_ranks_train_by_themselves_then_the_record_says_so(strategy, tmp_path):
    told = {}
    for task in (WithHooks(), Regression(layered=True)):
        run = train_case(tmp_path, task, strategy, 2, **STEPS)
        told[type(task)] = [text for text in RunFiles(run).events("training")[0]["not_preserved"] if "hooks" in text]
    assert told[Regression] == []
    (text,) = told[WithHooks]
    assert "each rank's run on its own weights" in text


def test_strategies_then_each_is_exact_declared_or_refused():
    assert {*WHOLE, *DIVIDED, *LOCAL, "single", "balanced_dp"} == set(STRATEGIES)


def test_trial_of_an_optimizer_then_runs_no_hooks():
    calls = []
    optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        assert reason_not_to_divide(optimizer) is None
    finally:
        handle.remove()
    assert calls == []


class Together(torch.optim.SGD):
    """Steps every parameter by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (1 + norm), alpha=group["lr"])


class Unplannable(Regression):
    """Cannot be built without values, so that nothing looks at its optimiser before the ranks do."""

    def build_model(self):
        model = super().build_model()
        float(next(model.parameters()).sum())
        return model

    def build_optimizer(self, model):
        return Together(model.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline", "zero1", "parameter_server"])
def test_optimizer_of_the_whole_when_only_the_ranks_can_look_then_is_refused(strategy, tmp_path):
    with pytest.raises(WorkerFailed, match="what it does to one parameter depends on the others"):
        train_case(tmp_path, Unplannable(layered=True), strategy, 2, **STEPS)
