"""A model's calls divided over devices: exact for whatever the model does around them, or refused."""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dure.errors import TaskInvalid
from dure.strategies.division.division_check import compare_division
from tests.strategies.device_cases import CPU, TO_ROUNDING, WIDTH, Net, difference, mean_square, rows, trained_weights

# what reads parameters after the forward pass


class Recomputing(Net):
    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = checkpoint(lambda value: torch.tanh(self.second(value)), hidden, use_reentrant=self.reentrant)
        return self.last(hidden)


class RecomputingAgain(Recomputing):
    reentrant = False


class ReadingLater(Net):
    """Model whose own backward reads a weight when it runs."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.first

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
                ctx.save_for_backward(value)
                return value @ weight.t()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
                (value,) = ctx.saved_tensors
                return gradient @ layer.weight, gradient.t() @ value

        return self.last(torch.tanh(Product.apply(x, layer.weight)))


class BackwardHook(Net):
    """Scales gradients by a weight, in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.second.register_full_backward_hook(self.scaled)

    def scaled(self, module: nn.Module, received: Any, given: Any) -> Any:
        return tuple(gradient * self.last.weight.detach().sum() for gradient in received)


class Aliasing(Net):
    """Holds weights in more ways than one."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.second.weight
        self.listed = [self.second.weight, self.last]
        self.named = {"layer": self.first}
        self.owner = [self]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tied(self.owner[0].body(x)) + self.listed[0].mean()
        return self.listed[1](hidden) + self.named["layer"].bias.mean()


class AskingForParameters(Net):
    def forward(self, x: Tensor) -> Tensor:
        assert all(isinstance(parameter, nn.Parameter) for parameter in self.parameters())
        return super().forward(x.to(next(self.parameters()).dtype))


class Overridden(Net):
    """Model whose layers' forward is replaced on the objects, as by libraries that offload or quantise."""

    def __init__(self) -> None:
        super().__init__()
        plain = self.second.forward
        self.second.forward = lambda value: 2 * plain(value)
        self.forward = super().forward


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (3, 2)), nn.LSTM(2, 4, 2, batch_first=True))


def normed() -> nn.Module:
    weights = nn.utils.parametrizations
    return nn.Sequential(weights.weight_norm(nn.Linear(WIDTH, 2)), nn.Tanh(), weights.spectral_norm(nn.Linear(2, 2)))


def normed_by_hooks() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, 2)), nn.utils.spectral_norm(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    "build",
    [
        Recomputing, RecomputingAgain, ReadingLater, BackwardHook, Aliasing, AskingForParameters, Overridden, normed,
        normed_by_hooks,
    ],
)  # fmt: skip
def test_a_model_that_reads_its_weights_anywhere_and_at_any_time_is_exact(build):
    assert difference("dp", build) < TO_ROUNDING


def test_a_recurrent_network_is_exact():
    assert difference("dp", recurrent, lambda: lambda model, x: model(x)[0].square().mean()) < TO_ROUNDING


def test_embeddings_with_sparse_gradients_are_exact():
    def build():
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    tokens = [torch.randint(0, 9, (size, 2), generator=torch.Generator().manual_seed(size)) for size in (5, 4)]
    assert difference("dp", build, batches=tokens, build_optimizer=plain) < TO_ROUNDING


# second derivatives


def input_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out.square().mean() + gradient.square().sum() / len(x)


