"""Rehearsals of schedules and evaluations that do more than answer: asking them beforehand changes nothing."""

import copy
import json
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dure
from dure.errors import WorkerFailed
from dure.training.session.sample_order import SampleOrder
from tests.conformance.cases import largest_difference, records_of, train_case, weights_of
from tests.conformance.tasks import WIDTH, Regression, layered_model


class Frozen(Regression):
    """Begins with its first layer frozen."""

    def build_model(self):
        self.model = super().build_model()
        next(self.model.parameters()).requires_grad_(False)
        return self.model


class Late(Frozen):
    """Unfreezes it when nothing is left to train."""

    def build_schedule(self, optimizer, total_samples):
        def factor(seen):
            if seen >= total_samples:
                next(self.model.parameters()).requires_grad_(True)
            return 1.0

        return factor


class Resetting(Frozen):
    """Draws its last weights anew at the end."""

    def build_schedule(self, optimizer, total_samples):
        def factor(seen):
            if seen >= total_samples:
                nn.init.normal_([*self.model.parameters()][-1])
            return 1.0

        return factor


class Falling(Regression):
    """Remembers in a closure how far it was."""

    def build_schedule(self, optimizer, total_samples):
        furthest = 0

        def factor(seen):
            nonlocal furthest
            furthest = max(furthest, seen)
            return 1.0 - 0.9 * furthest / total_samples

        return factor


class ByHand(Falling):
    """The same without a memory."""

    def build_schedule(self, optimizer, total_samples):
        return lambda seen: 1.0 - 0.9 * seen / total_samples


class Plain(Frozen):
    """Frozen as the one that resets, with a schedule that does nothing."""

    def build_schedule(self, optimizer, total_samples):
        return None


STEPS = {"global_batch_size": 8, "epochs": 2}


@pytest.mark.parametrize(("task", "same"), [(Resetting, Plain), (Falling, ByHand)])
def test_schedule_that_changes_things_at_the_end_changes_nothing_when_it_is_asked(task, same, tmp_path):
    one, other = (weights_of(train_case(tmp_path, kind(), **STEPS)) for kind in (task, same))
    assert largest_difference(one, other) == 0


def test_schedule_that_unfreezes_at_the_end_trains_nothing_before(tmp_path):
    weights = weights_of(train_case(tmp_path, Late(), **STEPS))
    plain = weights_of(train_case(tmp_path, Plain(), **STEPS))
    assert largest_difference(weights, plain) == 0


class Limited(dure.Task):
    """An embedding that torch limits in every forward, in an evaluation too."""

    def train_data(self):
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randint(0, 50, (40, 3), generator=generator), torch.zeros(40, 2))

    def eval_data(self):
        return TensorDataset(torch.arange(48).reshape(16, 3), torch.zeros(16, 2))

    def build_model(self):
        return nn.Sequential(nn.Embedding(50, 4, max_norm=0.5), nn.Flatten(), nn.Linear(12, 2))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(self, model, batch):
        outputs = model(batch[0])
        return (model[0].weight.detach().norm(dim=1) > 0.6).sum() + 0 * (outputs - batch[1]).square().mean()


def test_evaluation_that_limits_embeddings_is_declared_and_its_rehearsal_leaves_no_trace(tmp_path):
    run = train_case(tmp_path, Limited, global_batch_size=4, samples=4, seed=3)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert [text.partition(":")[0] for text in declared] == ["weights"]
    # the step has looked up at most 12 rows, and the rehearsal 24 others or the same
    assert records_of(run)[0]["loss_sum"] / 4 > 30


class Averaging(torch.optim.SGD):
    """Has other weights for evaluations, as schedule-free optimisers do."""

    def eval(self):
        self._scale(0.5)

    def train(self):
        self._scale(2.0)

    def _scale(self, factor):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(factor)


class ScheduleFree(Regression):
    """Evaluates with an optimiser's other weights."""

    def build_optimizer(self, model):
        self.optimiser = Averaging(model.parameters(), lr=0.1)
        return self.optimiser

    def loss(self, model, batch):
        if not model.training:
            self.optimiser.eval()
        return super().loss(model, batch)


