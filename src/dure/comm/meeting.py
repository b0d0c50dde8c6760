"""Meeting of ranks that a launcher started, through one store that rank 0 or the launcher serves."""

import errno
import ipaddress
import itertools
import json
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dure.cluster.rank import MeetingPoint, RankInfo
from dure.documents import parse_json
from dure.errors import EnvironmentLacks, PeerLost
from dure.host.devices import interface_of
from dure.process.context import StoreAddress
from dure.terminal import print_status
from dure.torchcompat.stores import store_at, store_on_socket

_POLL_SECONDS = 0.02
_PRINT_AFTER_SECONDS = 10.0
"""Seconds after which a waiting rank reports which ranks it waits for."""
_PORT_PATIENCE_SECONDS = 5.0
"""Seconds that the ranks of an earlier start have to release the port."""

_STORE_SECONDS = 1800.0
"""Seconds that a script waits for a key, the same as torch's own store."""
_LEAVE_SECONDS = 30.0
"""Seconds that rank 0 keeps a store running for ranks that have not ended; a killed rank never reports its end."""

_served: dict[tuple[str, int], dist.Store] = {}
"""Stores that this process serves. They live as long as the process: other ranks may still be leaving one run, or
entering the next."""

_numbers = itertools.count()
"""Counter of this process's meetings. Ranks meet once for each run that their script trains, and the number separates
the keys of the runs."""


class Meeting:
    """Exchange of messages between ranks before there is a process group."""

    def __init__(self, rank: RankInfo, point: MeetingPoint, *, timeout_seconds: float) -> None:
        """Serve the store on rank 0, unless the launcher does; wait until it is reachable, and connect.

        Args:
            rank: Rank of this process.
            point: Address of the store.
            timeout_seconds: Maximum wait for rank 0, and for each reply of the store.

        Raises:
            EnvironmentLacks: The address does not belong to rank 0's host, or the port is taken.
            PeerLost: The store is not reachable.
        """
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self._point = point
        number, host = next(_numbers), point.host
        if rank.rank == 0 and not point.is_served:
            host, _ = _serve(_own_address(rank, point), point, timeout_seconds)
        _wait_until_reachable(rank, host, point.port, timeout_seconds)
        store = store_at(host, point.port, timedelta(seconds=timeout_seconds))
        addresses = () if rank.is_one_host else _addresses_towards(host, point.port)
        self.interface = next(map(interface_of, addresses), None)
        """Network interface towards the other hosts; None if unknown, or if all ranks are on one host."""
        self._of_all_starts = dist.PrefixStore(f"dure/all/{point.job}/{number}", store)
        """Store of keys that later starts of the ranks see too, if the launcher serves it."""
        self._num_answered = 0
        self._start = self._name_of_start() if point.is_served else point.job
        self.address = StoreAddress(host=host, port=point.port, prefix=f"dure/{self._start}/{number}")
        """Address of the store, for the process group."""
        self._store = dist.PrefixStore(f"{self.address.prefix}/said", store)

    def send_to_all_ranks(self, key: str, create: Callable[[], Any] | None) -> Any:
        """Send a JSON message from rank 0 to all ranks, and return it; rank 0 returns when all have received it.

        Args:
            key: Name of the message.
            create: On rank 0, function that creates the message; None on the others.

        Raises:
            PeerLost: A rank did not arrive in time.
        """
        receipt_key = f"{key}/heard"
        if create is not None:
            message = json.dumps(create())
            self._store.set(key, message)
            self._wait_for(self._store, f"{receipt_key} by all" if self.rank.world_size > 1 else key, "the other ranks")
            return parse_json(message)
        self._wait_for(self._store, key, "rank 0")
        message = self._store.get(key).decode()
        if self._store.add(receipt_key, 1) == self.rank.world_size - 1:
            self._store.set(f"{receipt_key} by all", "")
        return parse_json(message)

    def gather(self, key: str, message: Any) -> list[Any]:
        """Return the JSON messages of all ranks.

        Args:
            key: Name of the message.
            message: Message of this rank.

        Raises:
            PeerLost: A rank did not arrive in time.
        """
        keys = [f"{key}/of {rank}" for rank in range(self.rank.world_size)]
        self._store.set(keys[self.rank.rank], json.dumps(message))

        def collect() -> list[Any]:
            for rank, one in enumerate(keys):
                self._wait_for(self._store, one, f"rank {rank}")
            return [parse_json(self._store.get(one)) for one in keys]

        found: list[Any] = self.send_to_all_ranks(key, collect if self.rank.rank == 0 else None)
        return found

    def remember(self, key: str, value: str) -> None:
        """Store a value for the ranks of a later start."""
        self._of_all_starts.set(f"word/{key}", value)

    def recall(self, key: str) -> str | None:
        """Return the value that an earlier start stored, or None."""
        store, key = self._of_all_starts, f"word/{key}"
        return store.get(key).decode() if store.check([key]) else None

    def store_of_this_start(self) -> StoreAddress:
        """Return a store that no earlier start has written to; all ranks call this.

        A script's own group uses its keys without a prefix. In a store that the launcher serves, it would take the
        addresses of dead ranks for those of living ones.
        """
        if not self._point.is_served:
            return self.address

        def serve() -> dict[str, Any]:
            host, port = _serve(address_here(self.rank, self._point), replace(self._point, port=0), _STORE_SECONDS)
            return {"host": host, "port": port}

        address = self.send_to_all_ranks("store", serve if self.rank.rank == 0 else None)
        return StoreAddress(host=address["host"], port=address["port"], prefix="")

    def leave(self) -> None:
        """Report that this rank needs no store any more; rank 0, which may serve one, waits for all reports."""
        try:
            if self._store.add("left", 1) == self.rank.world_size:
                self._store.set("all left", "")
            if self.rank.rank == 0:
                self._wait_for(self._store, "all left", "the other ranks to end", _LEAVE_SECONDS)
        except (PeerLost, dist.DistError):
            return  # they are dead, which their launcher notices

    def _name_of_start(self) -> str:
        """Return a name that is common to all ranks of this start, and different from those of earlier starts.

        A store that the launcher serves outlives the ranks. Keys of dead ranks must not be taken for messages of living
        ones. The launcher provides no number: each of torchrun's agents counts its own restarts. Rank 0 therefore
        creates a random name. Every other rank registers a random key, and receives the name under that key, which only
        a living rank 0 can have read.
        """
        made_up = secrets.token_hex(8)
        if self.rank.rank == 0:
            return made_up
        self._of_all_starts.set(f"knock/{self.rank.rank}", made_up)
        self._of_all_starts.add("knocks", 1)
        self._wait_for(self._of_all_starts, made_up, "rank 0")
        return self._of_all_starts.get(made_up).decode()

    def _answer_requests(self) -> None:
        store = self._of_all_starts
        num_requests = store.add("knocks", 0)
        if num_requests == self._num_answered:
            return
        self._num_answered = num_requests
        for rank in range(1, self.rank.world_size):
            if store.check([f"knock/{rank}"]):
                store.set(store.get(f"knock/{rank}").decode(), self._start)

    def _wait_for(self, store: dist.Store, key: str, whom: str, seconds: float | None = None) -> None:
        """Wait for a key in short sleeps, because Python handles no signals during the store's own wait."""
        patience = _Patience(self.rank, whom, self.timeout_seconds if seconds is None else seconds)
        try:
            while not store.check([key]):
                if self._point.is_served and self.rank.rank == 0:
                    self._answer_requests()
                patience.sleep()
        except dist.DistError as error:
            raise PeerLost(f"the store of the ranks went away while rank {self.rank.rank} waited: {error}") from None


