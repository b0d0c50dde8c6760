"""State of one round, as the nodes of the run report it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dure.launch.worker.verdict import WorkerEnd


@dataclass
class RoundNews:
    """All that was heard of the round that runs, on one node."""

    endings: set[str] = field(default_factory=set)
    """What others said of their first rank that ended: `failed`, `killed`, `stopped` or `ended`."""
    has_told_ending: bool = False
    shaken: str | None = None
    """Why this round is to end and the next one to begin with other nodes."""
    steps: dict[int, int] = field(default_factory=dict)
    """Of ranks that ended: the step that they were in."""
    ends_of: dict[int, list[WorkerEnd]] = field(default_factory=dict)
    """How ranks ended, by node rank."""
    done: set[int] = field(default_factory=set)
    """Nodes all of whose ranks have ended."""
    looks: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    """What was said of looking at ranks that hang, with the node."""

    @property
    def ends(self) -> list[WorkerEnd]:
        """Return how ranks of all nodes ended, as far as it is known here."""
        return [end for node_rank in sorted(self.ends_of) for end in self.ends_of[node_rank]]

    def take_looks(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Return what nodes said of looking, each once; see `launch/rounds/node_hang_survey.py`."""
        taken, self.looks = self.looks, []
        return taken
