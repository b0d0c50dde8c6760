"""Workers and parameter servers in a loop written by hand, compared with means computed plainly."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD

from dure.comm.groups import ProcessGroup
from dure.errors import EnvironmentLacks, PeerLost, TaskInvalid
from dure.parallel import ParameterServerDDP
from tests.comm.gloo_ranks import on_ranks
from tests.parallel.test_ring_ddp import STEPS, Model, expected, loss_of


@pytest.mark.parametrize(("num_workers", "servers", "num_backwards"), [(2, 1, 1), (1, 2, 1), (2, 2, 2)])
def test_gradients_when_pulled_then_are_the_means_of_the_workers(
    num_workers: int, servers: int, num_backwards: int
) -> None:
    def work(group: ProcessGroup) -> Any:
        torch.manual_seed(group.rank)
        if group.rank == 0:
            torch.manual_seed(0)
        module = Model()
        model = ParameterServerDDP(module, servers=servers)
        assert (model.num_workers, model.is_server) == (num_workers, group.rank >= num_workers)
        if model.is_server:
            return model.serve()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(num_backwards - 1):
                with model.no_sync():
                    loss_of(model, group.rank, step + 10 * number, torch.float64).backward()
            loss_of(model, group.rank, step + 10 * (num_backwards - 1), torch.float64).backward()
            found.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
            optimizer.step()
        dist.barrier(group=model.workers)
        model.close()
        model.close()
        return found

    want = expected(num_workers, torch.float64, num_backwards, num_workers)
    want = [{name: gradient for name, gradient in step.items() if gradient is not None} for step in want]
    for found in on_ranks(num_workers + servers, work)[:num_workers]:
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def asynchronous(group: ProcessGroup, staleness: int | None = None, slow: int | None = None) -> Any:
    """Train without waiting; return the weights and the most steps ahead of the other worker."""
    torch.manual_seed(0)
    module = Model()
    model = ParameterServerDDP(module, sync=False, staleness=staleness)
    if model.is_server:
        return model.serve()
    optimizer = SGD(model.parameters(), lr=0.05)
    times = []
    for step in range(6):
        if group.rank == slow:
            time.sleep(0.1)
        optimizer.zero_grad()
        loss_of(model, group.rank, step, torch.float64).backward()
        times.append(time.monotonic())
        optimizer.step()
    model.close()
    return times, {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def test_weights_when_one_worker_does_not_wait_then_are_those_of_one_process() -> None:
    torch.manual_seed(0)
    alone = Model()
    optimizer = SGD(alone.parameters(), lr=0.05)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(alone, 0, step, torch.float64).backward()
        optimizer.step()
    _, weights = on_ranks(2, asynchronous)[0]
    torch.testing.assert_close(weights, dict(alone.named_parameters()), rtol=1e-12, atol=1e-12)


def test_weights_when_two_workers_have_closed_then_are_equal_and_learned_from_both() -> None:
    (_, one), (_, other), _ = on_ranks(3, asynchronous)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.manual_seed(0)
    start = dict(Model().named_parameters())
    assert not torch.equal(one["first.weight"], start["first.weight"])


def test_worker_when_too_far_ahead_then_waits() -> None:
    (fast, _), (slow, _), _ = on_ranks(3, lambda group: asynchronous(group, staleness=1, slow=1))
    # the fast worker's last step needs the slow one's third or fourth, and without the bound it needs none
    assert fast[-1] > slow[2]


def test_servers_when_workers_make_different_numbers_of_steps_then_all_are_told() -> None:
    def work(group: ProcessGroup) -> Any:
        torch.manual_seed(0)
        model = ParameterServerDDP(Model())
        if model.is_server:
            model.serve()
        for step in range(1 + group.rank):
            loss_of(model, 0, step, torch.float64).backward()
        model.close()

    answers = on_ranks(3, work)
    assert all(isinstance(answer, TaskInvalid) and "as many batches" in str(answer) for answer in answers), answers


@pytest.mark.parametrize("sync", [True, False])
def test_server_when_workers_end_without_closing_then_says_so(sync: bool) -> None:
    def work(group: ProcessGroup) -> Any:
        model = ParameterServerDDP(Model(), sync=sync)
        group.close = lambda: None  # type: ignore[method-assign]  # workers leave as scripts do, without a barrier
        return model.serve() if model.is_server else None

    *_, answer = on_ranks(3, work)
    assert isinstance(answer, PeerLost)
    assert "without close()" in str(answer)


def test_server_when_a_worker_dies_and_none_waits_then_the_others_go_on() -> None:
    def work(group: ProcessGroup) -> Any:
        torch.manual_seed(0)
        group.close = lambda: None  # type: ignore[method-assign]  # its barrier would wait for the one that dies
        model = ParameterServerDDP(Model(), sync=False)
        if model.is_server:
            return model.serve()
        optimizer = SGD(model.parameters(), lr=0.05)
        for step in range(4):
            if group.rank == 1 and step == 2:
                raise RuntimeError("dies")
            optimizer.zero_grad()
            loss_of(model, group.rank, step, torch.float64).backward()
            optimizer.step()
        model.close()
        return "closed"

    first, _, server = on_ranks(3, work)
    assert (first, server) == ("closed", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": 0}, "at least one must be a worker, and one a server"),
        ({"servers": 2}, "at least one must be a worker, and one a server"),
        ({"staleness": 1}, "together with sync=False"),
        ({"staleness": -1, "sync": False}, "at least 0"),
    ],
)
def test_module_when_options_do_not_go_together_then_says_so(options: Any, message: str) -> None:
    def work(group: ProcessGroup) -> Any:
        with pytest.raises(TaskInvalid, match=message):
            ParameterServerDDP(Model(), **options)
        return "refused"

    assert on_ranks(2, work) == ["refused"] * 2


def test_module_when_used_on_the_wrong_rank_then_says_so() -> None:
    def work(group: ProcessGroup) -> Any:
        model = ParameterServerDDP(Model(), sync=False)
        with pytest.raises(TaskInvalid, match=r"serve\(\) in place" if model.is_server else "write its training loop"):
            model(torch.ones(1, 4)) if model.is_server else model.serve()
        if model.is_server:
            return model.serve()
        with pytest.raises(TaskInvalid, match="before the model is wrapped"):
            model.load_state_dict(model.state_dict())
        with pytest.raises(TaskInvalid, match="before the model is wrapped"):
            model.module.load_state_dict(model.module.state_dict())
        return model.close()

    assert on_ranks(2, work) == [None, None]


def test_module_when_there_is_no_group_then_says_so() -> None:
    with pytest.raises(EnvironmentLacks, match="init_process_group first"):
        ParameterServerDDP(Model())
