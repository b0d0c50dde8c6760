"""Rank, world size and meeting point of a process, as set by launchers in the environment."""

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from dure.cluster.slurm_hostlist import expand_hosts, tasks_on_node
from dure.errors import EnvironmentLacks, Misuse

Environment = Mapping[str, str]

PORTS = range(10_000, 30_000)
"""Ports at which ranks meet if none is given: below the kernel's ephemeral ports, above those of services."""

_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""Lowest step number of Slurm for a batch script, an interactive shell or another step that no srun requested
(slurm.h)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """Position of a process in a run, in torchrun's terms."""

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environment(cls, environ: Environment | None = None) -> "RankInfo | None":
        """Return the position that a launcher gave this process, or None; see `read_launcher`."""
        launched = read_launcher(environ)
        return None if launched is None else launched.rank

    def to_environment(self) -> dict[str, str]:
        """Return torchrun's variables for this position, for user code that reads them."""
        row = LAUNCHERS[0]
        return {row.place[field.name].names[0]: str(getattr(self, field.name)) for field in fields(self)}

    @property
    def is_one_host(self) -> bool:
        """Return whether all ranks are on this host."""
        return self.local_world_size == self.world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingPoint:
    """Address of the store of ranks that a launcher started."""

    host: str
    port: int
    is_served: bool = False
    """True if the launcher serves a store there, as torchrun's agent does; otherwise rank 0 does."""
    job: str = "0"
    """Number or name of the job, if the launcher has one. It separates ranks of other jobs that use the same port or
    share a store."""
    other_host: str | None = None
    """Host with other ranks, if the launcher names one; rank 0 listens on its address towards that host."""
    is_port_given: bool = True
    """True if the environment gave the port; False if it was derived from the job's number."""


# --- table of the variables that each launcher sets


