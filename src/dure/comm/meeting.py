"""Where ranks that a launcher started find each other: one store, served by rank 0 or by the launcher."""

import errno
import ipaddress
import itertools
import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dure.errors import EnvironmentLacks, PeerLost
from dure.place import StoreAddress
from dure.rank import MeetingPoint, RankInfo
from dure.telling import tell
from dure.torchcompat import store_at, store_on_socket

_POLL_SECONDS = 0.02
_SAY_AFTER_SECONDS = 10.0
"""A rank that waits longer for the others says for whom."""
_PORT_PATIENCE_SECONDS = 5.0
"""What the ranks of an earlier start get to give the port back."""

_served: dict[tuple[str, int], dist.Store] = {}
"""Stores that this process serves. They live as long as it does: other ranks may be still on their way out of one run,
or into the next."""

_numbers = itertools.count()
"""Ranks meet once for each run that their script trains: the number keeps the runs' keys apart."""


class Meeting:
    """What ranks can say to each other before there is a group."""

    def __init__(self, rank: RankInfo, point: MeetingPoint, *, timeout_seconds: float) -> None:
        """Serve the store, as rank 0, unless the launcher does; wait until it can be reached, and connect.

        Args:
            rank: This process.
            point: Where.
            timeout_seconds: How long to wait for rank 0, and for each answer of the store.

        Raises:
            EnvironmentLacks: The address is none of rank 0's host, or the port is taken.
            PeerLost: Nobody answers there.
        """
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        prefix = f"dure/{point.attempt}/{next(_numbers)}"
        host = point.host
        if rank.rank == 0 and not point.is_served:
            host = _serve(rank, point, timeout_seconds)
        self.address = StoreAddress(host=host, port=point.port, prefix=prefix)
        """Of the store, for the group."""
        _wait_until_reachable(rank, host, point.port, timeout_seconds)
        store = store_at(host, point.port, timedelta(seconds=timeout_seconds))
        self._store = dist.PrefixStore(f"{prefix}/said", store)

    def tell_all(self, key: str, say: Callable[[], Any] | None) -> Any:
        """Let rank 0 say something to all ranks, as JSON; rank 0 returns when all have heard it.

        Args:
            key: A name for it.
            say: On rank 0, what makes the message; None on the others.

        Raises:
            PeerLost: A rank did not come in time.
        """
        heard = f"{key}/heard"
        if say is not None:
            message = json.dumps(say())
            self._store.set(key, message)
            self._wait_for(f"{heard} by all" if self.rank.world_size > 1 else key, "the other ranks")
            return json.loads(message)
        self._wait_for(key, "rank 0")
        message = self._store.get(key).decode()
        if self._store.add(heard, 1) == self.rank.world_size - 1:
            self._store.set(f"{heard} by all", "")
        return json.loads(message)

    def _wait_for(self, key: str, whom: str) -> None:
        """Wait for a key in small sleeps: inside of the store's own wait Python hears no signal."""
        patience = _Patience(self.rank, whom, self.timeout_seconds)
        try:
            while not self._store.check([key]):
                patience.sleep()
        except dist.DistError as error:
            raise PeerLost(f"the store of the ranks went away while rank {self.rank.rank} waited: {error}") from None


class _Patience:
    """Time that is left for others to come; says once that it is running."""

    def __init__(self, rank: RankInfo, whom: str, seconds: float) -> None:
        self.rank, self.whom, self.seconds = rank, whom, seconds
        self.start = time.monotonic()
        self.has_said = False

    def sleep(self, reason: str = "") -> None:
        waited = time.monotonic() - self.start
        why = f" ({reason})" if reason else ""
        if waited > self.seconds:
            raise PeerLost(
                f"rank {self.rank.rank} of {self.rank.world_size} waited {self.seconds:g} s in vain for "
                f"{self.whom}{why}: see what the others said, or raise --timeout-seconds"
            )
        if waited > _SAY_AFTER_SECONDS and not self.has_said:
            self.has_said = True
            tell(f"rank {self.rank.rank} waits for {self.whom}{why}")
        time.sleep(_POLL_SECONDS)


def _wait_until_reachable(rank: RankInfo, host: str, port: int, seconds: float) -> None:
    patience = _Patience(rank, f"rank 0 at {host}:{port}", seconds)
    while True:
        try:
            socket.create_connection((host, port), timeout=min(5.0, seconds)).close()
            return
        except OSError as error:  # nobody there yet, or a name that the network does not know yet
            patience.sleep(error.strerror or str(error))


def _serve(rank: RankInfo, point: MeetingPoint, timeout_seconds: float) -> str:
    """Serve a store on one address of this host, and on no other; return the address."""
    address = _own_address(rank, point)
    if (address, point.port) not in _served:
        listener = _listen(address, point)
        _served[address, point.port] = store_on_socket(listener, timedelta(seconds=timeout_seconds))
    return address


def _own_address(rank: RankInfo, point: MeetingPoint) -> str:
    """Return the address that the name of the meeting point has on this host, where the other ranks can reach it."""
    try:
        found = socket.getaddrinfo(point.host, point.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EnvironmentLacks(
            f"rank 0 is to serve {point.host}:{point.port}, but that name is not known here ({error.strerror}): set "
            "MASTER_ADDR to an address of rank 0's host"
        ) from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if rank.is_one_host:
        return addresses[0]
    outside = [address for address in addresses if not _is_loopback(address)]
    if not outside and point.other_host is not None:
        outside = _addresses_towards(point.other_host, point.port)
    if not outside:
        raise EnvironmentLacks(
            f"{point.host} is {addresses[0]} on rank 0's host, where ranks of other hosts cannot reach it: set "
            "MASTER_ADDR to that host's address in the network"
        )
    return outside[0]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _addresses_towards(host: str, port: int) -> list[str]:
    """Ask the kernel from which address it would speak to another host; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            address = str(probe.getsockname()[0])
    except OSError:
        return []
    return [] if _is_loopback(address) else [address]


def _listen(address: str, point: MeetingPoint) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    deadline = time.monotonic() + _PORT_PATIENCE_SECONDS
    while True:
        try:
            return socket.create_server((address, point.port), family=family, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                continue
            raise EnvironmentLacks(_cannot_listen(error, address, point)) from None


def _cannot_listen(error: OSError, address: str, point: MeetingPoint) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"rank 0 is to serve {point.host} ({address}), which is no address of its host {socket.gethostname()}: set "
            "MASTER_ADDR to the host of rank 0"
        )
    derived = "" if point.is_port_given else ", which comes from the job's number"
    return (
        f"rank 0 cannot listen on port {point.port} of {address}{derived} ({error.strerror}): set MASTER_PORT to a "
        "free port, the same for all ranks"
    )
