"""Wrappers for loops written by hand, on simulated devices."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from dure.errors import EnvironmentLacks
from dure.parallel import BalancedDataParallel, DataParallelCriterion, ParameterServerDDP, RingDDP
from tests.simulated_cuda.devices import on_devices
from tests.simulated_cuda.test_collectives import TO_ROUNDING, on_two_ranks

pytestmark = pytest.mark.simulated

STEPS = 3


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (8,), generator=generator)


def trained(model: nn.Module, criterion: Any, device: str, share: slice = slice(None)) -> Tensor:
    """Return the weights after some steps, on the CPU."""
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        criterion(model(x[share].to(device)), y[share].to(device)).backward()
        optimizer.step()
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


def expected() -> Tensor:
    return trained(model_of(), nn.CrossEntropyLoss(), "cpu")


@on_devices(2)
def test_batch_when_divided_over_devices_then_weights_are_those_of_one(folder: Path) -> None:
    for share in (0.25, 0.0, None):
        model = BalancedDataParallel(model_of().to("cuda:0"), device0_share=share, gathers=False)
        assert [device.index for device in model.devices] == [0, 1]
        outputs = model(data(0)[0].to("cuda:0"))
        assert [output.device for output in outputs.outputs] == list(outputs.devices)
        assert outputs.gathered().device == torch.device("cuda", 0)
        found = trained(model, DataParallelCriterion(nn.CrossEntropyLoss()), "cuda:0")
        torch.testing.assert_close(found, expected(), rtol=TO_ROUNDING, atol=TO_ROUNDING)
        model.close()
    named = BalancedDataParallel(model_of().to("cuda"), ["cuda"])
    assert named.devices == [torch.device("cuda", 0)]
    assert named(data(0)[0].to("cuda")).shape == (8, 3)


@on_devices(2)
def test_gradients_when_reduced_between_devices_then_weights_are_those_of_one(folder: Path) -> None:
    def body(rank: int) -> str:
        model = RingDDP(model_of().to(f"cuda:{rank}"))
        found = trained(model, nn.CrossEntropyLoss(), f"cuda:{rank}", slice(4 * rank, 4 * rank + 4))
        torch.testing.assert_close(found, expected(), rtol=TO_ROUNDING, atol=TO_ROUNDING)
        return "equal"

    assert on_two_ranks("nccl", body) == ["equal", "equal"]


@on_devices(2)
def test_server_when_its_worker_has_a_device_then_weights_are_those_of_one(folder: Path) -> None:
    def body(rank: int) -> str:
        device = "cpu" if rank else "cuda:0"
        model = ParameterServerDDP(model_of().to(device))
        if model.is_server:
            model.serve()
            return "served"
        found = trained(model, nn.CrossEntropyLoss(), device)
        model.close()
        torch.testing.assert_close(found, expected(), rtol=TO_ROUNDING, atol=TO_ROUNDING)
        return "equal"

    said = on_two_ranks("gloo", body)
    assert said == ["equal", "served"], said


@on_devices(2)
def test_server_when_the_backend_sends_nothing_from_the_host_then_is_refused(folder: Path) -> None:
    def body(rank: int) -> str:
        with pytest.raises(EnvironmentLacks, match="sends from host memory"):
            ParameterServerDDP(model_of().to(f"cuda:{rank}"))
        dist.all_reduce(torch.zeros(1, device=f"cuda:{rank}"))  # opens what the barrier needs
        return "refused"

    assert on_two_ranks("nccl", body) == ["refused", "refused"]
