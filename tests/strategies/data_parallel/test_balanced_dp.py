"""The balanced DataParallel: shares by wish or by memory, the loss on the replicas."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint

from dure.comm.groups import Solo
from dure.errors import TaskInvalid
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.data_parallel import device_shares
from dure.strategies.data_parallel.balanced_dp import BalancedDataParallel
from dure.strategies.data_parallel.device_shares import state_tensors_per_parameter
from dure.strategies.table import STRATEGIES
from tests.specs import spec_of
from tests.strategies.contract.test_base import ROWS, prepared, step
from tests.strategies.device_cases import TO_ROUNDING, WIDTH, Net, difference, mean_square, rows, trained_weights

CPU = torch.device("cpu")


def notes_sizes(sizes):
    def loss(model, x):
        sizes.append(len(x))
        return model(x).mean()

    return loss


@pytest.mark.parametrize(
    ("share", "devices", "split"),
    [(0.2, 3, [2, 4, 4]), (0.0, 3, [5, 5]), (1.0, 3, [10]), (0.5, 2, [5, 5]), (0.3, 2, [3, 7]), (0.7, 1, [10])],
)
def test_a_given_share_splits_the_batch_as_stated(share, devices, split):
    sizes = []
    strategy = prepared(
        notes_sizes(sizes), name="balanced_dp", devices=devices, device0_share=share, deterministic=True
    )
    batch = torch.arange(20, dtype=torch.float64).view(10, 2)
    alone = prepared(lambda model, x: model(x).mean())
    assert step(strategy, batch) == step(alone, batch)
    strategy.close()
    assert sizes == split
    torch.testing.assert_close(strategy.model.weight, alone.model.weight)


def prepared_with_memory(monkeypatch, available_bytes, build_optimizer, devices=2, numel=100, **options):
    """Return the fractions of a strategy over one float32 parameter on a machine that has so much memory left."""
    monkeypatch.setattr(device_shares, "total_memory_bytes", lambda: 2000)
    monkeypatch.setattr(device_shares, "available_memory_bytes", lambda: available_bytes)
    strategy = BalancedDataParallel(
        StrategyContext(
            STRATEGIES["balanced_dp"],
            Solo(),
            (CPU,) * devices,
            Precision("fp32", "cpu"),
            spec_of("balanced_dp", **options),
        )
    )
    strategy.prepare(nn.Linear(numel, 1, bias=False), build_optimizer, lambda model, x: model(x).mean())
    strategy.close()
    return strategy.parts.fractions


# per device 1000 bytes are free, and gradients take 400 of them; the first device keeps the optimiser's state too
@pytest.mark.parametrize(
    ("build_optimizer", "left"),
    [
        (lambda m: SGD(m.parameters(), lr=0.1), [600, 600]),
        (lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9), [200, 600]),
        (lambda m: AdamW(m.parameters()), [0, 600]),
    ],
    ids=["no state", "one tensor", "two tensors"],
)
def test_share_by_memory_leaves_room_for_gradients_and_the_optimisers_state(monkeypatch, build_optimizer, left):
    fractions = prepared_with_memory(monkeypatch, 2000, build_optimizer)
    assert fractions == pytest.approx([part / sum(left) for part in left])


def test_share_by_memory_without_any_memory_is_even(monkeypatch):
    fractions = prepared_with_memory(monkeypatch, 3, lambda m: AdamW(m.parameters()), devices=3)
    assert fractions == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("available_bytes", [1000, 1500])
def test_share_by_memory_of_a_deterministic_run_does_not_depend_on_what_others_use(monkeypatch, available_bytes):
    fractions = prepared_with_memory(
        monkeypatch, available_bytes, lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9), deterministic=True
    )
    assert fractions == pytest.approx([1 / 4, 3 / 4])


def test_share_of_one_device_is_all(monkeypatch):
    assert prepared_with_memory(monkeypatch, 2000, lambda m: AdamW(m.parameters()), devices=1) == [1.0]


@pytest.mark.parametrize(
    ("build", "tensors"),
    [
        (lambda p: SGD(p, lr=0.1), 0),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: Adam(p), 2),
        (lambda p: AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.Adagrad(p), 1),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), 2),
        (lambda p: torch.optim.NAdam(p), 2),
        (lambda p: torch.optim.Adafactor(p), 1),
    ],
)
def test_state_of_any_optimiser_is_counted_by_trying_one_like_it(build, tensors):
    parameter = nn.Parameter(torch.zeros(4))
    assert state_tensors_per_parameter(build([parameter])) == tensors


class OnlyMatrices(torch.optim.Optimizer):
    """Takes what Muon takes."""

    def __init__(self, params):
        super().__init__(params, {})
        if any(parameter.dim() != 2 for group in self.param_groups for parameter in group["params"]):
            raise ValueError("matrices only")

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)


class WithoutDefaults(torch.optim.SGD):
    """Takes its parameters in a way of its own, and options that it does not keep."""

    def __init__(self, model, required):
        super().__init__(model, lr=0.1, momentum=required)
        self.defaults = {}


class NeedingClosure(torch.optim.SGD):
    def step(self, closure):
        raise TypeError("a closure is needed")


@pytest.mark.parametrize(
    ("build", "tensors"),
    [
        (OnlyMatrices, 1),
        (torch.optim.Muon, 1),
        (lambda p: WithoutDefaults(p, 0.9), 1),
        (lambda p: NeedingClosure(p, lr=0.1), 2),  # as many as AdamW, for want of knowledge
        (lambda p: Adam([{"params": p}, {"params": [nn.Parameter(torch.zeros(0))]}]), 2),
        (lambda p: SGD([{"params": p[:0], "momentum": 0.9}, {"params": p}], lr=0.1), 0),
    ],
    ids=["matrices", "Muon", "without defaults", "closure", "two groups", "empty group"],
)
def test_state_of_an_optimiser_that_takes_parameters_in_a_way_of_its_own_is_counted_or_assumed(build, tensors):
    optimizer = build([nn.Parameter(torch.zeros(4, 3))])
    assert state_tensors_per_parameter(optimizer) == tensors
    assert not optimizer.state


def test_groups_count_by_their_sizes():
    large, small = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(2))
    optimizer = SGD([{"params": [large], "momentum": 0.9}, {"params": [small]}], lr=0.1)
    assert state_tensors_per_parameter(optimizer) == 6 / 8


def test_a_run_with_muon_is_that_of_one_device():
    def build():
        return nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))

    def muon(model):
        return torch.optim.Muon(model.parameters(), lr=0.01)

    # it computes in bfloat16 whatever the parameters are, and starts from gradients that rounding has touched
    assert difference("balanced_dp", build, build_optimizer=muon) < 1e-3


# what a replica computes with


class Recomputing(Net):
    def forward(self, x):
        return self.last(checkpoint(self.body, x, use_reentrant=False))


def penalty(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out.square().mean() + gradient.square().sum() / len(x)


@pytest.mark.parametrize(("build", "loss"), [(Recomputing, mean_square), (Net, penalty)])
@pytest.mark.parametrize("share", [None, 0.0, 0.3])
def test_recomputation_and_second_derivatives_are_exact(build, loss, share):
    assert difference("balanced_dp", build, lambda: loss, device0_share=share) < TO_ROUNDING


class Keeping(Net):
    """Keeps what the loss reads of the same pass, and counts."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        self.size = self.body(x).square().mean(1)
        return self.last(self.body(x)) / self.calls


