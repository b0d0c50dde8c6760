"""Interface of experiment trackers, and the table of those that are known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from dure.errors import SpecInvalid

PACKAGES = {"mlflow": "mlflow", "wandb": "wandb", "tensorboard": "tensorboard"}
"""Package that each tracker needs, which is also the name of the extra that installs it."""

_MODULES = {
    "mlflow": "dure.tracking.to_mlflow",
    "wandb": "dure.tracking.to_wandb",
    "tensorboard": "dure.tracking.to_tensorboard",
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """Values of a run at one step."""

    step: int
    time: float
    """Seconds since the epoch."""
    values: Mapping[str, float]
    """Values by their names: `train/…`, `val/…`, `perf/…`, and `samples_seen`."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Run that is handed over."""

    folder: Path
    name: str
    parameters: Mapping[str, str]
    """Settings of the resolved spec."""


class Tracker(Protocol):
    """Client of one experiment tracker. Every call may fail, and may take as long as it wants."""

    def begin(self, subject: Subject, identity: str | None) -> str | None:
        """Begin or continue a run, and return its identity.

        Args:
            subject: Run that is handed over.
            identity: Identity from an earlier call for the same run folder; None if there is none.
        """

    def write(self, points: Sequence[Point]) -> None:
        """Hand over points, in the order of their times."""

    def end(self, status: str) -> None:
        """End the run; `status` is `completed`, `interrupted`, `failed`, or `killed`."""


def make_tracker(name: str) -> Tracker:
    """Return a new client of a known tracker; its package is imported here."""
    return cast(Tracker, import_module(_MODULES[name]).make())


def check_packages(names: Sequence[str]) -> None:
    """Refuse trackers whose package is not installed.

    Raises:
        SpecInvalid: One is missing.
    """
    missing = [name for name in names if not _is_installed(PACKAGES[name])]
    if missing:
        raise SpecInvalid(
            [f"log is {name}, which needs its package: pip install 'dure[{PACKAGES[name]}]'" for name in missing]
        )


def _is_installed(package: str) -> bool:
    """Return whether a package is installed; a folder of that name, such as W&B's `./wandb`, is not one."""
    found = find_spec(package)
    return found is not None and found.origin is not None
