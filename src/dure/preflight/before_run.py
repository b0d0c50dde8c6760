"""A preflight as the first part of a run, which does not start when something is missing."""

from dure.errors import EnvironmentLacks
from dure.preflight.all_checks import preflight
from dure.preflight.settings import PreflightSettings
from dure.terminal import tell


def refuse_unless_ready(settings: PreflightSettings, *, is_quiet: bool = False) -> None:
    """Make all checks, say how they went, and go on only if nothing is missing.

    Args:
        settings: The run to come.
        is_quiet: Whether to say nothing if it goes on.

    Raises:
        EnvironmentLacks: What is missing, each with its cure.
    """
    report = preflight(settings)
    if report.failures:
        lines = [f"  {finding.name}: {report.told(finding)}" for finding in report.failures]
        raise EnvironmentLacks("\n".join([f"the preflight says: {report.verdict}", *lines]))
    if is_quiet:
        return
    for finding in report.warnings:
        tell(f"preflight: warning: {finding.name}: {report.told(finding)}")
    tell(f"preflight: {report.verdict}")
