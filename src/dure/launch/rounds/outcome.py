"""Outcome of a job: how all of its ranks ended, and why there was no further round."""

from dataclasses import dataclass
from pathlib import Path

from dure.failures.verdict import Verdict, WorkerEnd, judge, stop_signal
from dure.launch.hangs.diagnosis import HangVerdict


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Ends of all ranks of a job, on all nodes."""

    ends: list[WorkerEnd]
    """Empty when a signal came before any rank was started."""
    signal: int | None = None
    """The first signal that asked the run to stop, if any."""
    refusal: str | None = None
    """Reason why the ranks were not started once more, where the failure alone does not say it."""
    hang: HangVerdict | None = None
    """Verdict for which the supervisor ended ranks that were not getting on."""
    lost: str | None = None
    """Sentence about a node that went away, or did not go on."""
    is_cut_off: bool = False
    """True if this node could not reach the one that leads when it ended."""

    @property
    def stopped_by(self) -> int | None:
        """The signal that stopped the run, sent to a supervisor or to a rank."""
        return self.signal if self.signal is not None else stop_signal(self.ends)

    def judge(self, folder: Path, *, cure: str = "", is_script: bool = False) -> Verdict | None:
        """Find the first cause among the ranks that failed; see `failures.verdict.judge`."""
        return judge(folder, self.ends, self.stopped_by, cure=cure, is_script=is_script)