@dataclass(frozen=True, slots=True)
class PlaceVariable:
    """A number of a rank's position in environment variables."""

    names: tuple[str, ...]
    read: Callable[[Environment], str | None]
    """Function that returns the number as text, or None if the variables do not give it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """Launcher of the ranks of a run, with the variables that describe each rank."""

    name: str
    is_here: Callable[[Environment], bool]
    """Function that returns whether variables are set that only this launcher sets. If so, all of its variables are
    required."""
    place: Mapping[str, PlaceVariable]
    """Environment variables of each field of `RankInfo`."""
    host: PlaceVariable
    port: PlaceVariable
    starts_nodes: bool = False
    """True if it starts one process per node, which may be configured to be several ranks."""
    one_is_alone: bool = True
    """True if a single process that it started is treated like one from a shell, which may start ranks of its own."""
    proofs: tuple[str, ...] = ()
    """Variables of which one proves that this launcher set the others, because scripts set torchrun's variables by
    hand. Empty if that is not done for this launcher."""


def _variable(*names: str) -> PlaceVariable:
    """Return a reader of the first of several variables that is set."""
    return PlaceVariable(names, lambda environ: next((environ[name] for name in names if name in environ), None))


def _always(number: int) -> PlaceVariable:
    return PlaceVariable((), lambda environ: str(number))


def _has(*names: str) -> Callable[[Environment], bool]:
    return lambda environ: environ.keys() >= set(names)


def _slurm_tasks_here(environ: Environment) -> str | None:
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"))
    node = environ.get("SLURM_NODEID", "")
    if text is None or not node.isdecimal():
        return None
    try:
        return str(tasks_on_node(text, int(node)))
    except ValueError:
        return ""  # not a number, and so refused


def _is_slurm_task(environ: Environment) -> bool:
    """Return whether this is a task of `srun`; batch scripts and shells have most of the variables too."""
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environ and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _slurm_hosts(environ: Environment) -> list[str]:
    text = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    try:
        return expand_hosts(text) if text else []
    except ValueError as error:
        raise EnvironmentLacks(
            f"Slurm's list of nodes is not understood ({error}): set MASTER_ADDR to the host of rank 0"
        ) from None


def _open_mpi_node(environ: Environment) -> str | None:
    """Compute the node from the rank, because Open MPI does not set it.

    This is correct if nodes are filled one after another with equally many ranks, which is mpirun's default.
    """
    texts = [environ.get(f"OMPI_COMM_WORLD_{name}", "") for name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE")]
    if not all(text.isdecimal() for text in texts) or texts[2] == "0":
        return None
    rank, local_rank, local_world_size = map(int, texts)
    return str((rank - local_rank) // local_world_size)


def _torch_row(name: str, node_rank: str, proofs: tuple[str, ...]) -> Launcher:
    return Launcher(
        name=name,
        is_here=_has("RANK", "WORLD_SIZE"),
        place={
            "rank": _variable("RANK"),
            "local_rank": _variable("LOCAL_RANK"),
            "node_rank": _variable(node_rank),
            "world_size": _variable("WORLD_SIZE"),
            "local_world_size": _variable("LOCAL_WORLD_SIZE"),
        },
        host=_variable("MASTER_ADDR"),
        port=_variable("MASTER_PORT"),
        one_is_alone=False,
        proofs=proofs,
    )


LAUNCHERS = (
    _torch_row("torchrun", "GROUP_RANK", ("TORCHELASTIC_RUN_ID",)),
    _torch_row("Ray Train", "NODE_RANK", ("RAY_RAYLET_PID",)),
    Launcher(
        name="mpirun",
        is_here=_has("OMPI_COMM_WORLD_RANK"),
        place={
            "rank": _variable("OMPI_COMM_WORLD_RANK"),
            "local_rank": _variable("OMPI_COMM_WORLD_LOCAL_RANK"),
            "node_rank": PlaceVariable((), _open_mpi_node),
            "world_size": _variable("OMPI_COMM_WORLD_SIZE"),
            "local_world_size": _variable("OMPI_COMM_WORLD_LOCAL_SIZE"),
        },
        host=_variable("MASTER_ADDR"),
        port=_variable("MASTER_PORT"),
    ),
    Launcher(
        name="srun",
        is_here=_is_slurm_task,
        place={
            "rank": _variable("SLURM_PROCID"),
            "local_rank": _variable("SLURM_LOCALID"),
            "node_rank": _variable("SLURM_NODEID"),
            "world_size": _variable("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
            "local_world_size": PlaceVariable(("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), _slurm_tasks_here),
        },
        host=_variable("MASTER_ADDR"),
        port=_variable("MASTER_PORT"),
    ),
    Launcher(
        name="Kubeflow Trainer",
        is_here=_has("PET_NNODES", "PET_NODE_RANK"),
        place={
            "rank": _variable("PET_NODE_RANK"),
            "local_rank": _always(0),
            "node_rank": _variable("PET_NODE_RANK"),
            "world_size": _variable("PET_NNODES"),
            "local_world_size": _variable("PET_NPROC_PER_NODE"),
        },
        host=_variable("PET_MASTER_ADDR"),
        port=_variable("PET_MASTER_PORT"),
        starts_nodes=True,
    ),
    Launcher(
        # an index alone may be a separate run, as in a sweep: only a process that knows of others is a rank
        name="an Indexed Job",
        is_here=lambda environ: (
            "JOB_COMPLETION_INDEX" in environ and bool({"WORLD_SIZE", "MASTER_ADDR"} & set(environ))
        ),
        place={
            "rank": _variable("JOB_COMPLETION_INDEX"),
            "local_rank": _always(0),
            "node_rank": _variable("JOB_COMPLETION_INDEX"),
            "world_size": _variable("WORLD_SIZE"),
            "local_world_size": _always(1),
        },
        host=_variable("MASTER_ADDR"),
        port=_variable("MASTER_PORT"),
    ),
)
"""Launchers, the innermost first: torchrun may run inside an `srun`, never the other way round."""


# --- reading the variables


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """Launcher's description of this process."""

    by: str
    """Name of the launcher."""
    rank: RankInfo
    cores: int | None = None
    """Number of cores of this process alone; None if the launcher does not set it."""


def read_launcher(environ: Environment | None = None) -> Launched | None:
    """Read the variables of this process's innermost launcher.

    Returns:
        The position and its launcher. None for a process from a shell, and for a single process that a cluster's
            launcher started: it may start ranks of its own.

    Raises:
        EnvironmentLacks: A launcher's variables are incomplete, not numbers or impossible, or two launchers contradict
            each other.
        Misuse: The process stands for a node that is configured to be several ranks.
    """
    environ = os.environ if environ is None else environ
    here = [row for row in LAUNCHERS if row.is_here(environ)]
    for row in here:
        rank = _place(row, environ)
        if rank is None:
            continue
        _refuse_mixture(row, rank, here, environ)
        if row.one_is_alone and rank.world_size == 1:
            return None
        _refuse_impossible(row, rank, environ)
        cores = environ.get("SLURM_CPUS_PER_TASK", "") if row.name == "srun" else ""
        return Launched(by=row.name, rank=rank, cores=int(cores) if cores.isdecimal() else None)
    if here:
        own = " and ".join(here[0].place[kind].names[0] for kind in ("rank", "world_size"))
        raise EnvironmentLacks(
            f"the environment looks like {here[0].name}'s but is incomplete ({_shown(here[0], environ)}): start the "
            f"command with {here[0].name}, or unset {own} to run alone"
        )
    return None