class Clamping:
    def __init__(self):
        self.calls = 0
        self.seen = []

    def loss(self, model, x):
        self.calls += 1
        self.seen.append(len(x))
        model.first.requires_grad_(self.calls > 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)
        return (model(x).square().mean(1) + model.size).mean() / self.calls


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_what_loss_and_model_keep_and_change_is_that_of_one_device_whatever_its_share(share):
    assert difference("balanced_dp", Keeping, lambda: Clamping().loss, device0_share=share) < TO_ROUNDING


def wrapped(loss):
    """Wrap a loss twice, as planned faults and decorators do."""

    def outer(model, x, *, scale=1):
        return scale * loss(model, x)

    def outermost(model, x):
        return outer(model, x)

    return outermost


def test_a_loss_inside_other_functions_keeps_what_it_would_on_one_device():
    assert difference("balanced_dp", Keeping, lambda: wrapped(Clamping().loss)) < TO_ROUNDING


def counted(loss):
    calls = 0

    def outer(model, x):
        nonlocal calls
        calls += 1
        return loss(model, x) / calls

    return outer


def test_a_function_around_a_loss_that_counts_is_refused():
    with pytest.raises(TaskInvalid, match="a function around the task's loss changes its variables, which under"):
        trained_weights("balanced_dp", Keeping, counted(Clamping().loss), rows(5, 4, 4))


class Callable:
    """A loss in an object that is no method of the task."""

    def __init__(self, loss):
        self.inner = loss

    def __call__(self, model, x):
        return self.inner(model, x)


def test_a_loss_inside_an_object_that_changes_its_task_is_refused():
    with pytest.raises(
        TaskInvalid, match="the task's loss changes the task, which under balanced_dp each device would"
    ):
        trained_weights("balanced_dp", Net, Callable(Remembering().loss), rows(5, 4, 4))


def test_a_share_of_nothing_leaves_the_statistics_of_the_first_device_that_has_some():
    def build():
        return nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3))

    weights = [
        trained_weights(name, build, mean_square, rows(4), devices=devices, **options)
        for name, devices, options in (("single", 1, {}), ("balanced_dp", 2, {"device0_share": 0.0}))
    ]
    torch.testing.assert_close(weights[1], weights[0])


