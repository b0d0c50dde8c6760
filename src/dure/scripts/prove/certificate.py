"""Certificate of a proof: what was compared, where the runs first differ, and why."""

import hashlib
import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

VERSION = 1

EQUAL, DIFFERS, UNPROVEN = "equal", "differs", "unproven"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Reason for which several ranks compute something else than one."""

    id: str
    """Name of the kind, such as `gradients_not_averaged`."""
    what: str
    """Sentence on the difference."""
    cure: str
    """Sentence on what to change."""
    line: str = ""
    """Place in the script, as `file:line`; empty if it is of no single line."""
    step: int | None = None
    """First step in which it shows, from 1; None if it is of no step."""
    is_fault: bool = True
    """False if it is a reason that users may accept, such as dropout's draws."""


@dataclass(frozen=True, kw_only=True)
class ComparedStep:
    """Largest relative differences of one step."""

    step: int
    optimizer: int
    num_samples: int | None
    """Samples of all ranks since the last step; None if they are unknown."""
    gradients_between_ranks: float
    gradients: float
    """Difference of the first rank's gradients from those of one process."""
    weights: float
    buffers: float
    loss: float | None
    """Mean loss of the ranks; None if there is none."""
    loss_of_one: float | None
    rates: list[float]
    rates_of_one: list[float]
    is_sketch: bool = False
    """True if sketches of gradients and weights were compared, as after the first steps."""


@dataclass(kw_only=True)
class Certificate:
    """Answer to whether a script computes on several ranks what it computes on one."""

    script: str
    arguments: list[str]
    nproc: int
    verdict: str = UNPROVEN
    """`equal`, `differs`, or `unproven` if one process could not be given the samples of the ranks."""
    precision: str = "float64"
    tolerance: float = 0.0
    """Largest relative difference that counts as rounding."""
    steps: list[ComparedStep] = field(default_factory=list)
    num_sketched_steps: int = 0
    """Further steps that were compared by sketches, without a difference."""
    num_followed_steps: int = 0
    """Steps for which the samples were followed."""
    causes: list[Cause] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes on what was changed for the comparison, and on what could not be seen."""

    def to_json(self) -> dict[str, Any]:
        """Return the certificate with versions and the digest of the script."""
        path = Path(self.script)
        return {
            "version": VERSION,
            **asdict(self),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None,
            "versions": {
                "python": platform.python_version(),
                **{name: metadata.version(name) for name in ("torch", "dure")},
            },
        }