def test_optimiser_when_it_has_other_weights_for_evaluations_then_what_to_do_instead_is_said(tmp_path):
    with pytest.raises(WorkerFailed, match=r"Averaging changes .* for an evaluation .*AveragedModel") as error:
        train_case(tmp_path, ScheduleFree(), samples=44)
    assert error.value.exit_code == 2


class UsesState(Regression):
    """Has a schedule that clears, scales or reads the optimiser's momentum on the way."""

    use: str = "reads"

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def build_schedule(self, optimizer, total_samples):
        def factor(seen):
            found = [
                each["momentum_buffer"] for each in optimizer.state.values() if each.get("momentum_buffer") is not None
            ]
            if not 7 < seen < 40 or not found:
                return 1.0
            if self.use == "clears":
                optimizer.state.clear()
            elif self.use == "scales":
                for buffer in found:
                    assert buffer.shape == buffer.size()
                    buffer.mul_(0.5)
                    buffer /= 2
                    torch.zeros_like(buffer)
                torch._foreach_mul_(found, 0.5)
            else:
                return 1 / (1 + sum(float(buffer.abs().sum()) for buffer in found))
            return 1.0

        return factor


STATE = {"global_batch_size": 7, "samples": 70, "seed": 4}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "parameter_server"])
def test_schedule_that_reads_the_optimizers_state_is_refused_where_ranks_have_parts_of_it(strategy, tmp_path):
    with pytest.raises(
        WorkerFailed, match="schedule uses values of the optimiser's state, of which a rank of"
    ) as caught:
        train_case(tmp_path, UsesState(), strategy, 4 if strategy == "parameter_server" else 2, **STATE)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("use", "strategy"), [("clears", "zero1"), ("scales", "zero1"), ("scales", "fsdp")])
def test_schedule_that_clears_or_scales_the_optimizers_state_does_it_everywhere(use, strategy, tmp_path):
    one, run = [
        weights_of(train_case(tmp_path, UsesState(use=use), name, n, **STATE))
        for name, n in (("single", 1), (strategy, 2))
    ]
    assert largest_difference(run, one) < 1e-10


class WarmUpTo(Regression):
    """Has a schedule in absolute learning rates, which it divides by the optimiser's own."""

    def build_schedule(self, optimizer, total_samples):
        own = optimizer.param_groups[0]["lr"]
        return lambda seen: min(0.1, 0.01 * (1 + seen / 7)) / own


def test_schedule_that_reads_the_learning_rate_when_it_is_built_is_declared_by_no_resume(tmp_path):
    run = train_case(tmp_path, WarmUpTo(), "ddp", 2, **(STATE | {"samples": 35}))
    dure.train(WarmUpTo(), resume=run, samples=70, quiet=True, start="fork")
    assert json.loads((run / "summary.json").read_text())["not_preserved"] == []
    one = weights_of(train_case(tmp_path, WarmUpTo(), **STATE))
    assert largest_difference(weights_of(run), one) < 1e-10


EVALUATED = {"global_batch_size": 7, "samples": 28, "eval_every_epochs": 1}


class Rebinding(Regression):
    """Metrics give the parameters other memory with the same values."""

    def metrics(self, model, batch):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return super().metrics(model, batch)


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_metrics_that_give_weights_other_memory_are_refused_where_a_strategy_keeps_theirs(strategy, tmp_path):
    with pytest.raises(WorkerFailed, match=r"metrics change .* in an evaluation"):
        train_case(tmp_path, Rebinding(), strategy, 2, **EVALUATED)


