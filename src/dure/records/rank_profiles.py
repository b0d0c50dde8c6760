"""Files of the profiles of a run's ranks: what torch.profiler saw, and facts about it."""

from pathlib import Path

PROFILES = "profiles"
"""Folder of the profiles in a run folder."""
TRACE = "trace.json.gz"
"""Trace of all ranks in a run folder."""


def operators_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's operators, as torch.profiler writes them."""
    return folder / PROFILES / f"rank{rank}.json.gz"


def facts_path(folder: Path, rank: int) -> Path:
    """Return the path of the facts about a rank's profile."""
    return folder / PROFILES / f"rank{rank}-facts.json"
