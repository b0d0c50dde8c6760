"""Wrappers over ranks: changes after wrapping, copies, ends, and models that differ."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dure.comm.groups import ProcessGroup
from dure.errors import TaskInvalid
from dure.parallel import ParameterServerDDP, RingDDP
from tests.comm.gloo_ranks import on_ranks

X = torch.arange(8.0).view(2, 4) / 8


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def said(num_ranks: int, work: Callable[[ProcessGroup], Any]) -> list[str]:
    """Return the message with which each rank is refused."""

    def refused(group: ProcessGroup) -> str:
        with pytest.raises(TaskInvalid, match=r"\S") as error:
            work(group)
        return str(error.value)

    return [str(answer) for answer in on_ranks(num_ranks, refused)]


def unfreeze(model: nn.Sequential) -> None:
    model[0].bias.requires_grad_(True)


def add(model: nn.Sequential) -> None:
    model[2] = nn.Linear(3, 2)


@pytest.mark.parametrize("change", [unfreeze, add, lambda model: model.double()])
def test_parameter_when_trained_after_wrapping_then_is_refused(change: Any) -> None:
    def work(group: ProcessGroup) -> None:
        model = net()
        model[0].bias.requires_grad_(False)
        wrapped = RingDDP(model)
        change(model)
        wrapped(X)

    for message in said(1, work):
        assert "after the model was wrapped" in message


@pytest.mark.parametrize("wrap", [RingDDP, ParameterServerDDP])
@pytest.mark.parametrize(
    "build",
    [
        lambda rank: nn.Linear(4, 3 + rank),
        lambda rank: nn.Sequential(*[nn.Linear(4, 4) for _ in range(1 + rank)]),
        lambda rank: net().requires_grad_(False).append(nn.Linear(2, 2)) if rank else net().append(nn.Linear(2, 2)),
    ],
)
def test_model_when_another_on_a_rank_then_is_refused_before_anything_is_sent(wrap: Any, build: Any) -> None:
    for message in said(2, lambda group: wrap(build(group.rank))):
        assert "needs the same model on all ranks" in message or "is a parameter" in message, message


def test_model_when_lazy_then_is_refused() -> None:
    assert "call the lazy model" in said(1, lambda group: RingDDP(nn.LazyLinear(2)))[0]


class Functional(nn.Module):
    """Model with a sparse gradient that no attribute tells."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return functional.embedding(x, self.weight, sparse=True)


def second_sum(wrapped: RingDDP) -> None:
    first = wrapped(X).sum()
    second = wrapped(X).sum()
    first.backward()
    second.backward()


@pytest.mark.parametrize(
    ("build", "options", "use", "message"),
    [
        (Functional, {}, lambda wrapped: wrapped(torch.tensor([0])).sum().backward(), "sparse"),
        (net, {}, lambda wrapped: wrapped(X).sum().backward(create_graph=True), "create_graph"),
        (net, {"gradient_average": False}, second_sum, "use_reentrant=False"),
    ],
)
def test_backward_when_it_cannot_be_reduced_then_is_refused(build: Any, options: Any, use: Any, message: str) -> None:
    assert message in said(1, lambda group: use(RingDDP(build(), **options)))[0]


