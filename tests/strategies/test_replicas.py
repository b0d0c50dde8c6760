"""The primitives of one process over many devices, on virtual ones."""

import threading
from collections import namedtuple

import pytest
import torch
from torch import nn

from dure.errors import TaskInvalid
from dure.strategies.replicas import BroadcastParameters, DeviceThreads, build_replicas, copy_state, gather

CPU = torch.device("cpu")
Output = namedtuple("Output", "logits hidden")


def test_broadcast_copies_and_its_backward_adds_the_copies_gradients():
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    frozen = torch.tensor([3.0])
    first, first_frozen, second, _ = BroadcastParameters.apply([CPU, CPU], weight, frozen)
    assert first.data_ptr() != weight.data_ptr()
    assert not first_frozen.requires_grad
    (3 * first + 4 * second).sum().backward()
    assert weight.grad.tolist() == [7.0, 7.0]


def test_broadcast_backward_of_copies_that_were_not_used_gives_no_gradient():
    used, unused = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    copies = BroadcastParameters.apply([CPU], used, unused)
    copies[0].sum().backward()
    assert used.grad.item() == 1
    assert unused.grad is None


def test_gather_joins_tensors_through_tuples_named_tuples_lists_and_mappings():
    def part(n):
        return {"out": (torch.full((n, 2), n), [Output(torch.zeros(n), torch.ones(n, 1))]), "note": "same"}

    whole = gather([part(1), part(2)], CPU)
    assert whole["out"][0].tolist() == [[1, 1], [2, 2], [2, 2]]
    assert isinstance(whole["out"][1][0], Output)
    assert whole["out"][1][0].hidden.shape == (3, 1)
    assert whole["note"] == "same"


def test_gather_of_scalars_is_refused():
    with pytest.raises(TaskInvalid, match="the model returned a scalar on each device: dp gathers outputs along"):
        gather([torch.tensor(1.0), torch.tensor(2.0)], CPU)


def test_replicas_are_separate_and_copy_state_makes_them_equal():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    same, replica = build_replicas(model, [CPU, CPU])
    assert same is model
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    copy_state(model, [replica], buffers_only=True)
    assert replica[1].running_mean.tolist() == [1.0, 1.0]
    assert not torch.equal(replica[0].weight, model[0].weight)
    copy_state(model, [replica])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), replica.parameters(), strict=True))


@pytest.mark.parametrize("in_order", [True, False])
def test_threads_answer_in_order_and_in_the_callers_gradient_mode(in_order):
    threads = DeviceThreads([CPU] * 3, in_order=in_order)
    with torch.no_grad():
        answers = threads.run([lambda i=i: (i, torch.is_grad_enabled()) for i in range(3)])
    threads.close()
    assert answers == [(0, False), (1, False), (2, False)]


def test_threads_run_at_the_same_time():
    meeting = threading.Barrier(2, timeout=10)
    threads = DeviceThreads([CPU] * 2, in_order=False)
    assert sorted(threads.run([meeting.wait, meeting.wait])) == [0, 1]
    threads.close()


def test_threads_raise_the_first_devices_error_when_all_have_ended():
    ended = []

    def fail(i):
        ended.append(i)
        raise ValueError(f"device {i}")

    threads = DeviceThreads([CPU] * 3, in_order=False)
    with pytest.raises(ValueError, match="device 0"):
        threads.run([lambda i=i: fail(i) for i in range(3)])
    threads.close()
    assert sorted(ended) == [0, 1, 2]
