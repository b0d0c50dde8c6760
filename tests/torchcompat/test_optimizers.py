"""Optimisers: division over ranks and loss scaling."""

import pytest
import torch
from torch import nn

from dure.torchcompat.optimizers import found_overflows
from tests.torchcompat.fresh_interpreter import run_python


def test_found_overflows_when_there_are_no_gradients_then_one_number_can_be_agreed_on() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.unscale_(optimizer)
    assert found_overflows(scaler, optimizer) == []
    (found,) = found_overflows(scaler, optimizer, torch.device("cpu"))
    found += 1  # another rank's gradient overflowed
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    assert scaler.get_scale() == before / 2


def test_found_overflows_when_changed_then_the_step_is_skipped() -> None:
    scaler = torch.amp.GradScaler("cpu")
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    (found,) = found_overflows(scaler, optimizer)
    assert found.item() == 0
    found += 1
    scaler.step(optimizer)
    assert parameter.tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_divided_optimizer_when_its_package_is_imported_then_nothing_warns_and_the_part_steps() -> None:
    out = run_python(
        "import socket, torch, torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "from torch import nn\n"
        "from dure.torchcompat.imports import import_late_parts\n"
        "from dure.torchcompat.optimizers import divide_optimizer\n"
        "from dure.torchcompat.stores import store_on_socket\n"
        "import_late_parts()\n"
        "store = store_on_socket(socket.create_server(('127.0.0.1', 0)), timedelta(seconds=20))\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "for in_one_message in (False, True):\n"
        "    parameter = nn.Parameter(torch.ones(3))\n"
        "    parameter.grad = torch.ones(3)\n"
        "    groups = [{'params': [parameter], 'lr': 0.5}]\n"
        "    whole = divide_optimizer(groups, torch.optim.SGD, in_one_message=in_one_message)\n"
        "    whole.param_groups[0]['lr'] = 0.25\n"
        "    whole.step()\n"
        "    print(parameter.tolist())\n"
        "    whole.rho = 0.5\n"
        "    whole.optim.scale, whole.rank = 2.0, 0\n"
        "    whole.state = {}\n"
        "    print(whole.optim.rho, whole.scale, hasattr(whole.optim, 'rank'), whole.optim.state is whole.state)\n"
        "    del whole.rho\n"
        "    print(hasattr(whole, 'rho'), hasattr(whole, 'nothing'))\n"
        "dist.destroy_process_group()\n"
    )
    assert out.splitlines() == ["[0.75, 0.75, 0.75]", "0.5 2.0 False True", "False False"] * 2


def test_found_overflows_when_a_gradient_is_not_finite_then_the_live_number_says_so() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(1))
    parameter.grad = torch.ones(2)
    scaler.unscale_(optimizer)
    (found,) = found_overflows(scaler, optimizer)
    assert found.item() == 0.0
    found += 1.0  # as another rank's would be added
    scaler.step(optimizer)
    assert parameter.tolist() == [1.0, 1.0]