class Checkpointed(nn.Sequential):
    """Model of which every layer is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def test_backward_when_in_backward_and_sums_are_not_divided_then_is_refused() -> None:
    model = Checkpointed(nn.Linear(4, 4), nn.Linear(4, 2))
    wrap = {"gradient_average": False, "delay_allreduce": True}
    use = lambda group: RingDDP(model, **wrap)(X.clone().requires_grad_()).sum().backward()  # type: ignore[arg-type] # noqa: E731
    assert "use_reentrant=False" in said(1, use)[0]


def test_gradient_when_set_by_the_user_and_not_reached_then_takes_part() -> None:
    def work(group: ProcessGroup) -> float:
        model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
        model[1].weight.grad = torch.full((1, 1), 2.0 * group.rank)
        RingDDP(model)
        model[0](torch.ones(1, 1)).sum().backward()
        return float(model[1].weight.grad)

    assert on_ranks(2, work) == [1.0, 1.0]


@pytest.mark.parametrize("wrap", [RingDDP, ParameterServerDDP])
def test_backward_when_the_one_before_failed_without_a_call_between_then_is_averaged(wrap: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        model[0].weight.data.fill_(1.0)
        wrapped = wrap(model)
        if getattr(wrapped, "is_server", False):
            return wrapped.serve()
        first, second = wrapped(torch.ones(1, 1)), wrapped(torch.full((1, 1), float(group.rank)))
        hook = model[0].weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError, match="zero"):
            first.sum().backward()
        hook.remove()
        model.zero_grad()
        second.sum().backward()
        wrapped.close()
        return float(model[1].weight.grad)

    assert on_ranks(2 + (wrap is ParameterServerDDP), work)[:2] == [0.5, 0.5]


@pytest.mark.parametrize("wrap", [RingDDP, ParameterServerDDP])
def test_wrapper_when_copied_or_saved_then_is_called_and_not_trained(wrap: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        wrapped = wrap(net())
        if getattr(wrapped, "is_server", False):
            return wrapped.serve()
        wrapped.eval()
        file = io.BytesIO()
        torch.save(wrapped, file)
        file.seek(0)
        average = torch.optim.swa_utils.AveragedModel(wrapped)
        average.update_parameters(wrapped)
        for other in (copy.deepcopy(wrapped), torch.load(file, weights_only=False), average):
            torch.testing.assert_close(other(X), wrapped(X))
            assert other.state_dict()
            with pytest.raises(TaskInvalid, match="can be called but not trained"):
                other(X).sum().backward()
        return wrapped.close()

    assert on_ranks(2, work) == [None, None]


@pytest.mark.parametrize("wrap", [RingDDP, ParameterServerDDP])
def test_wrapper_when_closed_then_is_called_and_not_trained(wrap: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        wrapped = wrap(net())
        if getattr(wrapped, "is_server", False):
            wrapped.serve()
            with pytest.raises(TaskInvalid, match="has ended"):
                wrapped.serve()
            return
        wrapped(X).sum().backward()
        wrapped.close()
        wrapped.close()
        with torch.no_grad():
            wrapped(X)
        wrapped.module(X).sum().backward()  # of this rank alone
        with pytest.raises(TaskInvalid, match="is closed"):
            wrapped(X)

    assert on_ranks(2, work) == [None, None]


def test_buffers_when_backward_has_ended_then_are_the_same_for_an_evaluation() -> None:
    def work(group: ProcessGroup) -> list[float]:
        model = net()
        wrapped = RingDDP(model)
        wrapped(X + group.rank).sum().backward()
        return model[1].running_mean.tolist()

    one, other = on_ranks(2, work)
    assert one == other


def test_buffers_when_not_sent_then_stay_those_of_each_rank() -> None:
    def work(group: ProcessGroup) -> float:
        model = net()
        model[1].running_mean.fill_(group.rank)
        RingDDP(model, broadcast_buffers=False)
        return float(model[1].running_mean[0])

    assert on_ranks(2, work) == [0.0, 1.0]


@pytest.mark.parametrize("wrap", [RingDDP, ParameterServerDDP])
def test_gradients_when_their_sum_is_no_half_then_their_mean_is(wrap: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        model = nn.Linear(1, 1, bias=False).half()
        wrapped = wrap(model)
        if getattr(wrapped, "is_server", False):
            return wrapped.serve()
        (wrapped(torch.ones(1, 1).half()) * 40000).sum().backward()
        wrapped.close()
        return float(model.weight.grad)

    assert on_ranks(2 + (wrap is ParameterServerDDP), work)[:2] == [40000.0, 40000.0]