class ActNorm(nn.Module):
    """A scale and shift that are set from the samples of the first call of all (Glow)."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("is_set", torch.zeros((), dtype=torch.uint8))

    def forward(self, x):
        if not self.is_set:
            self.shift.data.copy_(-x.mean((0, 1)))
            self.is_set.fill_(1)
        return x + self.shift


class SetByFirstCall(Regression):
    def build_model(self):
        torch.manual_seed(4)
        return nn.Sequential(ActNorm(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64))


def test_model_that_its_first_call_sets_is_set_by_training_and_not_by_the_rehearsal(tmp_path):
    task, settings = SetByFirstCall(), {"global_batch_size": 8, "samples": 16, "seed": 3}
    run = train_case(tmp_path, task, **settings)
    shift = weights_of(run)["0.shift"]
    assert json.loads((run / "summary.json").read_text())["not_preserved"] == []
    order = SampleOrder(len(task.train_data()), 8, seed=3)
    first = torch.stack([task.train_data()[int(place)][0] for place in order.permutation(0)[:8]])
    assert float((shift + first.mean((0, 1))).abs().max()) < 0.2  # two steps of training are small


class Following(Regression):
    """A teacher that the loss sets to the student after it has computed, in training alone or in evaluations too."""

    in_evaluations: bool = False

    def build_model(self):
        torch.manual_seed(4)
        model = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        model.teacher = copy.deepcopy(model).requires_grad_(False)
        return model

    def loss(self, model, batch):
        x, y, *_ = batch
        loss = (model(x) - y).square().mean() + (model(x) - model.teacher(x)).square().mean()
        if model.training:
            leaf = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
            loss = loss + gradient.square().mean()
        if model.training or self.in_evaluations:
            for own, other in zip(model.teacher.parameters(), [model.weight, model.bias], strict=True):
                own.data.copy_(other)
        return loss


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_teacher_that_training_alone_moves_trains_with_what_needs_gradients(strategy, tmp_path):
    train_case(tmp_path, Following(), strategy, 2 if strategy == "ddp" else 1, global_batch_size=8, samples=16)


class FollowingWithDropout(Following):
    evaluates: bool = True

    def eval_data(self):
        return super().eval_data() if self.evaluates else None

    def loss(self, model, batch):
        x, *rest = batch
        return super().loss(model, (nn.functional.dropout(x, 0.5, model.training), *rest))


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_rehearsal_after_a_first_call_changes_no_draw_of_training(strategy, tmp_path):
    settings = {"nproc": 2 if strategy == "ddp" else 1, "global_batch_size": 8, "samples": 16}
    one, other = (train_case(tmp_path, FollowingWithDropout(evaluates=e), strategy, **settings) for e in (True, False))
    assert largest_difference(weights_of(one), weights_of(other)) == 0.0


def test_teacher_that_evaluations_move_too_is_refused_although_they_write_what_training_wrote(tmp_path):
    with pytest.raises(WorkerFailed, match=r"metrics change teacher\.weight, .* in an evaluation"):
        train_case(tmp_path, Following(in_evaluations=True), "ddp", 2, global_batch_size=8, samples=16)


class CopyingModel(nn.Module):
    """Makes a copy of its layers in the first evaluation."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        if not self.training and not hasattr(self, "copied"):
            self.copied = copy.deepcopy(self.inner)
        return self.inner(x)


class Copying(Regression):
    def build_model(self):
        return CopyingModel(super().build_model())


def test_evaluation_that_gives_the_model_further_layers_is_refused(tmp_path):
    with pytest.raises(WorkerFailed, match=r"metrics change copied\..* in an evaluation"):
        train_case(tmp_path, Copying(), **EVALUATED)


@pytest.mark.slow
def test_metrics_that_give_weights_other_memory_change_nothing_elsewhere(tmp_path):
    runs = [train_case(tmp_path, task, "ddp", 2, **EVALUATED) for task in (Regression(), Rebinding())]
    assert largest_difference(*map(weights_of, runs)) == 0


class Shift(nn.Module):
    """Keeps the mean of what it sees in evaluations, always as another tensor, and subtracts it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

    def forward(self, x):
        if not self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x - self.mean


class Shifted(Regression):
    def build_model(self):
        layers = layered_model(torch.float64, 0.0)
        return nn.Sequential(layers[:2], Shift(), layers[2:])


def test_buffer_that_an_evaluation_replaces_is_as_before_when_training_begins(tmp_path):
    losses = [
        records_of(train_case(tmp_path, task, **STEPS))[0]["loss_sum"] for task in (Shifted(), Regression(layered=True))
    ]
    assert losses[0] == losses[1]


def test_buffer_that_an_evaluation_replaces_is_declared_where_ranks_evaluate_their_own_batches(tmp_path):
    run = train_case(tmp_path, Shifted(), "ddp", 2, **STEPS)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert any("state that the evaluation keeps (1.mean)" in text for text in declared)


class Robust(Regression):
    """Evaluates with noise from a generator of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.noise = torch.Generator().manual_seed(2)

    def metrics(self, model, batch):
        x, y, *_ = batch
        noise = torch.randn(x.shape, generator=self.noise, dtype=x.dtype)
        return {"robust": dure.Sum((model(x + noise) - y).square().sum(), len(x))}


