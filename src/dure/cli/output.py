"""Parts that commands have in common: `--json`, and which process prints."""

from typing import Annotated

from cyclopts import Parameter

from dure.cluster.rank import RankInfo
from dure.errors import DureError

JsonFlag = Annotated[
    bool, Parameter(name="--json", negative=(), show_default=False, help="print one JSON object and nothing else")
]


def speaks_for_all() -> bool:
    """Return whether this process prints what all ranks have in common: under a launcher only rank 0 does."""
    try:
        place = RankInfo.from_environment()
    except DureError:
        return True  # it is not known which rank this is, and that has to be said
    return place is None or place.rank == 0
