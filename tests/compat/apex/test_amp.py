"""`apex.amp`: levels, loss scales and skipped steps, on the CPU."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from dure.compat.apex import amp
from dure.compat.apex.amp.scaling import SCALING
from dure.compat.apex.parallel import LARC


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    for device in ("cpu", "cuda"):
        torch.set_autocast_enabled(device, False)
    SCALING.__init__()  # type: ignore[misc]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.seen = [x.dtype, hidden.dtype, self.norm.weight.dtype]
        out: Tensor = self.last(torch.tanh(self.norm(hidden)))
        return out


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def trained(level: str, steps: int = 20, **settings: Any) -> tuple[Model, list[float], Any]:
    model = Model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **settings)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(X) - 1).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses, optimizer


def plainly_trained() -> list[float]:
    model, losses = Model(), []
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(X) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


HALF, SINGLE = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("level", "weights", "seen", "stepped", "tolerance"),
    [
        ("O0", SINGLE, [SINGLE, SINGLE, SINGLE], SINGLE, 0.0),
        ("O1", SINGLE, [SINGLE, HALF, SINGLE], SINGLE, 2e-2),
        ("O2", HALF, [HALF, HALF, SINGLE], SINGLE, 2e-2),
        ("O3", HALF, [HALF, HALF, HALF], HALF, 5e-2),
    ],
)
def test_level_when_it_is_trained_then_types_are_its_own_and_losses_those_of_float32(
    level: str, weights: torch.dtype, seen: list[torch.dtype], stepped: torch.dtype, tolerance: float
) -> None:
    expected = plainly_trained()
    model, losses, optimizer = trained(level, loss_scale=128.0)
    assert (model.first.weight.dtype, model.seen) == (weights, seen)
    assert {each.dtype for each in amp.master_params(optimizer)} >= {stepped}
    assert losses == pytest.approx(expected, abs=tolerance, rel=tolerance)
    assert model(X).dtype == (HALF if level == "O1" else SINGLE)


def test_step_when_gradients_overflow_then_is_left_out_and_the_scale_is_halved(capsys: Any) -> None:
    model = Model()
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    before = model.first.weight.clone()
    with amp.scale_loss(model(X).sum() * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(model.first.weight, before)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 0}}
    assert "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0" in capsys.readouterr().out
    with amp.scale_loss(0.01 * model(X).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not torch.equal(model.first.weight, before)
    torch.testing.assert_close(next(amp.master_params(optimizer)).half(), model.first.weight)


def test_gradients_when_accumulated_with_delayed_unscaling_then_are_the_sum() -> None:
    model = Model().eval()
    optimizer = SGD(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0)
    for delay in (True, False):
        with amp.scale_loss(model(X).mean(), optimizer, delay_unscale=delay) as scaled:
            scaled.backward()
    own = Model().eval()
    (2 * own(X).mean()).backward()
    torch.testing.assert_close(next(amp.master_params(optimizer)).grad, own.first.weight.grad, rtol=2e-2, atol=2e-3)


def test_scale_when_two_thousand_steps_were_taken_then_grows_to_its_limit() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.0)
    amp.initialize(nn.Linear(1, 1), optimizer, opt_level="O1", max_loss_scale=2.0**17)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 1999}})
    for expected in (2.0**17, 2.0**17):
        with amp.scale_loss(optimizer.param_groups[0]["params"][0].sum(), optimizer) as scaled:
            scaled.backward()
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == expected


def test_casts_when_disabled_then_operations_keep_their_types() -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O1")
    layer = nn.Linear(2, 2)
    with amp.disable_casts():
        assert layer(torch.ones(1, 2)).dtype == SINGLE
    assert layer(torch.ones(1, 2)).dtype == HALF


def test_nothing_when_it_is_not_enabled_then_is_changed() -> None:
    model, losses, _ = trained("O2", enabled=False)
    assert model.first.weight.dtype == SINGLE
    assert losses == plainly_trained()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"opt_level": "02"}, "the levels are O0, O1, O2 and O3"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": "True"}, "no meaning with O1"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, "must be True or False"),
        ({"opt_level": "O1", "master_weights": True}, "no meaning with O1"),
        ({"opt_level": "O1", "cast_model_type": torch.float16}, "no meaning with O1"),
    ],
)
def test_arguments_when_they_do_not_go_together_then_raise_runtime_errors(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        amp.initialize(nn.Linear(1, 1), **settings)


def test_calls_when_they_are_wrong_then_raise_runtime_errors() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.0)
    model = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match=r"before amp\.initialize"), amp.scale_loss(torch.ones(1), optimizer):
        pass
    amp.initialize(model, optimizer, opt_level="O1")
    loss = torch.ones(1, requires_grad=True).sum()
    with pytest.raises(RuntimeError, match="num_losses=1"), amp.scale_loss(loss, optimizer, loss_id=1):
        pass
    other = SGD([nn.Parameter(torch.ones(1))], lr=0.0)
    with pytest.raises(RuntimeError, match="did not get"), amp.scale_loss(loss, other):
        pass
    with pytest.raises(RuntimeError, match="does not support closures"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(RuntimeError, match="before they are wrapped"):
        amp.initialize(nn.DataParallel(model), opt_level="O1")
    with pytest.raises(RuntimeError, match="has 0 loss scalers"):
        amp.load_state_dict({})


def step_of(model: nn.Module, optimizer: Any, times: float = 1.0) -> None:
    with amp.scale_loss(model(X).mean() * times, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@pytest.mark.parametrize("num_steps", [0, 2])
def test_weights_when_loaded_after_initialize_then_are_what_the_optimizer_steps(num_steps: int) -> None:
    model = Model()
    model, optimizer = amp.initialize(model, SGD(model.parameters(), lr=0.0), opt_level="O2", loss_scale=8.0)
    for _ in range(num_steps):
        step_of(model, optimizer)
    model.load_state_dict({name: torch.full_like(value, 3) for name, value in model.state_dict().items()})
    step_of(model, optimizer)
    assert float(model.first.weight.detach().min()) == 3.0


def test_weights_when_sent_by_another_rank_after_initialize_then_are_what_the_optimizer_steps() -> None:
    model = Model()
    model, optimizer = amp.initialize(model, SGD(model.parameters(), lr=0.0), opt_level="O2")
    model.first.weight.data.fill_(3.0)  # as a wrapper for several ranks does
    step_of(model, optimizer)
    assert float(model.first.weight.detach().min()) == 3.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_when_several_losses_are_unscaled_one_by_one_then_are_their_sum(level: str) -> None:
    model = Model().eval()
    optimizer = SGD(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, num_losses=2, loss_scale=64.0)
    amp.load_state_dict({f"loss_scaler{n}": {"loss_scale": 64.0 * (n + 1), "unskipped": 0} for n in (0, 1)})
    for loss_id in (0, 1):
        with amp.scale_loss((loss_id + 1) * model(X).mean(), optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
    plain = Model().eval()
    with amp.disable_casts():
        (3 * plain(X).mean()).backward()
    for one, other in zip(amp.master_params(optimizer), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=2e-2)


def test_optimizer_when_a_scheduler_follows_its_steps_then_steps() -> None:
    model = Model()
    model, optimizer = amp.initialize(model, SGD(model.parameters(), lr=0.5), opt_level="O2")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    before = model.last.bias.detach().clone()
    step_of(model, optimizer, 0.01)
    scheduler.step()
    assert not torch.equal(model.last.bias, before)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_operations_when_a_level_without_casts_follows_then_keep_their_types() -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O1")
    model = amp.initialize(nn.Linear(2, 2), opt_level="O0")
    assert nn.functional.linear(torch.ones(1, 2), model.weight).dtype == SINGLE


def test_model_when_copied_then_its_copy_computes_with_its_own_weights_and_is_saved_in_float32() -> None:
    model = amp.initialize(Model().eval(), opt_level="O2")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other(X).any()
    assert model(X).any()
    assert {value.dtype for value in model.state_dict().values()} == {SINGLE, torch.int64}


def test_gradients_when_a_fixed_scale_overflows_then_the_finite_ones_are_unscaled() -> None:
    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = SGD([one, other], lr=0.0)
    amp.initialize(nn.Linear(1, 1), optimizer, opt_level="O0", loss_scale=4.0)
    with amp.scale_loss(one.sum() * float("inf") + other.sum(), optimizer) as scaled:
        scaled.backward()
    assert float(other.grad) == 1.0  # type: ignore[arg-type]


def test_optimizer_when_it_is_larc_or_gets_a_group_then_is_stepped_as_others_are() -> None:
    model, later = Model(), nn.Linear(2, 2).half()
    optimizer = LARC(SGD(model.parameters(), lr=0.5))
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    optimizer.add_param_group({"params": list(later.parameters())})
    before = model.last.bias.detach().clone()
    step_of(model, optimizer, 0.01)
    assert not torch.equal(model.last.bias, before)
    assert {each.dtype for each in amp.master_params(optimizer)} == {SINGLE}
    with pytest.raises(RuntimeError, match="twice"):
        amp.initialize(Model(), optimizer, opt_level="O2")
