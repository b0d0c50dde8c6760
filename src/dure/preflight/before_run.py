"""Preflight as the first part of a run, which does not start if something is missing."""

from dure.errors import EnvironmentLacks
from dure.preflight.all_checks import preflight
from dure.preflight.settings import PreflightSettings
from dure.terminal import print_status


def refuse_unless_ready(settings: PreflightSettings, *, is_quiet: bool = False) -> None:
    """Make all checks, print the results, and continue only if nothing is missing.

    Args:
        settings: The planned run.
        is_quiet: Whether to print nothing if it continues.

    Raises:
        EnvironmentLacks: Checks failed; lists each fault with its cure.
    """
    report = preflight(settings)
    if report.failures:
        lines = [f"  {finding.name}: {report.sentence_of(finding)}" for finding in report.failures]
        raise EnvironmentLacks("\n".join([f"the preflight says: {report.verdict}", *lines]))
    if is_quiet:
        return
    for finding in report.warnings:
        print_status(f"preflight: warning: {finding.name}: {report.sentence_of(finding)}")
    print_status(f"preflight: {report.verdict}")
