"""The primitives of one process over many devices, on virtual ones."""

import contextvars
import threading
import time

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional

from dure.strategies.device_threads import BroadcastParameters, DeviceThreads

CPU = torch.device("cpu")


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


def test_second_derivatives_pass_through_the_copies():
    weight = torch.tensor([2.0], requires_grad=True)
    first, second = BroadcastParameters.apply([CPU, CPU], weight)
    (gradient,) = torch.autograd.grad((first**2 + second**3).sum(), weight, create_graph=True)
    gradient.sum().backward()
    assert gradient.item() == 2 * 2 + 3 * 2**2
    assert weight.grad.item() == 2 + 6 * 2


def test_sparse_gradients_of_copies_are_added_up():
    weight = torch.ones(3, 1, requires_grad=True)
    copies = BroadcastParameters.apply([CPU, CPU], weight)
    sum(functional.embedding(torch.tensor([i]), copies[i], sparse=True).sum() for i in range(2)).backward()
    assert weight.grad.is_sparse
    assert weight.grad.to_dense().flatten().tolist() == [1, 1, 0]


@pytest.mark.parametrize("in_order", [True, False])
def test_threads_answer_in_order_and_in_the_callers_gradient_mode(in_order):
    threads = DeviceThreads([CPU] * 3, in_order=in_order)
    with torch.no_grad():
        answers = threads.run([lambda i=i: (i, torch.is_grad_enabled()) for i in range(3)])
    threads.close()
    assert answers == [(0, False), (1, False), (2, False)]


def test_threads_compute_in_the_callers_autocast_and_context():
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(5)
    threads = DeviceThreads([CPU] * 2, in_order=False)
    product = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answers = threads.run([lambda: ((product @ product).dtype, variable.get())] * 2)
    outside = threads.run([lambda: (product @ product).dtype] * 2)
    threads.close()
    assert answers == [(torch.bfloat16, 5)] * 2
    assert outside == [torch.float32] * 2


def test_threads_run_at_the_same_time():
    meeting = threading.Barrier(2, timeout=10)
    threads = DeviceThreads([CPU] * 2, in_order=False)
    assert sorted(threads.run([meeting.wait, meeting.wait])) == [0, 1]
    threads.close()


def test_threads_compute_functional_calls_on_one_module_with_their_own_weights():
    class Slow(nn.Linear):
        def forward(self, x):
            time.sleep(0.02)
            return super().forward(x)

    module = Slow(1, 1, bias=False)
    before = module.weight
    threads = DeviceThreads([CPU] * 2, in_order=False)

    def call(factor):
        return torch.func.functional_call(module, {"weight": torch.tensor([[factor]])}, torch.ones(1, 1)).item()

    answers = threads.run([lambda: call(2.0), lambda: call(3.0)])
    threads.close()
    assert answers == [2.0, 3.0]
    assert module.weight is before


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, as it imports its rules
def test_threads_compute_derivatives_in_forward_mode_by_turns():
    def slowly(x):
        time.sleep(0.02)
        return x.square()

    def by_level(value):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.tensor(value), torch.tensor(1.0))
            return forward_ad.unpack_dual(slowly(dual)).tangent.item()

    def by_function(value):
        return torch.func.jvp(slowly, (torch.tensor(value),), (torch.tensor(1.0),))[1].item()

    threads = DeviceThreads([CPU] * 3, in_order=False)
    for call in (by_level, by_function):
        assert threads.run([lambda value=value, call=call: call(value) for value in (1.0, 2.0, 3.0)]) == [2.0, 4.0, 6.0]
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
