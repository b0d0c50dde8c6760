"""Job for any cluster."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dure.errors import EnvironmentLacks, Misuse, SubmissionRefused

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Training job, as ranks on nodes."""

    name: str
    run: Path
    """Folder of the run, as a path on the cluster."""
    words: tuple[str, ...]
    """Arguments of `dure train` for the first start."""
    resume_words: tuple[str, ...]
    """Arguments of `dure train` when the job is restarted."""
    nodes: int = 1
    tasks_per_node: int = 1
    """Number of ranks per node."""
    cpus_per_task: int | None = None
    gpus_per_task: int = 0
    time_seconds: int | None = None
    python: str
    """Interpreter with dure installed, as a path on the cluster."""
    folder: Path
    """Working directory, to which relative paths refer."""

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.tasks_per_node

    def train_command(self, words: Sequence[str]) -> tuple[str, ...]:
        """Return the command of one rank."""
        return self.python, "-m", "dure", "train", *words


def seconds_of(text: str) -> int:
    """Parse a duration in Slurm's notation: 90 (minutes), 90:00, 1:30:00, 1-12 (days, hours), 1-12:30:00.

    Raises:
        Misuse: The text is not such a duration.
    """
    match = _TIME.fullmatch(text)
    if match is None or not any(int(number) for number in match.groups() if number):
        raise Misuse(f"time is {text!r} but must be minutes, H:MM:SS or D-HH:MM:SS, such as 90, 1:30:00 or 2-00:00:00")
    numbers = [int(number) for number in (match["first"], match["second"], match["third"]) if number is not None]
    begins_with_hours = match["days"] is not None or len(numbers) == 3
    units = (3600, 60, 1) if begins_with_hours else (60, 1)
    return int(match["days"] or 0) * 86400 + sum(n * unit for n, unit in zip(numbers, units, strict=False))


def slurm_time(seconds: int) -> str:
    """Format a duration as D-HH:MM:SS, without rounding."""
    days, rest = divmod(seconds, 86400)
    return f"{days}-{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"


def run_command(command: Sequence[str], *, given: str, lacking: str) -> str:
    """Run a command of the cluster with a text as its input, and return its output.

    Args:
        command: Command and its arguments.
        given: Text for its stdin.
        lacking: Advice if there is no such command.

    Raises:
        EnvironmentLacks: There is no such command.
        SubmissionRefused: The command fails.
    """
    try:
        done = subprocess.run(list(command), input=given, capture_output=True, text=True)
    except OSError as error:
        raise EnvironmentLacks(f"{command[0]} cannot be run here ({error.strerror}): {lacking}") from None
    if done.returncode != 0:
        output = " ".join((done.stderr or done.stdout).split()) or "no word"
        raise SubmissionRefused(f"{command[0]} did not take the job (exit code {done.returncode}): {output[:2000]}")
    return done.stdout
