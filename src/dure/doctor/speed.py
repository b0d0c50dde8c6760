"""Times of a run, as far as its records have them, and findings based on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dure.doctor.setup import Setup
from dure.doctor.step_times import StepTimes
from dure.records.events import OperationsCounted, SlowThreads
from dure.records.finding import Finding
from dure.records.usage import UsageRecord

_GRAVE = 0.3
"""Expected gain from which a finding is a warning."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Times of a run, as far as its records have them."""

    setup: Setup
    times: StepTimes
    evaluation_seconds: float
    num_evaluations: int
    stall_seconds: float
    """Seconds for which training stood still for checkpoints."""
    checkpoint_bytes: Sequence[int | None]
    """Size of each checkpoint; None if unknown."""
    slow_threads: Sequence[SlowThreads]
    operations: OperationsCounted | None
    """Operations of a step; None if they were not counted."""
    gradient_bytes: float | None
    """Bytes of the gradients of a rank; None if unknown."""
    num_buckets: float | None
    """Number of buckets in which they are reduced; None if unknown."""
    largest_bucket_bytes: float | None
    """Size up to which a bucket is filled; None if unknown."""
    step_seconds: float
    """Seconds of all steps of the attempt."""
    usage: Mapping[int, Sequence[UsageRecord]] = field(default_factory=dict)
    """Use of the machine by each rank during the attempt, as far as it is on record."""

    @property
    def total_seconds(self) -> float:
        """Seconds of steps, evaluations and stalls for checkpoints."""
        return self.step_seconds + self.evaluation_seconds + self.stall_seconds

    @property
    def step_fraction(self) -> float:
        """Fraction of the time that steps take."""
        return self.step_seconds / self.total_seconds

    @property
    def exposed_seconds(self) -> float:
        """Mean seconds of communication in a step on the rank that comes last, which waits for no other."""
        return float(self.times.seconds["sync"].min(axis=0).mean())

    @property
    def computing(self) -> float:
        """Fraction of a step that the rank which computes longest computes."""
        return float((self.mean("forward_backward") + self.mean("optimizer")).max()) / self.wall

    @property
    def wall(self) -> float:
        """Mean seconds of a step."""
        return float(self.times.wall.mean())

    def mean(self, part: str) -> np.ndarray:
        """Return the mean seconds of a part of a step on each rank, `(R,)`."""
        means: np.ndarray = self.times.seconds[part].mean(axis=1)
        return means


def finding_of(
    speed: Speed, name: str, gain: float, what: str, evidence: Sequence[str], cause: str, remedy: str
) -> Finding:
    """Return a finding, a warning if the gain expected of its remedy is large."""
    return Finding(
        id=name,
        severity="warning" if gain >= _GRAVE else "note",
        what=what,
        evidence=tuple(evidence),
        files=tuple(f"rank{rank}.jsonl" for rank in speed.times.ranks[:8]),
        cause=cause,
        remedy=remedy,
        gain_fraction=round(gain, 3),
    )


def as_ms(seconds: float) -> str:
    """Return seconds as text, in milliseconds below one second."""
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