def _place(row: Launcher, environ: Environment) -> RankInfo | None:
    """Read a row; return None if a variable is missing or not a number."""
    texts = {name: one.read(environ) for name, one in row.place.items()}
    if row.starts_nodes and texts["local_world_size"] != "1":
        if texts["world_size"] == "1":
            texts["local_world_size"] = "1"
        else:
            raise Misuse(
                f"{row.name} started this process as a node of {texts['local_world_size']} ranks "
                f"({_shown(row, environ)}), but a rank was expected: start `torchrun -m dure train ...` in its place, "
                "which reads the same variables, or ask for one process per node"
            )
    if not all(value is not None and value.isdecimal() for value in texts.values()):
        return None
    return RankInfo(**{name: int(value) for name, value in texts.items() if value is not None})


def _refuse_mixture(row: Launcher, rank: RankInfo, here: list[Launcher], environ: Environment) -> None:
    """Refuse launchers that contradict each other, unless the chosen one certainly runs inside the other."""
    is_proven = not row.proofs or any(name in environ for name in row.proofs)
    for other in here:
        is_inside = here.index(other) > here.index(row) and is_proven
        pairs = [(getattr(rank, name), other.place[name].read(environ)) for name in ("rank", "world_size")]
        if not is_inside and any(theirs is not None and theirs != str(ours) for ours, theirs in pairs):
            raise EnvironmentLacks(
                f"the environment mixes {row.name}'s variables ({_shown(row, environ)}) with {other.name}'s "
                f"({_shown(other, environ)}), which say something else: unset one or the other"
            )


def _refuse_impossible(row: Launcher, rank: RankInfo, environ: Environment) -> None:
    is_one_of = rank.rank < rank.world_size and rank.local_rank < rank.local_world_size <= rank.world_size
    if not is_one_of:
        raise EnvironmentLacks(
            f"{row.name}'s variables cannot be ({_shown(row, environ)}): a rank is below the number of ranks, on its "
            f"host as in all; start the command with {row.name} again"
        )


def _shown(row: Launcher, environ: Environment) -> str:
    names = dict.fromkeys(name for variable in row.place.values() for name in variable.names)
    return ", ".join(f"{name}={environ.get(name)}" for name in names)


def meeting_point(launched: Launched, environ: Environment | None = None) -> MeetingPoint:
    """Return the address at which a launcher's ranks meet.

    The user's MASTER_ADDR and MASTER_PORT take precedence. Ranks of one host need no host name. Slurm lists the hosts,
    the first of which has rank 0. The port is derived from the number of the job and its step, equally in every
    process.

    Raises:
        EnvironmentLacks: The address or the port is unknown.
    """
    environ = os.environ if environ is None else environ
    row = next(row for row in LAUNCHERS if row.name == launched.by)
    hosts = _slurm_hosts(environ) if row.name in ("mpirun", "srun") and not launched.rank.is_one_host else []
    host, port = row.host.read(environ), row.port.read(environ)
    host = host or ("127.0.0.1" if launched.rank.is_one_host else next(iter(hosts), None))
    job = _job_number(row, environ)
    if host is None or (port is None and job is None):
        missing = [
            variable.names[0] for variable, value in ((row.host, host), (row.port, port or job)) if value is None
        ]
        raise EnvironmentLacks(
            f"{row.name} started {launched.rank.world_size} ranks, but nothing says where they meet: set "
            f"{' and '.join(missing)} for all of them (the host of rank 0, and a free port of it)"
        )
    if port is not None and not (port.isdecimal() and 0 < int(port) < 2**16):
        raise EnvironmentLacks(f"{row.port.names[0]} is {port!r} but must be a port, a number from 1 to 65535")
    return MeetingPoint(
        host=host,
        port=int(port) if port is not None else PORTS[zlib.crc32((job or "").encode()) % len(PORTS)],
        # torchrun sets True, `dure run` 1
        is_served=environ.get("TORCHELASTIC_USE_AGENT_STORE") in ("True", "1") and row is LAUNCHERS[0],
        job=job or environ.get("TORCHELASTIC_RUN_ID", "0"),
        other_host=hosts[-1] if len(hosts) > 1 else None,
        is_port_given=port is not None,
    )


def _job_number(row: Launcher, environ: Environment) -> str | None:
    """Return a text that is equal in all ranks of one start, and different in those of others; None if unknown."""
    if row.name == "mpirun":
        return environ.get("PMIX_NAMESPACE")
    if "SLURM_JOB_ID" not in environ:
        return None
    return ".".join(environ.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
