"""Memory of a run that outlives its ranks."""

import os

from dure.launch.rounds.request import Launch
from dure.launch.worker.worker_process import unnamed_file
from dure.process.heartbeat import Heartbeats


class SurvivingMemory:
    """Memory that outlives the ranks of a run, held by the supervisor and in no file system."""

    def __init__(self, launch: Launch) -> None:
        self.heartbeat_fd = unnamed_file("dure-heartbeats")
        nodes = launch.nodes
        most_ranks = max(nodes.most * nodes.me.num_ranks, nodes.world_size)
        self.heartbeats = Heartbeats(self.heartbeat_fd, most_ranks)
        num_snapshots = nodes.me.num_ranks if launch.restarts.most else 0
        self.snapshot_fds = tuple(unnamed_file(f"dure-snapshot{rank}") for rank in range(num_snapshots))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that a process must inherit to use it."""
        return self.heartbeat_fd, *self.snapshot_fds

    def has_snapshots(self) -> bool:
        """Return whether ranks have left snapshots."""
        return any(os.fstat(descriptor).st_size for descriptor in self.snapshot_fds)

    def forget(self) -> None:
        """Discard all snapshots: other nodes have continued meanwhile from another state."""
        for descriptor in self.snapshot_fds:
            os.ftruncate(descriptor, 0)

    def close(self) -> None:
        """Release the memory."""
        for descriptor in self.descriptors:
            os.close(descriptor)
