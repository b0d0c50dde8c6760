"""Messages between workers and servers over torch RPC (`transport` rpc): the same protocol, more slowly.

A message is one remote call that puts a tensor into the receiver's mailbox. RPC does not notify a waiting rank that the
sender is dead. Therefore each pair also waits for one c10d message, which is only sent when a rank leaves: the wait
fails at once when a process ends.
"""

import queue
import threading
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dure.comm.groups import Group
from dure.comm.rpc import agent_name, close_agent, open_agent
from dure.errors import PeerLost
from dure.strategies.parameter_server.transport import Transport, UnderWay

_FAREWELL_TAG = 43
_NO_LIMIT = timedelta(days=3650)

_mailboxes: dict[int, "queue.SimpleQueue[Tensor | PeerLost]"] = {}
"""Messages for this process, by sender. Remote calls can only reach objects of a module."""


def _deliver(sender: int, message: Tensor) -> None:
    """Receive a message; called by the sender, in a thread of the agent."""
    _mailboxes[sender].put(message)


class RpcTransport(Transport):
    """Transport with mailboxes, filled by remote calls."""

    def __init__(self, group: Group, peers: Iterable[int], *, timeout_seconds: float) -> None:
        """Start the agent, and watch the peers.

        Args:
            group: All ranks; each creates its transport.
            peers: Ranks with which this rank communicates.
            timeout_seconds: Timeout of a message.
        """
        import torch.distributed.rpc as rpc

        self._call = rpc.rpc_async
        self._rank = group.rank
        self._timeout = timedelta(seconds=timeout_seconds)
        self._peers = list(peers)
        _mailboxes.update({peer: queue.SimpleQueue() for peer in self._peers})
        open_agent(group, timeout_seconds=timeout_seconds)
        self._watches = [
            threading.Thread(target=self._watch, args=(peer,), name=f"dure-watch{peer}", daemon=True)
            for peer in self._peers
        ]
        for watch in self._watches:
            watch.start()

    def _watch(self, peer: int) -> None:
        try:
            work = dist.irecv(torch.zeros(1), peer, tag=_FAREWELL_TAG)
            assert work is not None
            work.wait(_NO_LIMIT)
        except RuntimeError as error:
            _mailboxes[peer].put(PeerLost(f"rank {peer} is gone: {error}"))

    def send(self, message: Tensor, rank: int) -> UnderWay:
        """Start a remote call. Communication: the message's bytes to one rank and an empty reply, not blocking."""
        try:
            return _Sent(self._call(agent_name(rank), _deliver, args=(self._rank, message)), rank)
        except RuntimeError as error:
            raise PeerLost(f"a message could not be sent to rank {rank}: {error}") from error

    def receive(self, message: Tensor, rank: int) -> UnderWay:
        """Return a handle that waits for the mailbox."""
        return _Awaited(_mailboxes[rank], message, rank, self._timeout)

    def close(self, *, is_whole: bool) -> None:
        """Send the last message to the living ranks, and shut the agent down together with them.

        If a rank is dead, the agent ends with its process instead: an orderly shutdown would wait for the dead rank.
        """
        for peer in self._peers:
            try:
                dist.send(torch.zeros(1), peer, tag=_FAREWELL_TAG)
            except RuntimeError:
                continue
        for watch in self._watches:
            watch.join(self._timeout.total_seconds())
        if is_whole:
            close_agent()
        _mailboxes.clear()


class _Sent:
    """Remote call whose completion shows that the message was delivered."""

    def __init__(self, future: "torch.futures.Future[None]", rank: int) -> None:
        self._future = future
        self._rank = rank

    def wait(self, timeout: timedelta | None = None, /) -> None:
        """Wait for the reply, up to the timeout of a call."""
        try:
            self._future.wait()
        except RuntimeError as error:
            raise PeerLost(f"a message did not get through to rank {self._rank}: {error}") from error


class _Awaited:
    """Next message of a mailbox."""

    def __init__(
        self, mailbox: "queue.SimpleQueue[Tensor | PeerLost]", target: Tensor, rank: int, timeout: timedelta
    ) -> None:
        self._mailbox = mailbox
        self._target = target
        self._rank = rank
        self._timeout = timeout

    def wait(self, timeout: timedelta | None = None, /) -> None:
        """Copy the message into the target as soon as it is there."""
        limit = (timeout or self._timeout).total_seconds()
        try:
            # the longest timeout that Python accepts is some centuries, that of the system some years
            message = self._mailbox.get(timeout=min(limit, threading.TIMEOUT_MAX))
        except queue.Empty:
            raise PeerLost(f"rank {self._rank} sent nothing within {limit:g} s") from None
        if isinstance(message, PeerLost):
            self._mailbox.put(message)  # for the next call
            raise message
        self._target.copy_(message)
