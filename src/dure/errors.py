"""Exceptions of dure, as one tree.

DureError                     exit code 1
├── Misuse                    2   the user can mend it; shown as one sentence, never with a traceback
│   ├── SpecInvalid               settings that cannot be; all faults at once
│   ├── TaskInvalid               the task file, a missing method, a wrong return
│   ├── DataInvalid               empty, iterable or missing data
│   ├── RunInvalid                no such run, a name that is taken or leaves the runs folder
│   ├── CheckpointMismatch        a checkpoint of another model
│   ├── DiskFull                  bytes needed and bytes free
│   └── UnusedParameters          parameters that got no gradient under DDP
├── EnvironmentLacks          3   a device, a library, an operating-system ability
├── CheckpointDamaged         1   torn, altered or bit-flipped; named
├── CheckpointNotWritten      1   the system refused to write one, for another reason than room
├── LossNotFinite             1   rank, step and sample indices
├── WeightsNotFinite          1   the parameter, where a checkpoint was to be written
├── RanksDisagree             1   model, order, dtype, seed or versions differ between ranks
├── ReplicasDiverged          1   ranks that held the same hold something else: which, where, since when
├── PeerLost                  1   another rank went away; never the first cause
│   └── GroupShrank               1   one that the others can do without: what was begun is begun again
├── WorkerFailed              1   the verdict over all ranks
├── SubmissionRefused         1   a cluster's own command did not take a job
├── RunsDiffer                4   `dure diff` found where two runs part
├── FoundProblem              4   `dure doctor --fail-on` found something as grave as that
└── Interrupted               129, 130 or 143; 75 after SIGUSR1
"""

from collections.abc import Mapping, Sequence

from dure.terminal import printable

DONE, FAILED, MISUSE, ENVIRONMENT, FOUND = 0, 1, 2, 3, 4


class DureError(Exception):
    """Base of every error that dure raises on purpose."""

    exit_code: int = FAILED

    def _render_traceback_(self) -> list[str]:
        """Return what IPython and notebooks show: the message has the user's own lines, ours say nothing to them."""
        return [f"{type(self).__name__}: {self}"]

    def __str__(self) -> str:
        """Return the message as it may be shown: it has what files, tasks and other ranks say in it."""
        return printable(super().__str__())


class Misuse(DureError):
    """Something that the user can mend."""

    exit_code = MISUSE


class SpecInvalid(Misuse):
    """Settings that cannot be. `faults` holds every one of them, in words."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(self.faults))


class TaskInvalid(Misuse):
    """A task that cannot be loaded, lacks a method or returns the wrong thing."""


class DataInvalid(Misuse):
    """Data that is missing, empty or of a kind that a run cannot be defined on."""


class RunInvalid(Misuse):
    """A folder that is no run, a name that is taken, or one that leaves the runs folder."""


class CheckpointMismatch(Misuse):
    """A checkpoint whose tensors are not the model's."""


class DiskFull(Misuse):
    """Too little free space for what has to be written."""


class UnusedParameters(Misuse):
    """Parameters that took no part in the loss although the strategy waits for their gradients."""


class EnvironmentLacks(DureError):
    """This machine or installation lacks something that was asked for."""

    exit_code = ENVIRONMENT


class CheckpointDamaged(DureError):
    """A checkpoint that is not, byte for byte, what was written."""


class CheckpointNotWritten(DureError):
    """A checkpoint that the system refused to write although there was room; those before it are untouched."""


class StateChanged(DureError):
    """Tensor that changed while a checkpoint copied it, before the optimiser's step: the copy fits no position."""


class LossNotFinite(DureError):
    """A NaN or infinite loss on some rank. `culprits` holds each such rank with the samples of its share."""

    def __init__(self, message: str, culprits: Sequence[Mapping[str, object]] = ()) -> None:
        self.culprits = tuple(culprits)
        super().__init__(message)


class WeightsNotFinite(DureError):
    """A NaN or infinite weight where a checkpoint was to be written; those before it are untouched."""


class RanksDisagree(DureError):
    """Ranks of one run that do not agree on what is being run."""


class ReplicasDiverged(DureError):
    """Ranks that must hold the same, bit by bit, and do not."""

    def __init__(self, message: str, go_back_to: int | None = None) -> None:
        self.go_back_to = go_back_to
        """Samples seen when all agreed last, where the run is to go on from there; None if it is to end."""
        super().__init__(message)


class PeerLost(DureError, RuntimeError):
    """Another rank went away in the middle of a collective. A consequence, never a first cause.

    A RuntimeError, as torch's own are, and where a backend raises it with their word (closed, timeout): scripts catch
    the one and look for the other.
    """


class GroupShrank(PeerLost):
    """A rank that the others can do without went away while they exchanged something: they begin it again."""


class WorkerFailed(DureError):
    """One or more ranks failed; the message is the verdict, the first causal failure in front."""

    def __init__(self, verdict: str, exit_code: int = FAILED) -> None:
        self.exit_code = exit_code
        super().__init__(verdict)


class SubmissionRefused(DureError):
    """A cluster's own command (`sbatch`, `kubectl`) said no; its words are the message."""


class RunsDiffer(DureError):
    """Two runs that were compared and are not the same."""

    exit_code = FOUND


class FoundProblem(DureError):
    """A diagnosis found what it was asked to fail on."""

    exit_code = FOUND


class Interrupted(DureError):
    """The run was asked to stop by a signal and can be resumed."""

    def __init__(self, message: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(message)
