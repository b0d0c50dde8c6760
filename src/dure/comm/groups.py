"""Creation and destruction of process groups, and the operations that the loop needs of one."""

import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from dure.cluster.rank import RankInfo
from dure.comm.startup import Startup
from dure.documents import parse_json
from dure.host.backends import reaches, takes_devices_only
from dure.host.environment import on_loopback
from dure.process.context import StoreAddress
from dure.torchcompat.collectives import abort_process_groups, default_store
from dure.torchcompat.stores import store_at, store_on_socket

MESSAGE_LIMIT_BYTES = 64 * 2**20
"""Maximum bytes of one JSON message."""

_LIFE_SECONDS = 600.0
"""Maximum seconds without a sign of life at the start, if no timeout for collectives is given."""

_TRANSPORTS = {"dure_shm": "shared memory", "gloo": "sockets (gloo)", "nccl": "NCCL"}


class Group(ABC):
    """All ranks of a run. `Solo` is the counterpart for one process without a process group."""

    rank: int
    world_size: int
    transport: str = ""
    """Description of the transport between ranks; empty for a single rank."""

    @abstractmethod
    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Add up `tensor` over all ranks, in place.

        Communication: all_reduce over the group, 2 (P-1)/P of the tensor's bytes sent per rank, blocking.
        """

    @abstractmethod
    def broadcast(self, tensors: list[torch.Tensor], source_rank: int = 0) -> None:
        """Overwrite the tensors with those of `source_rank`. Communication: one broadcast each, blocking."""

    @abstractmethod
    def all_gather_json(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, by rank; JSON, never pickled. Communication: two all_gather, blocking."""

    def broadcast_bytes(self, data: bytearray, source_rank: int) -> None:
        """Overwrite bytes with those of `source_rank`; all ranks pass the same number. A group of one does nothing.

        Communication: one broadcast, blocking.
        """

    def subgroup(self, ranks: list[int] | None = None) -> dist.ProcessGroup | None:
        """Create a torch group of some of the ranks with the backend and the timeout of the run.

        Every rank calls this with the same ranks. Ranks outside get an object that is not a group; a single rank gets
        None.

        Args:
            ranks: Ranks of the group; None for all.

        Communication: the rendezvous of the group, blocking.
        """
        return None

    def startup(self, report: Callable[[str], None] | None = None) -> Startup:
        """Return the steps of a start that may take any time on some ranks; see `Startup`. Called once per group."""
        return Startup(self.rank, self.world_size, None, timeout_seconds=0.0, report=report)

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def close(self) -> None:
        """Leave in an orderly way: all ranks wait for each other, then the group is destroyed."""

    @abstractmethod
    def abandon(self) -> None:
        """Leave without the others, after a failure."""