class _Patience:
    """Time left for other ranks to arrive; reports once that it is running."""

    def __init__(self, rank: RankInfo, whom: str, seconds: float) -> None:
        self.rank, self.whom, self.seconds = rank, whom, seconds
        self.start = time.monotonic()
        self.has_printed = False

    def sleep(self, reason: str = "") -> None:
        waited = time.monotonic() - self.start
        why = f" ({reason})" if reason else ""
        if waited > self.seconds:
            raise PeerLost(
                f"rank {self.rank.rank} of {self.rank.world_size} waited {self.seconds:g} s in vain for "
                f"{self.whom}{why}: see what the others said, or raise --timeout-seconds"
            )
        if waited > _PRINT_AFTER_SECONDS and not self.has_printed:
            self.has_printed = True
            print_status(f"rank {self.rank.rank} waits for {self.whom}{why}")
        time.sleep(_POLL_SECONDS)


def _wait_until_reachable(rank: RankInfo, host: str, port: int, seconds: float) -> None:
    patience = _Patience(rank, f"rank 0 at {host}:{port}", seconds)
    while True:
        try:
            socket.create_connection((host, port), timeout=min(5.0, seconds)).close()
            return
        except OSError as error:  # no listener yet, or a host name that is not known yet
            patience.sleep(error.strerror or str(error))


def _serve(address: str, point: MeetingPoint, timeout_seconds: float) -> tuple[str, int]:
    """Serve a store on one address of this host, and on no other; return address and port."""
    if (address, point.port) in _served:
        return address, point.port
    listener = _listen(address, point)
    port = int(listener.getsockname()[1])
    _served[address, port] = store_on_socket(listener, timedelta(seconds=timeout_seconds))
    return address, port


def _own_address(rank: RankInfo, point: MeetingPoint) -> str:
    """Return the address of this host that the meeting point's name stands for, reachable by the other ranks."""
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


def address_here(rank: RankInfo, point: MeetingPoint) -> str:
    """Return an address of this host that the other ranks can reach; the meeting point may be on another host."""
    if rank.is_one_host:
        return "127.0.0.1"
    return next(iter(_addresses_towards(point.host, point.port)), None) or _own_address(rank, point)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _addresses_towards(host: str, port: int) -> list[str]:
    """Return the address from which the kernel would reach another host, or none; nothing is sent."""
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
