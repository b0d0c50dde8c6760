"""Who am I among the processes of a run, and where do they meet."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dure.errors import EnvironmentLacks

# One row per launcher: RankInfo's fields in order, by the variable that carries each.
_VARIABLES = {
    "torchrun": ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """Position of one process in a run, in torchrun's words."""

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "RankInfo | None":
        """Read the position that a launcher gave this process.

        Returns:
            The position, or None when no known launcher started this process.

        Raises:
            EnvironmentLacks: Some of a launcher's variables are set and others are missing or no numbers.
        """
        environ = os.environ if environ is None else environ
        for launcher, names in _VARIABLES.items():
            if not {"RANK", "WORLD_SIZE"} <= environ.keys():
                continue
            missing = [name for name in names if name not in environ]
            values = [environ.get(name, "") for name in names]
            if missing or not all(value.isdecimal() for value in values):
                seen = ", ".join(f"{name}={environ.get(name)}" for name in names)
                raise EnvironmentLacks(
                    f"the environment looks like {launcher}'s but is incomplete ({seen}): start the script with "
                    f"{launcher}, or unset RANK and WORLD_SIZE to run alone"
                )
            rank, local_rank, node_rank, world_size, local_world_size = map(int, values)
            return cls(
                rank=rank,
                local_rank=local_rank,
                node_rank=node_rank,
                world_size=world_size,
                local_world_size=local_world_size,
            )
        return None

    def to_environment(self) -> dict[str, str]:
        """Return torchrun's variables for this position, for user code that reads them."""
        values = (self.rank, self.local_rank, self.node_rank, self.world_size, self.local_world_size)
        return {name: str(value) for name, value in zip(_VARIABLES["torchrun"], values, strict=True)}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAddress:
    """Where the run's key-value store listens, and under which prefix this attempt keeps its keys.

    A dead attempt's keys must never be read by the next one, so the prefix carries run and round.
    """

    host: str
    port: int
    prefix: str
    listen_fd: int | None = None
    """On the rank that serves the store: a bound, listening socket handed down by the supervisor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a launcher tells a worker about its place among the others."""

    rank: RankInfo = RankInfo()
    store: StoreAddress | None = None
    """None: the store that torchrun's environment names, or none at all for a process alone."""
    threads: int
    """CPU threads for this process."""
    interface: str | None = None
    """The network interface that leads to the other hosts of the run."""
    is_supervised: bool
    """Whether a supervisor of ours speaks for all ranks; otherwise each process speaks for itself."""
    report_fd: int | None = None
    """Where a rank that fails tells its supervisor why: a descriptor of an unnamed file."""
    round: int = 0
    """How often the ranks of this run were started before, by the same supervisor."""
    heartbeat_fd: int | None = None
    """Memory in which ranks tell where they are: `dure.heartbeat`."""
    stacks_fd: int | None = None
    """Where this rank's Python stacks are written when it is asked for them or crashes."""
    questions_fd: int | None = None
    """A socket on which the supervisor asks what this rank is at."""
    snapshot_fds: tuple[int, ...] = ()
    """Of each rank, memory that outlives it: what is written there is there in the next round."""
