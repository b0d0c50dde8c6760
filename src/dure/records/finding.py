"""Finding of a diagnosis."""

from dataclasses import dataclass

SEVERITIES = ("note", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding for the user."""

    id: str
    """Name of its kind, the same in every run."""
    severity: str
    """`error`: the run did not complete; `warning`: it did, or may, but something was wrong; `note`."""
    what: str
    """Finding in one sentence or a few lines, of which the first is a summary."""
    evidence: tuple[str, ...] = ()
    """Measurements that show it, with their units."""
    files: tuple[str, ...] = ()
    """Files of the run that show it."""
    cause: str | None = None
    remedy: str | None = None
    gain_fraction: float | None = None
    """Fraction of the run's time that the remedy is expected to save; None if it is not about time."""
