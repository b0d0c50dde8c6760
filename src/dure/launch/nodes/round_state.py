"""State of one round, as reported by the nodes of the run."""

from dataclasses import dataclass, field

from dure.failures.verdict import WorkerEnd
from dure.launch.nodes.messages import SurveyMessage


@dataclass
class RoundNews:
    """Reports on the current round that one node has received."""

    endings: set[str] = field(default_factory=set)
    """Reports of other nodes on their first rank that ended: `failed`, `killed`, `stopped` or `ended`."""
    has_sent_ending: bool = False
    interrupted_because: str | None = None
    """Reason to end this round and begin the next one with other nodes."""
    steps: dict[int, int] = field(default_factory=dict)
    """Step of each rank at its end, by rank."""
    ends_of: dict[int, list[WorkerEnd]] = field(default_factory=dict)
    """Ends of ranks, by node rank."""
    done: set[int] = field(default_factory=set)
    """Nodes whose ranks have all ended."""
    with_snapshots: set[int] = field(default_factory=set)
    """Those of them that have snapshots of ranks in memory."""
    survey_messages: list[tuple[int, SurveyMessage]] = field(default_factory=list)
    """Messages about probes of ranks that hang, each with the node rank of its sender."""

    @property
    def ends(self) -> list[WorkerEnd]:
        """Return how ranks of all nodes ended, as far as known here."""
        return [end for node_rank in sorted(self.ends_of) for end in self.ends_of[node_rank]]

    @property
    def has_begun(self) -> bool:
        """Return whether a rank that ended had begun a step after the first one."""
        return any(step > 0 for step in self.steps.values())

    def take_survey_messages(self) -> list[tuple[int, SurveyMessage]]:
        """Return the nodes' messages about probes, each once; see `launch/rounds/node_hang_survey.py`."""
        taken, self.survey_messages = self.survey_messages, []
        return taken
