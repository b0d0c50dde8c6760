"""One optimiser's state out of those of many ranks, also where some have none."""

import torch
from torch import nn
from torch.optim import SGD, AdamW

from dure.strategies.local_sgd.averaged_state import average_optimizer_state
from tests.comm.gloo_ranks import on_ranks


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))


def stepped(optimizer, gradients):
    """Step by a constant gradient for each parameter; None is none."""
    for parameter, value in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
        parameter.grad = None if value is None else torch.ones_like(parameter) * value
    optimizer.step()


def test_moments_become_the_mean_and_counts_those_of_the_lowest_rank():
    def work(group):
        net = model()
        optimizer = AdamW(net.parameters(), betas=(0.0, 0.0))
        for _ in range(3 - group.rank):
            stepped(optimizer, [1.0 + 2 * group.rank, 10.0])
        average_optimizer_state(net, optimizer, group)
        state = optimizer.state[net[0].weight]
        return state["exp_avg"].tolist(), state["exp_avg_sq"].tolist(), state["step"].item()

    # gradients of 1 and 3, their squares of 1 and 9
    assert on_ranks(2, work) == [([[2.0, 2.0]], [[5.0, 5.0]], 3.0)] * 2


def test_a_rank_that_has_no_state_gets_the_mean_of_those_that_have():
    def work(group):
        net = model()
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        if group.rank:
            stepped(optimizer, [2.0 * group.rank, None if group.rank == 1 else 7.0])
        average_optimizer_state(net, optimizer, group)
        return [optimizer.state[layer.weight]["momentum_buffer"].flatten().tolist() for layer in net]

    assert on_ranks(3, work) == [[[3.0, 3.0], [7.0]]] * 3


def test_whole_numbers_plain_values_and_strange_ones_are_the_lowest_ranks_or_stay():
    def work(group):
        net = nn.Linear(2, 1, bias=False)
        optimizer = SGD(net.parameters(), lr=0.1)
        optimizer.state[net.weight] = {
            "seen": torch.tensor([group.rank, 5]),
            "count": 10 + group.rank,
            "nested": {"rank": group.rank},
            "momentum_buffer": None,
        }
        average_optimizer_state(net, optimizer, group)
        state = optimizer.state[net.weight]
        return state["seen"].tolist(), state["count"], state["nested"], state["momentum_buffer"]

    assert on_ranks(2, work) == [([0, 5], 10, {"rank": rank}, None) for rank in range(2)]


def test_state_without_anything_stays_empty():
    def work(group):
        net = model()
        optimizer = SGD(net.parameters(), lr=0.1)
        average_optimizer_state(net, optimizer, group)
        return len(optimizer.state)

    assert on_ranks(2, work) == [0, 0]


def test_channels_last_moments_stay_so_where_they_are_made_anew():
    def work(group):
        net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        optimizer = AdamW(net.parameters())
        if group.rank == 0:
            stepped(optimizer, [torch.arange(108.0).view(4, 3, 3, 3), 1.0])
        average_optimizer_state(net, optimizer, group)
        moment = optimizer.state[net.weight]["exp_avg"]
        return moment.is_contiguous(memory_format=torch.channels_last), moment.flatten()[:3].tolist()

    first, second = on_ranks(2, work)
    assert first == second
    assert first[0]
