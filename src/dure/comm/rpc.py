"""torch RPC over the run's own store: start and end of a rank's agent.

RPC unpickles what peers send, so that a client that reaches an agent can run code in its process; the table of
strategies says so to users. Agents of one host therefore have no port (on Linux), unless `TP_SOCKET_IFNAME` selects an
interface.
"""

import os
import sys

from dure.comm.choice import host_numbers
from dure.comm.groups import Group
from dure.errors import SpecInvalid
from dure.host.environment import on_loopback
from dure.torchcompat.rpc import start_rpc, stop_rpc

INTERFACE_VARIABLE = "TP_SOCKET_IFNAME"
"""TensorPipe's own variable for its interface."""
_CLOSE_SECONDS = 30.0
"""Seconds for all agents to end; they have met shortly before."""


def agent_name(rank: int) -> str:
    """Return the name of a rank's agent."""
    return f"rank{rank}"


def open_agent(group: Group, *, timeout_seconds: float) -> None:
    """Start this rank's agent; every rank of the group calls this.

    Args:
        group: All ranks.
        timeout_seconds: Timeout of every call.

    Communication: a rendezvous through the run's store, and one call from each rank to all; blocking.

    Raises:
        SpecInvalid: The ranks are on several hosts, and no trusted network is selected.
    """
    if INTERFACE_VARIABLE not in os.environ and len(set(host_numbers(group))) > 1:
        raise SpecInvalid(
            [
                "RPC unpickles what peers send and so stays on the loopback interface, but the ranks are on several "
                f"hosts: set {INTERFACE_VARIABLE} to the interface of a network that you trust, or do without RPC"
            ]
        )
    by_memory = INTERFACE_VARIABLE not in os.environ and sys.platform == "linux"
    with on_loopback(INTERFACE_VARIABLE, "GLOO_SOCKET_IFNAME"):  # torch makes a gloo group of its own
        start_rpc(agent_name(group.rank), group.rank, group.world_size, timeout_seconds, by_memory=by_memory)


def close_agent() -> None:
    """End the agent together with all others after all calls are done; none of them may be dead."""
    stop_rpc(_CLOSE_SECONDS)
