"""Agents of torch RPC: on the loopback interface, without a word, and gone in the end."""

import os
import warnings

import psutil
import pytest
import torch

from dure.comm import rpc
from dure.comm.groups import Group
from dure.errors import SpecInvalid
from tests.comm.gloo_ranks import on_ranks


def test_agents_when_started_then_call_each_other_and_listen_on_loopback_alone():
    def work(group):
        from torch.distributed.rpc import rpc_sync

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            before = dict(os.environ)
            rpc.open_agent(group, timeout_seconds=20.0)
            three = rpc_sync(rpc.agent_name(1 - group.rank), torch.add, args=(torch.ones(2), 2))
        listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        rpc.close_agent()
        return three.tolist(), listening, dict(os.environ) == before

    assert on_ranks(2, work) == [([3.0, 3.0], {"127.0.0.1"}, True)] * 2


class OnTwoHosts(Group):
    """Two ranks that say they are on different hosts."""

    rank, world_size = 0, 2

    def all_gather_json(self, message):
        return [message, f"not {message}"]

    all_reduce_sum = broadcast = barrier = close = abandon = None


def test_agents_when_ranks_are_on_several_hosts_then_are_refused_unless_a_network_is_named():
    with pytest.raises(SpecInvalid, match="set TP_SOCKET_IFNAME to the interface of a network that you trust"):
        rpc.open_agent(OnTwoHosts(), timeout_seconds=1.0)