@pytest.mark.parametrize(("strategy", "is_declared"), [("ddp", True), ("pipeline", False)])
def test_draws_of_evaluations_from_own_generators_are_declared_where_they_are_divided(strategy, is_declared, tmp_path):
    run = train_case(tmp_path, Robust(layered=True), strategy, 2, **STEPS)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert any("that they draw from task.noise" in text for text in declared) == is_declared


class KeepsLater(Regression):
    """Metrics keep an error once the model is trained, which is after the rehearsal."""

    kept = 0.0

    def build_model(self):
        model = super().build_model()
        self.first = sum(parameter.detach().sum().item() for parameter in model.parameters())
        return model

    def metrics(self, model, batch):
        if sum(parameter.detach().sum().item() for parameter in model.parameters()) != self.first:
            self.kept = float((model(batch[0]) - batch[1]).abs().max())
        return super().metrics(model, batch)


@pytest.mark.parametrize(("strategy", "is_declared"), [("ddp", True), ("single", False)])
def test_state_that_evaluations_begin_to_keep_later_is_declared_where_they_are_divided(strategy, is_declared, tmp_path):
    run = train_case(tmp_path, KeepsLater(), strategy, 1 + is_declared, eval_every_epochs=0.5, **STEPS)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert any("state that the evaluation keeps (task.kept)" in text for text in declared) == is_declared


class SetsVariable(Regression):
    """Metrics set an environment variable that the loss reads."""

    def loss(self, model, batch):
        return super().loss(model, batch) * float(os.environ.get("FACTOR_OF_TEST", "1"))

    def metrics(self, model, batch):
        os.environ["FACTOR_OF_TEST"] = "2"
        return super().metrics(model, batch)


@pytest.mark.slow
def test_variable_that_metrics_set_is_declared_and_unset_when_training_begins(tmp_path):
    run = train_case(tmp_path, SetsVariable(), "ddp", 2, **STEPS)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert any("os.environ['FACTOR_OF_TEST']" in text for text in declared)
    plain = train_case(tmp_path, Regression(), "ddp", 2, **STEPS)
    assert records_of(run)[0]["loss_sum"] == records_of(plain)[0]["loss_sum"]


class SlowToEvaluate(Regression):
    def metrics(self, model, batch):
        time.sleep(0.1)
        return {}


def test_rehearsal_is_no_part_of_the_time_of_the_first_epoch(tmp_path):
    run = Path(dure.train(SlowToEvaluate(), start="inline", threads=1, epochs=1, quiet=True, runs_dir=tmp_path).run)
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    evaluated = next(event for event in events if event["event"] == "evaluated")
    assert evaluated["seconds"] > 0.1
    assert evaluated["seconds_since_last"] < evaluated["seconds"] + 0.1


class ShortOfMemory(Regression):
    """Has memory for three samples at once in an evaluation."""

    def metrics(self, model, batch):
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("no memory for so many")
        return super().metrics(model, batch)


def test_evaluation_in_small_batches_is_rehearsed_in_small_batches(tmp_path):
    train_case(tmp_path, ShortOfMemory(), eval_batch_size=3, samples=20, global_batch_size=10)
    with pytest.raises(WorkerFailed, match="no memory for so many"):
        train_case(tmp_path, ShortOfMemory(), eval_batch_size=4, samples=20, global_batch_size=10)


class HoldsModel(Regression):
    """Keeps the model in a list."""

    def build_model(self):
        self.models = [super().build_model()]
        return self.models[0]


def test_task_that_holds_a_divided_model_is_trained_where_one_rank_compares_what_loader_processes_read(tmp_path):
    settings = STATE | {"num_workers": 1}
    run = weights_of(train_case(tmp_path, HoldsModel(), "fsdp", 2, **settings))
    assert largest_difference(run, weights_of(train_case(tmp_path, HoldsModel(), **settings))) < 1e-10