def weight_penalty(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    gradients = torch.autograd.grad(out.square().mean(), list(model.parameters()), create_graph=True)
    return out.square().mean() + sum(gradient.square().sum() for gradient in gradients)


@pytest.mark.parametrize("penalty", [input_penalty, weight_penalty])
def test_a_penalty_on_gradients_is_exact(penalty):
    assert difference("dp", loss=lambda: penalty) < TO_ROUNDING


def test_hooks_on_gradients_get_the_whole_gradient():
    class Clamped(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    assert difference("dp", Clamped) < TO_ROUNDING


# what is returned


class Returning(Net):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(super().forward(x), x)


@dataclass
class Answer:
    logits: Tensor
    size: int = 0


FORMS = {
    "dataclass": (lambda y, x: Answer(y), lambda out: out.logits),
    "mapping": (lambda y, x: OrderedDict(y=y, none=None), lambda out: out["y"]),
    "equal numbers": (
        lambda y, x: {"y": y, "k": 3, "t": torch.tensor(2.0)},
        lambda out: out["y"] * out["k"] * out["t"],
    ),
    "row by row": (lambda y, x: list(y), torch.stack),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_output_of_any_kind_is_exact(form):
    write, read = FORMS[form]
    assert difference("dp", lambda: Returning(write), lambda: lambda m, x: read(m(x)).square().mean()) < TO_ROUNDING


WRONG_FORMS = {
    "statistic": (lambda y, x: (y, y.mean(0)), rows(5), r"a tensor of shape \(3,\) for 3 samples .* in output\[1\]"),
    "statistic as long as a part": (lambda y, x: (y, y.mean(0)), rows(6), r"something else in output\[1\] for the"),
    "samples second": (lambda y, x: (y, y.t()), rows(5), "a tensor of shape"),
    "samples second, as many": (lambda y, x: (y, y.t()), rows(6), r"something else in output\[1\] for the"),
    "size": (lambda y, x: (y, len(x)), rows(5), r"different values \(3 and 2\)"),
    "size of equal parts": (lambda y, x: (y, len(x)), rows(4), r"something else in output\[1\] for the"),
    "mixed samples": (lambda y, x: (y, y - y.mean(0)), rows(5), r"something else in output\[1\] for the"),
    "unknown class": (
        lambda y, x: (y, torch.distributions.Normal(y, 1.0)), rows(5), r"a Normal, whose class dp does not know",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", WRONG_FORMS)
def test_an_output_that_one_device_would_not_give_is_refused_when_it_is_used(form):
    write, batches, said = WRONG_FORMS[form]

    def unused(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[0].square().mean()

    def used(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x)[0] * getattr(model(x)[1], "mean", 1)).mean()

    assert difference("dp", lambda: Returning(write), lambda: unused, batches) < TO_ROUNDING
    with pytest.raises(TaskInvalid, match=said):
        trained_weights("dp", lambda: Returning(write), used, batches)


def test_a_model_that_mixes_samples_is_refused():
    class Centred(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    with pytest.raises(TaskInvalid, match=r"the model returned something else for the parts of a batch .*: it mixes"):
        trained_weights("dp", Centred, mean_square, rows(5))


def test_a_model_that_freezes_its_parameters_in_forward_is_refused():
    class Freezing(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.last.weight.requires_grad_(False)
            output = super().forward(x)
            self.last.weight.requires_grad_(True)
            return output

    with pytest.raises(TaskInvalid, match="freezes or unfreezes parameters in its forward"):
        trained_weights("dp", Freezing, mean_square, rows(5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_hides_no_mixing_of_samples(dtype):
    class Centred(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    torch.manual_seed(0)
    x = rows(5)[0].to(dtype)

    def wrong_outputs(model: nn.Module) -> set[Any]:
        parts = [((part,), {}) for part in (x[:3], x[3:])]
        return compare_division(model.to(dtype), [CPU, CPU], ((x,), {}), parts, [3, 2]).output.wrong

    assert wrong_outputs(Centred()) == {()}
    assert wrong_outputs(Net()) == set()


def test_dropout_hides_no_mixing_of_samples():
    class Centred(Net):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(super().forward(x - x.mean(0)), 0.5, self.training)

    with pytest.raises(TaskInvalid, match="mixes samples"):
        trained_weights("dp", Centred, mean_square, rows(5))


def test_an_argument_that_is_as_long_as_the_batch_by_accident_is_refused():
    class Weighted(Net):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return super().forward(x) * weight.sum()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x, torch.ones(4, dtype=torch.float64)).square().mean()

    with pytest.raises(TaskInvalid, match="something else for the parts of a batch than for the whole"):
        trained_weights("dp", Weighted, loss, rows(4))
    with pytest.raises(TaskInvalid, match=r"a batch of 5 samples holds a tensor of shape \(4,\)"):
        trained_weights("dp", Weighted, loss, rows(5))


def test_a_size_that_is_given_is_refused():
    class Sized(Net):
        def forward(self, x: Tensor, size: int) -> Tensor:
            return super().forward(x.view(size, -1))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x, len(x)).square().mean()

    with pytest.raises(TaskInvalid, match=r"runs on a batch and not on the part of one device .* or a size is given"):
        trained_weights("dp", Sized, loss, rows(5))


# how the loss uses the model


class Scaled(Net):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Counting:
    """A task, whose loss may keep a count."""

    def __init__(self) -> None:
        self.calls = 0


class SetsAttribute(Counting):
    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        model.scale = 1 / self.calls
        return mean_square(model, x)


class Unfreezes(Counting):
    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        model.first.requires_grad_(self.calls > 1)
        model.second.train(self.calls > 2)
        return mean_square(model, x)


class Clamps(Counting):
    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)
        return mean_square(model, x)


class Teaches(Counting):
    def __init__(self) -> None:
        torch.manual_seed(3)
        self.teacher = Net().double()

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, pupils in zip(self.teacher.parameters(), model.parameters(), strict=True):
                own.lerp_(pupils, 0.1)
        return (model(x) - self.teacher(x).detach()).square().mean()


class Hooks(Counting):
    """Hooks a layer once the model has been trained for a while."""

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        if self.calls == 1:
            model.first.register_forward_hook(lambda module, given, output: 2 * output)
        self.calls += 1
        return mean_square(model, x)


def decayed(model: nn.Module, x: Tensor) -> Tensor:
    return mean_square(model, x) + sum(
        parameter.square().sum() for name, parameter in model.named_parameters() if name.startswith("first.")
    )


def without_gradient(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(-x)
    return (model(x) - target).square().mean()


def of_a_copy(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - copy.deepcopy(model)(-x).detach()).square().mean()


def functional_call(model: nn.Module, x: Tensor) -> Tensor:
    doubled = {name: 2 * parameter for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, doubled, x).square().mean()


def each_by_itself(model: nn.Module, x: Tensor) -> Tensor:
    parameters = dict(model.named_parameters())
    return torch.func.vmap(lambda row: torch.func.functional_call(model, parameters, row))(x).square().mean()


def in_half_precision(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(x.float())
    assert found.dtype == torch.bfloat16  # joined with float32 of another device it would be float32
    return found.square().mean()


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x: model(torch.cat([x, -x])).square().mean(),
        lambda model, x: (model(x) * model(-x)).mean(),
        lambda model, x: model.last(model.body(x)).square().mean(),
        lambda model, x: model.forward(x).square().mean(),
        lambda model, x: mean_square(model, x) * isinstance(model, Net),
        decayed, without_gradient, of_a_copy, functional_call, each_by_itself,
    ],
    ids=["two views", "two calls", "parts", "forward", "class", "decayed", "no_grad", "copy", "functional", "vmap"],
)  # fmt: skip
def test_a_loss_may_use_its_model_in_any_way(loss):
    assert difference("dp", loss=lambda: loss) < TO_ROUNDING


@pytest.mark.parametrize("task", [SetsAttribute, Unfreezes, Clamps, Teaches, Hooks])
@pytest.mark.parametrize("strategy", ["dp", "balanced_dp"])
def test_a_loss_that_changes_the_model_on_the_way_is_exact_or_refused(task, strategy):
    if task is Teaches and strategy == "balanced_dp":
        with pytest.raises(TaskInvalid, match=r"the task's loss changes self\.teacher, which under balanced_dp each"):
            difference(strategy, Scaled, lambda: task().loss)
    else:
        assert difference(strategy, Scaled, lambda: task().loss) < TO_ROUNDING


def test_replicas_compute_in_the_autocast_of_the_loss():
    class Single(nn.Linear):
        def double(self) -> nn.Module:
            return self

    trained_weights("dp", lambda: Single(WIDTH, 2), in_half_precision, rows(4))


class Forces(Net):
    """Differentiates by itself, so that it cannot run without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)[0]


def test_a_model_that_differentiates_by_itself_is_exact():
    assert difference("dp", Forces) < TO_ROUNDING


# what a model keeps


class Keeping(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.body(x)
        self.size = self.hidden.square().mean()
        return self.last(self.hidden)


class KeepingByHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.second.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, given: Any, output: Tensor) -> None:
        self.kept["hidden"] = output


class Counted(Net):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Table(Net):
    """Makes a buffer and a table when it needs them."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", 2 * torch.ones(3, dtype=torch.float64), persistent=False)
            self.table = torch.ones(3, dtype=torch.float64)
        return super().forward(x) * self.scale * self.table


class InPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


def of_kept(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + model.hidden.square().mean()


def of_hooked(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + model.kept["hidden"].square().mean()


def of_changed(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() * x.sum()


@pytest.mark.parametrize(
    ("build", "loss"),
    [
        (Keeping, of_kept), (Keeping, mean_square), (KeepingByHook, of_hooked), (Counted, mean_square),
        (Table, mean_square), (InPlace, of_changed),
    ],
)  # fmt: skip
def test_what_a_model_keeps_for_the_loss_or_changes_in_place_is_that_of_one_device(build, loss):
    assert difference("dp", build, lambda: loss) < TO_ROUNDING


class Averaging(Net):
    mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        shown = found - self.mean
        self.mean = 0.9 * self.mean + 0.1 * float(found.detach().mean())
        return shown


class Carrying(Net):
    hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        shown = hidden if self.hidden is None else hidden + self.hidden[: len(x)]
        self.hidden = hidden.detach()
        return self.last(shown)


class Growing(Net):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(3, 3, dtype=torch.float64)
        return self.late(super().forward(x))


class Leaking(Net):
    """Model whose hook keeps a value where replicas have no copies: in a variable of a function."""

    def __init__(self) -> None:
        super().__init__()
        features: dict[str, Tensor] = {}
        self.second.register_forward_hook(lambda module, given, output: features.update(hidden=output))
        self.features = lambda: features


class NoisyWeights(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.add_(x.mean())
        return super().forward(x)


def of_leaked(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + model.features()["hidden"].square().mean()


@pytest.mark.parametrize(
    ("build", "loss", "said"),
    [
        (Keeping, lambda model, x: model(x).mean() + model.size, "the model keeps a scalar on each device in size: dp"),
        (Averaging, mean_square, "the model keeps different values .* in mean: dp gathers"),
        (Carrying, mean_square, "the model reads hidden of an earlier call, which has the samples of all devices"),
        (Growing, mean_square, "the model adds or replaces modules or parameters while it runs"),
        (Leaking, of_leaked, "a hook of second changes what is outside of the model, which under dp each device"),
        (NoisyWeights, mean_square, r"the model or the loss changes first\.weight in place, to other values on each"),
        (lambda: torch.jit.script(Net()), mean_square, "the model is a TorchScript module"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_what_a_model_keeps_of_its_own_samples_is_refused(build, loss, said):
    with pytest.raises(TaskInvalid, match=said):
        trained_weights("dp", build, loss, rows(5, 4, 4))


def test_the_model_is_left_as_it_was():
    model = Net()
    model.generator = torch.Generator().manual_seed(1)
    before = model.generator.get_state()
    trained_weights("dp", lambda: model, mean_square, rows(4))
    assert "forward" not in vars(model) or vars(model)["forward"] == model.forward
    assert torch.equal(model.generator.get_state(), before)
