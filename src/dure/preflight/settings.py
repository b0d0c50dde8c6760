"""Settings of a preflight: the machine-related part of a planned run."""

from dataclasses import dataclass
from pathlib import Path

from dure.errors import SpecInvalid
from dure.host.backends import fault_of_backend
from dure.host.device_kinds import known_kinds
from dure.host.devices import unknown_kind
from dure.launch.nodes.rendezvous import NodeSettings
from dure.spec.fields import MOST_PROCESSES, MOST_SECONDS, MOST_THREADS

DEFAULT_TIMEOUT_SECONDS = 30.0
_COMMANDS = ("dure preflight", "dure run", "dure train")


@dataclass(frozen=True, kw_only=True)
class PreflightSettings:
    """Planned run on this host."""

    num_ranks: int
    """Number of processes on this host."""
    num_devices: int
    """Number of devices that they need here."""
    device: str
    """Kind of device: `cpu`, or one of torch's accelerators."""
    backend: str = "auto"
    """Backend: `auto`, `gloo`, `dure_shm`, or that of the devices."""
    threads: int | None = None
    """CPU threads of each process; None to divide the cores of the host."""
    num_workers: int = 0
    """Loader processes of each rank."""
    runs_dir: Path = Path("runs")
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    """Time limit of all collectives together, in seconds."""
    start: str = "auto"
    share_devices: bool = False
    several: NodeSettings | None = None
    """Settings of the other hosts; None for a run on one host."""
    command: str = _COMMANDS[0]
    """Called command, which must be the same on all hosts."""
    needs_shared_folder: bool = False
    """True if all hosts must see one runs folder; otherwise it is only reported."""

    @property
    def num_nodes(self) -> int:
        """Return the number of hosts of the run."""
        return 1 if self.several is None else self.several.num_nodes


def check_settings(settings: PreflightSettings) -> None:
    """Refuse invalid settings.

    Raises:
        SpecInvalid: Lists all faults.
    """
    faults = []
    if not 1 <= settings.num_ranks <= MOST_PROCESSES:
        faults.append(f"nproc is {settings.num_ranks} but must be from 1 to {MOST_PROCESSES}")
    if not 0 < settings.timeout_seconds <= MOST_SECONDS:
        words = f"above 0 and of at most {MOST_SECONDS}"
        faults.append(f"timeout is {settings.timeout_seconds:g} but must be a number of seconds {words}")
    if not 0 <= settings.num_workers <= MOST_PROCESSES:
        words = f"of at least 0 and of at most {MOST_PROCESSES}"
        faults.append(f"num_workers is {settings.num_workers} but must be a whole number {words}")
    if settings.threads is not None and not 0 < settings.threads <= MOST_THREADS:
        faults.append(f"threads is {settings.threads} but must be a whole number above 0 and of at most {MOST_THREADS}")
    if settings.device not in known_kinds():
        faults.append(unknown_kind(settings.device))
    elif fault := fault_of_backend(settings.backend, settings.device):
        faults.append(fault)
    if settings.backend == "dure_shm" and settings.num_nodes > 1:
        faults.append(f"backend is dure_shm, which is memory of one host, but nnodes is {settings.num_nodes}: use gloo")
    if faults:
        raise SpecInvalid(faults)
