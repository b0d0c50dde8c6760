"""Batch script for Slurm: `srun` starts the ranks, and the job requeues itself when it must leave its nodes."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from dure.errors import Misuse
from dure.process.stop_signals import RESUMABLE
from dure.submit.job import Job, run_command, slurm_time
from dure.terminal import shell_word

STRAGGLER_SECONDS = 60
"""Seconds that the other ranks have after one has ended, before srun ends them, since a rank without peers may hang."""


REQUEUE_SECONDS = 300
"""Seconds of sleep, longer than Slurm needs to end a script whose job it has requeued."""

_SIGNALLED_TOO_EARLY = 128 + signal.SIGUSR1
"""Exit code of a rank that received SIGUSR1 before it could handle it, while Python was starting."""

# Slurm counts a job that exits within the grace time of a preemption as failed, and would not requeue it. The script
# therefore asks whether the job was preempted, and requeues it with any exit code, as Slurm does if there is no grace
# time. Without a grace time, no job is requeued by a partition that cancels.
_GOES_BACK = rf"""# whether the ranks went for another job or the time limit, and this job is to come back
goes_back() {{
    local job
    (( code )) || return
    job=$(SLURM_TIME_FORMAT=standard scontrol show job --oneliner "$SLURM_JOB_ID")
    if [[ $job == *" JobState="* && $job != *" JobState=RUNNING "* ]]; then
        exec sleep {REQUEUE_SECONDS}  # cancelled, or in the queue again: Slurm ends this script
    elif [[ $job == *" PreemptTime="[0-9]* ]]; then
        [[ $(scontrol show partition --oneliner "$SLURM_JOB_PARTITION") != *" PreemptMode=CANCEL "* ]]
    else
        (( code == {RESUMABLE} || code == {_SIGNALLED_TOO_EARLY} ))
    fi
}}"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """Settings specific to Slurm."""

    partition: str | None = None
    grace_seconds: int = 120
    """Seconds before its time limit at which a job is notified, so that it can write a checkpoint."""
    lines: tuple[str, ...] = ()
    """Further `#SBATCH` lines, without that prefix."""


def check_line(line: str) -> None:
    """Refuse a text that is not a single option of sbatch.

    Raises:
        Misuse: It is not an option, or has more than one line.
    """
    if not line.startswith("-") or not line.isprintable():
        raise Misuse(f"--sbatch {line!r} is no option of sbatch: write one line that begins with -, as --account=me")


def script(job: Job, options: SlurmOptions) -> str:
    """Return the batch script.

    Exit code 75 of the ranks means that they were asked to stop and wrote a checkpoint; the script then requeues the
    job. It also does so if the job is preempted and ends within its grace time. Slurm itself does so when it takes away
    the job's nodes at once. In both cases Slurm counts the job as restarted, and it resumes the run.
    """
    return "\n".join(
        [
            "#!/bin/bash",
            "# written by `dure submit --to slurm`",
            *(f"#SBATCH {line}" for line in _options(job, options)),
            "",
            f"train=({_words(job.train_command(job.words))})",
            "if (( ${SLURM_RESTART_COUNT:-0} > 0 )); then",
            f"    train=({_words(job.train_command(job.resume_words))})",
            "fi",
            "",
            _GOES_BACK,
            "",
            f'srun --wait={STRAGGLER_SECONDS} --kill-on-bad-exit=0{_cpus(job)} "${{train[@]}}"',
            "code=$?",
            "if goes_back; then",
            '    echo "dure: job $SLURM_JOB_ID goes back into the queue and goes on later" >&2',
            "    # Slurm ends this script now: an exit of its own could be taken for that of the next start",
            "    # Incomplete: a job that was cancelled meanwhile stays cancelled",
            f'    scontrol requeue Incomplete "$SLURM_JOB_ID" && exec sleep {REQUEUE_SECONDS}',
            "fi",
            "exit $code",
            "",
        ]
    )


def _words(command: Sequence[str]) -> str:
    return " ".join(map(shell_word, command))


def _options(job: Job, options: SlurmOptions) -> Sequence[str]:
    lines = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.tasks_per_node}",
    ]
    if job.cpus_per_task is not None:
        lines.append(f"--cpus-per-task={job.cpus_per_task}")
    if job.gpus_per_task:
        # per node: ranks of a node that see all of its devices can copy between them directly
        lines.append(f"--gpus-per-node={job.gpus_per_task * job.tasks_per_node}")
    if job.time_seconds is not None:
        lines.append(f"--time={slurm_time(job.time_seconds)}")
    if options.partition is not None:
        lines.append(f"--partition={shell_word(options.partition)}")
    lines += [
        "--requeue",
        f"--signal=USR1@{options.grace_seconds}",
        "--open-mode=append",
        f"--output={job.name}-%j.out",
        f"--chdir={shell_word(job.folder)}",
    ]
    return [*lines, *options.lines]


def _cpus(job: Job) -> str:
    # srun of 22.05 and later does not inherit it from the job
    return "" if job.cpus_per_task is None else f" --cpus-per-task={job.cpus_per_task}"


def submit(text: str) -> str:
    """Submit a batch script to Slurm and return the job number.

    Raises:
        EnvironmentLacks: There is no `sbatch`.
        SubmissionRefused: Slurm refuses it.
    """
    output = run_command(["sbatch", "--parsable"], given=text, lacking="submit from a login node, or look at --dry-run")
    return output.strip().partition(";")[0]