class Solo(Group):
    """Group of one rank, in which everything is already reduced."""

    rank = 0
    world_size = 1

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Leave the tensor unchanged."""

    def broadcast(self, tensors: list[torch.Tensor], source_rank: int = 0) -> None:
        """Leave the tensors unchanged."""

    def all_gather_json(self, message: Any) -> list[Any]:
        """Return the only message, after the same JSON conversion as in a real group."""
        return [json.loads(json.dumps(message))]

    def barrier(self) -> None:
        """Return immediately, because there is no other rank."""

    def close(self) -> None:
        """Do nothing: there is nothing to leave."""

    def abandon(self) -> None:
        """Do nothing: there is nothing to leave."""


class ProcessGroup(Group):
    """torch process group, with messages and reductions on the backend's own device."""

    def __init__(
        self,
        device: torch.device,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout_seconds: float | None = None,
        is_one_host: bool = False,
    ) -> None:
        """Use the default group, or another existing one.

        Args:
            device: Device of this rank.
            process_group: Existing group; None for the default group.
            timeout_seconds: Timeout of the collectives of its subgroups; None for torch's own.
            is_one_host: Whether all ranks are on one host; sockets of subgroups then use only the loopback interface.
        """
        self.process_group = process_group
        """Torch's group; None for the default group."""
        self._timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
        self._is_one_host = is_one_host
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.backend: str = dist.get_backend(process_group)
        """Torch's name of the backend."""
        why_gloo = getattr(process_group or dist.group.WORLD, "why_gloo", "")
        shared = f"sockets (gloo), not shared memory: {why_gloo}" if why_gloo else ""
        self.transport = shared or _TRANSPORTS.get(self.backend.rpartition(":")[2], self.backend)
        # a device's backend (NCCL) takes no host tensors; gloo prefers host memory for small messages
        self._is_of_devices = takes_devices_only(self.backend)
        self._message_device = device if self._is_of_devices else torch.device("cpu")

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Add up over all ranks, in place."""
        moved = tensor.to(self._message_device)
        dist.all_reduce(moved, group=self.process_group)
        if moved is not tensor:
            tensor.copy_(moved)

    def broadcast(self, tensors: list[torch.Tensor], source_rank: int = 0) -> None:
        """Overwrite with the tensors of one rank."""
        for tensor in tensors:
            own = tensor.detach()
            is_taken = own.device == self._message_device or self._reaches(own.device.type)
            # gloo would send the bytes of a non-contiguous tensor as they are in memory
            moved = (own if is_taken else own.to(self._message_device)).contiguous()
            dist.broadcast(moved, group=self.process_group, group_src=source_rank)
            if moved is not own and self.rank != source_rank:
                own.copy_(moved)

    def _reaches(self, kind: str) -> bool:
        return reaches(self.backend, kind)

    def broadcast_bytes(self, data: bytearray, source_rank: int) -> None:
        """Overwrite bytes with those of one rank."""
        if not data:
            return
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        moved = tensor.to(self._message_device)
        dist.broadcast(moved, group=self.process_group, group_src=source_rank)
        if moved is not tensor:
            tensor.copy_(moved)

    def all_gather_json(self, message: Any) -> list[Any]:
        """Gather one JSON message from each rank."""
        data = json.dumps(message).encode()
        if len(data) > MESSAGE_LIMIT_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is over the limit of {MESSAGE_LIMIT_BYTES}")
        device = self._message_device
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64, device=device), group=self.process_group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        gathered = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded, group=self.process_group)
        return [
            parse_json(bytes(tensor[: int(size)].cpu().numpy()), may_repeat_keys=True, most_depth=None)
            for tensor, size in zip(gathered, sizes, strict=True)
        ]

    def startup(self, report: Callable[[str], None] | None = None) -> Startup:
        """Return the steps of a start, over the store of the default group."""
        seconds = self._timeout.total_seconds() if self._timeout is not None else _LIFE_SECONDS
        store = default_store()
        return Startup(self.rank, self.world_size, store, timeout_seconds=seconds, report=report)

    def barrier(self) -> None:
        """Wait for all ranks."""
        arrived = torch.zeros(1, device=self._message_device)
        self.all_reduce_sum(arrived)
        arrived.item()  # a device only queues operations; reading the result waits

    def subgroup(self, ranks: list[int] | None = None) -> dist.ProcessGroup:
        """Create a torch group of some ranks."""
        with _gloo_on_loopback() if self._is_one_host else nullcontext():
            return cast(dist.ProcessGroup, dist.new_group(ranks, timeout=self._timeout))

    def close(self) -> None:
        """Wait for all ranks, then destroy the group."""
        self.barrier()
        dist.destroy_process_group(self.process_group)

    def abandon(self) -> None:
        """Destroy the group at once, because an interpreter that exits with a live group may abort."""
        if self._is_of_devices and self.process_group is None:
            abort_process_groups()
        else:
            dist.destroy_process_group(self.process_group)


def open_group(
    rank: RankInfo, address: StoreAddress | None, *, device: torch.device, backend: str, timeout_seconds: float
) -> ProcessGroup:
    """Create the default process group of this process; dure creates it in no other way.

    Args:
        rank: Rank of this process.
        address: Address of the run's own store; None for a single process.
        device: Device of this rank.
        backend: torch's name of the backend.
        timeout_seconds: Timeout of the store and of every collective.
    """
    timeout = timedelta(seconds=timeout_seconds)
    store: dist.Store
    if address is None:
        assert rank.world_size == 1
        store, prefix = dist.HashStore(), "alone"
    else:
        if rank.rank == 0 and address.listen_fd is not None:
            store = store_on_socket(socket.socket(fileno=address.listen_fd), timeout)
        else:
            store = store_at(address.host, address.port, timeout)
        prefix = address.prefix
    with _gloo_on_loopback() if rank.is_one_host else nullcontext():
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(prefix, store),
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timeout,
            device_id=device if takes_devices_only(backend) else None,
        )
    return ProcessGroup(device, timeout_seconds=timeout_seconds, is_one_host=rank.is_one_host)


def _gloo_on_loopback() -> AbstractContextManager[None]:
    """Prevent gloo from listening on the address of the host's name, which it looks up when a group is created."""
    return on_loopback("GLOO_SOCKET_IFNAME")
