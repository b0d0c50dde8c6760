"""Outcome of a job: how all of its ranks ended, and the reason why there was no further round."""

from dataclasses import dataclass
from pathlib import Path

from dure.failures.verdict import Verdict, WorkerEnd, judge, stop_signal
from dure.launch.hangs.diagnosis import HangVerdict


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Ends of all ranks of a job, on all nodes."""

    ends: list[WorkerEnd]
    """Ends of the ranks; empty if a signal arrived before any rank was started."""
    signal: int | None = None
    """First signal that requested a stop; None if there was none."""
    refusal: str | None = None
    """Reason why the ranks were not restarted, if the failure alone does not show it."""
    hang: HangVerdict | None = None
    """Verdict for which the supervisor ended ranks that hung."""
    lost: str | None = None
    """Sentence about a node that is lost or did not continue."""
    is_cut_off: bool = False
    """True if this node could not reach the leader when it ended."""

    @property
    def stopped_by(self) -> int | None:
        """Signal that stopped the run, sent to a supervisor or to a rank."""
        return self.signal if self.signal is not None else stop_signal(self.ends)

    def judge(self, folder: Path, *, cure: str = "", is_script: bool = False) -> Verdict | None:
        """Find the first cause among the ranks that failed; see `failures.verdict.judge`."""
        return judge(folder, self.ends, self.stopped_by, cure=cure, is_script=is_script)
