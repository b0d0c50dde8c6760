"""Parts common to several commands: `--json`, and which process prints."""

from typing import Annotated

from cyclopts import Parameter

from dure.cluster.rank import RankInfo
from dure.errors import DureError

JsonFlag = Annotated[
    bool, Parameter(name="--json", negative=(), show_default=False, help="print one JSON object and nothing else")
]


def is_reporter() -> bool:
    """Return whether this process prints for all ranks; under a launcher only rank 0 does."""
    try:
        place = RankInfo.from_environment()
    except DureError:
        return True  # the rank is unknown, which must be reported
    return place is None or place.rank == 0


def installed_version() -> str:
    """Return the version of dure."""
    import importlib.metadata  # a seventh of the time of `dure --help`, which does not need it

    try:
        return importlib.metadata.version("dure")
    except importlib.metadata.PackageNotFoundError:
        return "unknown: dure is not installed, only on the path"