class Averaging(Net):
    mean = 0.0

    def forward(self, x):
        found = super().forward(x)
        shown = found - self.mean
        self.mean = 0.9 * self.mean + 0.1 * float(found.detach().mean())
        return shown


class Remembering:
    def __init__(self):
        self.last = None

    def loss(self, model, x):
        out = model(x)
        value = out.square().mean() + (0 if self.last is None else (out - self.last).square().mean())
        self.last = out.detach().mean()
        return value


class Teaching:
    def __init__(self):
        self.teacher = Net().double()

    def loss(self, model, x):
        with torch.no_grad():
            self.teacher.last.bias.lerp_(model.last.bias, 0.1)
        return (model(x) - self.teacher(x).detach()).square().mean()


class Leaking(Net):
    def __init__(self):
        super().__init__()
        features = {}
        self.second.register_forward_hook(lambda module, given, output: features.update(hidden=output))


class Hooked(Net):
    def __init__(self):
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


@pytest.mark.parametrize(
    ("build", "loss", "said"),
    [
        (
            Averaging,
            mean_square,
            "the loss or the model keeps different values .* in mean: balanced_dp computes a loss",
        ),
        (
            Net,
            Remembering().loss,
            r"the loss or the model keeps a scalar on each device in self\.last of the task: bal",
        ),
        (Net, Teaching().loss, r"the task's loss changes self\.teacher, which under balanced_dp each device would do"),
        (Leaking, mean_square, "a hook of second changes what is outside of the model, which under balanced_dp each"),
        (Hooked, mean_square, r"first\.weight has a hook on its gradient, which would get the part of one device"),
    ],
)
def test_what_each_device_would_keep_or_change_for_itself_is_refused(build, loss, said):
    with pytest.raises(TaskInvalid, match=said):
        trained_weights("balanced_dp", build, loss, rows(5, 4, 4))


# what a batch is divided by


def test_a_tensor_as_long_as_the_batch_by_accident_is_not_divided():
    def batch(n):
        return {"x": rows(9)[0][:n], "weights": torch.arange(4.0, dtype=torch.float64)}

    def loss(model, given):
        return (model(given["x"]) * given["weights"].sum()).square().mean()

    assert difference("balanced_dp", Net, lambda: loss, [batch(4), batch(5)], example=batch) < TO_ROUNDING


def test_a_loss_that_only_the_whole_batch_has_the_length_for_is_refused():
    lengths = torch.tensor([3, 2, 2, 2])
    padded = torch.zeros(4, 3, WIDTH, dtype=torch.float64)

    def loss(model, given):
        x, lengths = given
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        unpacked = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]
        return (model(unpacked).sum(2) - x.sum(2)).square().mean()

    with pytest.raises(TaskInvalid, match=r"a batch and not for the part of one device \(RuntimeError: The size of"):
        trained_weights("balanced_dp", Net, loss, [(padded, lengths)])


def test_a_loss_that_fails_on_the_whole_batch_too_ends_in_its_own_error():
    def loss(model, given):
        raise ZeroDivisionError("no such weight")

    with pytest.raises(ZeroDivisionError, match="no such weight"):
        trained_weights("balanced_dp", Net, loss, rows(4))


def test_a_number_that_is_made_of_the_samples_is_refused():
    def batch(n):
        return {"x": rows(9)[0][:n], "count": n}

    def loss(model, given):
        return model(given["x"]).square().sum() / given["count"]

    with pytest.raises(
        TaskInvalid, match=r"batch\['count'\], a int, changes with the samples of a batch and has no row"
    ):
        trained_weights("balanced_dp", Net, loss, [batch(4)], example=batch)


def test_a_collate_of_one_size_alone_leaves_a_batch_to_show_what_it_is():
    def of_one_size(n):
        raise ValueError("four samples")

    assert difference("balanced_dp", batches=rows(4, 4), example=of_one_size) < TO_ROUNDING


def test_microbatches_are_bounded_by_the_largest_share():
    strategy = prepared(lambda model, x: model(x).mean(), name="balanced_dp", devices=2, device0_share=0.2)
    assert strategy.parts.process_size(8) == 10
    assert strategy.parts.device_size(10) == 8
    strategy.close()


def test_a_replica_whose_parameter_is_unused_gives_no_gradient():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.always = nn.Linear(2, 1, dtype=torch.float64)
            self.rare = nn.Linear(2, 1, dtype=torch.float64)

        def forward(self, x):
            return self.always(x) + (self.rare(x) if bool((x[:, 0] > 5).any()) else 0)

    torch.manual_seed(0)
    one = prepared(lambda model, x: model(x).mean(), model=Sometimes())
    torch.manual_seed(0)
    two = prepared(lambda m, x: m(x).mean(), model=Sometimes(), name="balanced_dp", devices=2, device0_share=0.5)
    batch = ROWS[:2]  # no row uses the rare layer
    step(one, batch)
    step(two, batch)
    two.close()
    for ours, theirs in zip(two.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
