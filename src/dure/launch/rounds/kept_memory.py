"""Memory of a run that outlives its ranks."""

import os

from dure.launch.rounds.request import Launch
from dure.launch.worker.worker_process import unnamed_file
from dure.process.heartbeat import Heartbeats


class KeptMemory:
    """Memory of a run that outlives its ranks: the supervisor holds it, in no file system."""

    def __init__(self, launch: Launch) -> None:
        self.heartbeat_fd = unnamed_file("dure-heartbeats")
        most_ranks = launch.world_size if launch.nodes is None else launch.nodes.most * launch.num_processes
        self.heartbeats = Heartbeats(self.heartbeat_fd, max(most_ranks, launch.world_size))
        num_snapshots = launch.num_processes if launch.restarts.most else 0
        self.snapshot_fds = tuple(unnamed_file(f"dure-snapshot{rank}") for rank in range(num_snapshots))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that a process must inherit to use it."""
        return self.heartbeat_fd, *self.snapshot_fds

    def has_begun(self, num_ranks: int) -> bool:
        """Return whether a rank has begun a step after the first one."""
        return any(self.heartbeats.last(rank).step > 0 for rank in range(num_ranks))

    def has_snapshots(self) -> bool:
        """Return whether ranks have left snapshots."""
        return any(os.fstat(descriptor).st_size for descriptor in self.snapshot_fds)

    def forget(self) -> None:
        """Forget all snapshots: others have gone on meanwhile, from another one."""
        for descriptor in self.snapshot_fds:
            os.ftruncate(descriptor, 0)

    def close(self) -> None:
        """Give it back."""
        for descriptor in self.descriptors:
            os.close(descriptor)
