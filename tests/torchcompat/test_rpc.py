"""Agents of `torch.distributed.rpc`."""

import torch
from torch import nn

from dure.comm.groups import ProcessGroup
from dure.torchcompat.imports import import_distributed_optim
from dure.torchcompat.rpc import optimizer_of_references, start_rpc, stop_rpc
from tests.comm.gloo_ranks import on_ranks


def one_parameter() -> nn.Parameter:
    return THE_PARAMETER


def twice_the_parameter() -> torch.Tensor:
    return 2.0 * THE_PARAMETER


def take_local(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


THE_PARAMETER = nn.Parameter(torch.ones(2))


def test_rpc_when_a_parameter_is_elsewhere_then_it_is_referred_to_and_stepped_there_without_a_word() -> None:
    def work(group: ProcessGroup) -> list[float]:
        import_distributed_optim()
        start_rpc(f"agent{group.rank}", group.rank, group.world_size, 20.0)
        group.barrier()
        if group.rank == 0:
            from torch.distributed import autograd, rpc

            reference = rpc.remote("agent1", one_parameter)
            optimizer = optimizer_of_references(take_local, [reference])
            with autograd.context() as context:
                value = rpc.remote("agent1", twice_the_parameter)
                autograd.backward(context, [value.to_here().sum()])
                optimizer.step(context)
            del optimizer, reference, value
        group.barrier()
        stop_rpc(20.0)
        return THE_PARAMETER.tolist()

    assert on_ranks(2, work) == [[1.0, 1.0], [-1.0, -1.0]]
