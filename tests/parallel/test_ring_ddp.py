"""The module that averages gradients in a loop written by hand, compared with a mean computed plainly."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from dure.comm.groups import ProcessGroup
from dure.errors import EnvironmentLacks, TaskInvalid
from dure.parallel import RingDDP
from tests.comm.gloo_ranks import on_ranks

STEPS = 3


class Model(nn.Module):
    """Model with a layer for some ranks only, one that none uses, a frozen one and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.some, self.unused, self.frozen = nn.Linear(6, 6), nn.Linear(2, 2), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.zeros(1))
        self.to(dtype)

    def forward(self, x: Tensor, *, has_some: bool = False) -> Tensor:
        hidden = self.frozen(torch.tanh(self.first(x)))
        if has_some:
            hidden = hidden + self.some(hidden)
        out: Tensor = self.last(hidden) + self.shift
        return out


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64).to(dtype)


def loss_of(model: Any, rank: int, step: int, dtype: torch.dtype) -> Tensor:
    value: Tensor = model(batch(rank, step, dtype), has_some=rank == 1 and step > 0).square().mean()
    return value


def expected(num_ranks: int, dtype: torch.dtype, num_backwards: int, divisor: float) -> list[dict[str, Any]]:
    """Return gradients of each step, as the means of the ranks' own."""
    torch.manual_seed(0)
    model = Model(dtype)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(STEPS):
        sums: dict[str, Any] = {}
        for rank in range(num_ranks):
            optimizer.zero_grad()
            for number in range(num_backwards):
                loss_of(model, rank, step + 10 * number, dtype).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums.get(name, 0) + parameter.grad.clone()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name] / divisor if name in sums else None
        found.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return found


def trained(group: ProcessGroup, dtype: torch.dtype, num_backwards: int, **options: Any) -> list[dict[str, Any]]:
    torch.manual_seed(group.rank)  # rank 0's weights are sent to all
    wrapped = RingDDP(Model(dtype), **options)
    optimizer = SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step != 1)
        with wrapped.no_sync():
            for number in range(num_backwards - 1):
                loss_of(wrapped, group.rank, step + 10 * number, dtype).backward()
        loss_of(wrapped, group.rank, step + 10 * (num_backwards - 1), dtype).backward()
        found.append({n: None if p.grad is None else p.grad.clone() for n, p in wrapped.module.named_parameters()})
        optimizer.step()
    wrapped.close()
    return found


@pytest.mark.parametrize(
    ("num_ranks", "num_backwards", "options", "divisor"),
    [
        (2, 1, {}, 2),
        (2, 1, {"message_size": 8}, 2),
        (3, 2, {"message_size": 8, "comm": "ring"}, 3),
        (2, 2, {"delay_allreduce": True}, 2),
        (2, 1, {"gradient_average": False}, 1),
        (2, 1, {"gradient_predivide_factor": 4.0, "message_size": 20}, 2),
    ],
)
def test_gradients_when_backward_has_ended_then_are_the_means_of_the_ranks(
    num_ranks: int, num_backwards: int, options: dict[str, Any], divisor: float
) -> None:
    torch.manual_seed(0)
    right = expected(num_ranks, torch.float64, num_backwards, divisor)
    found = on_ranks(num_ranks, lambda group: trained(group, torch.float64, num_backwards, **options))
    for gradients in found:
        assert not isinstance(gradients, Exception), gradients
        for one, other in zip(gradients, right, strict=True):
            for name, gradient in other.items():
                if gradient is None:
                    assert one[name] is None or not one[name].any(), name  # zeroed gradients stay zero
                else:
                    torch.testing.assert_close(one[name], gradient, rtol=0, atol=1e-14)


def test_gradients_when_halves_are_sent_wide_then_are_nearer_to_the_mean() -> None:
    right = expected(3, torch.float64, 1, 3)[0]["first.weight"]

    def difference(group: ProcessGroup) -> list[float]:
        found = [
            trained(group, torch.bfloat16, 1, allreduce_always_fp32=is_wide)[0]["first.weight"] for is_wide in (0, 1)
        ]
        return [float((each.double() - right).norm() / right.norm()) for each in found]

    for narrow, wide in on_ranks(3, difference):
        assert wide <= narrow < 0.05


def test_buffers_when_the_model_is_called_in_training_then_are_those_of_rank_0() -> None:
    def shifts(group: ProcessGroup) -> list[float]:
        wrapped = RingDDP(Model())
        wrapped.module.shift.fill_(group.rank + 1.0)
        wrapped.eval()
        wrapped(batch(0, 0))
        before = float(wrapped.module.shift)
        wrapped.train()
        wrapped(batch(0, 0))
        wrapped.close()
        return [before, float(wrapped.module.shift)]

    assert on_ranks(2, shifts) == [[1.0, 1.0], [2.0, 1.0]]


def test_step_when_a_backward_failed_before_then_goes_on() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            raise RuntimeError("not this time")

    def gradient(group: ProcessGroup) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
        wrapped = RingDDP(model, message_size=1)
        x = torch.ones(2, 3, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="not this time"):
            model[1](Fails.apply(model[0](x))).sum().backward()
        model.zero_grad()
        wrapped(x * (group.rank + 1)).sum().backward()
        wrapped.close()
        return model[1].weight.grad

    one, other = on_ranks(2, gradient)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_backward_when_it_reaches_a_parameter_twice_after_sending_it_then_is_refused() -> None:
    def work(group: ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
        wrapped = RingDDP(model, message_size=1)

        def again(gradient: Tensor) -> None:
            with torch.enable_grad():
                model[2](torch.ones(2, 3)).sum().backward()

        def run_twice(module: nn.Module, inputs: Any, output: Tensor) -> None:
            output.register_hook(again)  # by then the gradients of the last layer have been sent

        model[1].register_forward_hook(run_twice)
        try:
            wrapped(torch.ones(2, 3)).sum().backward()
        finally:
            wrapped.close()

    for error in on_ranks(2, work):
        assert isinstance(error, TaskInvalid)
        assert "got a second gradient after its bucket had been sent" in str(error)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(2, 2).requires_grad_(False), "no parameter of the model requires a gradient"),
        (nn.Embedding(3, 2, sparse=True), "gives sparse gradients"),
        (
            nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")]),
            "on one device, and this one is on cpu, meta",
        ),
    ],
)
def test_model_when_it_does_not_go_then_is_refused_in_a_sentence(model: nn.Module, said: str) -> None:
    def work(group: ProcessGroup) -> None:
        RingDDP(model)

    for error in on_ranks(1, work):
        assert isinstance(error, TaskInvalid)
        assert said in str(error)


def test_module_when_there_is_no_process_group_then_says_what_to_call() -> None:
    with pytest.raises(EnvironmentLacks, match=r"call torch\.distributed.init_process_group first"):
        RingDDP(nn.Linear(2, 2))
