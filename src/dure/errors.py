"""Exceptions of dure, as one tree.

DureError                     exit code 1
├── Misuse                    2   the user can fix it; shown as one sentence, never with a traceback
│   ├── SpecInvalid               invalid settings; all faults at once
│   ├── TaskInvalid               the task file, a missing method, a wrong return
│   ├── DataInvalid               empty, iterable or missing data
│   ├── RunInvalid                no such run, a name that is taken or leaves the runs folder
│   ├── CheckpointMismatch        a checkpoint of another model
│   ├── DiskFull                  bytes needed and bytes free
│   └── UnusedParameters          parameters that got no gradient under DDP
├── EnvironmentLacks          3   a device, a library, an operating-system ability
├── CheckpointDamaged         1   torn, altered or bit-flipped; named
├── CheckpointNotWritten      1   the system refused to write one, for a reason other than space
├── StateChanged              1   a tensor that changed while a checkpoint copied it
├── LossNotFinite             1   rank, step and sample indices
├── WeightsNotFinite          1   the parameter, when a checkpoint is written
├── RanksDisagree             1   model, order, dtype, seed or versions differ between ranks
├── ReplicasDiverged          1   replicas differ: which, where, since when
├── PeerLost                  1   another rank is gone; never the first cause
│   └── GroupShrank               1   a rank that the others can do without; the exchange is repeated
├── WorkerFailed              1   the verdict over all ranks
├── SubmissionRefused         1   a cluster's own command refused a job
├── RunsDiffer                4   `dure diff` found where two runs diverge
├── FoundProblem              4   `dure doctor` or `dure lint` found something as grave as --fail-on
└── Interrupted               129, 130 or 143; 75 after SIGUSR1
"""

import errno
from collections.abc import Mapping, Sequence

from dure.terminal import printable

DONE, FAILED, MISUSE, ENVIRONMENT, FOUND = 0, 1, 2, 3, 4


class DureError(Exception):
    """Base class of all errors that dure raises deliberately."""

    exit_code: int = FAILED

    def _render_traceback_(self) -> list[str]:
        """Return the traceback for IPython and notebooks: the message has the user's lines, and dure's do not help."""
        return [f"{type(self).__name__}: {self}"]

    def __str__(self) -> str:
        """Return the message with control characters escaped: it may contain text of files, tasks and other ranks."""
        return printable(super().__str__())


class Misuse(DureError):
    """Error that the user can fix."""

    exit_code = MISUSE


class SpecInvalid(Misuse):
    """Invalid settings. `faults` lists all of them as sentences."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(self.faults))


class TaskInvalid(Misuse):
    """Task that cannot be loaded, lacks a method or returns a wrong value."""


class DataInvalid(Misuse):
    """Data that is missing, empty or of a kind for which a run is not defined."""


class RunInvalid(Misuse):
    """Folder that is not a run, or a name that is taken or leaves the runs folder."""


class CheckpointMismatch(Misuse):
    """Checkpoint with other tensors than the model's."""


class DiskFull(Misuse):
    """Lack of free space for data that must be written."""

    CURE = "free some space, raise a quota or `ulimit -f` if that is what is used up, or use another --runs-dir"

    @staticmethod
    def is_reported_by(error: BaseException) -> bool:
        """Return whether an error of the operating system is about space, a quota or a file's largest size."""
        return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UnusedParameters(Misuse):
    """Parameters without a part in the loss, although the strategy waits for their gradients."""


class EnvironmentLacks(DureError):
    """Lack of something on this machine, or in this installation, that was requested."""

    exit_code = ENVIRONMENT


class CheckpointDamaged(DureError):
    """Checkpoint that differs from what was written."""


class CheckpointNotWritten(DureError):
    """Checkpoint that the system refused to write although there was space; earlier ones are untouched."""


class StateChanged(DureError):
    """Tensor that changed while a checkpoint copied it, before the optimiser's step: the copy fits no position."""


class LossNotFinite(DureError):
    """NaN or infinite loss on some ranks. `culprits` contains each such rank with the samples of its share."""

    def __init__(self, message: str, culprits: Sequence[Mapping[str, object]] = ()) -> None:
        self.culprits = tuple(culprits)
        super().__init__(message)


class WeightsNotFinite(DureError):
    """NaN or infinite weight found when a checkpoint is written; earlier ones are untouched."""


class RanksDisagree(DureError):
    """Disagreement of ranks of one run on what they run."""


class ReplicasDiverged(DureError):
    """Divergence of replicas that must be bitwise identical."""

    def __init__(self, message: str, go_back_to: int | None = None) -> None:
        self.go_back_to = go_back_to
        """Samples seen when the replicas last agreed, if the run continues from there; None if it ends."""
        super().__init__(message)


class PeerLost(DureError, RuntimeError):
    """Loss of another rank during a collective. A consequence, never a first cause.

    It is a RuntimeError, as torch's own errors are, and has the backend's wording (closed, Timed out) if a backend
    raises it, because scripts catch that class and search for that wording.
    """


class GroupShrank(PeerLost):
    """Loss of a rank that the others can do without, during an exchange: they repeat it."""


class WorkerFailed(DureError):
    """Failure of one or more ranks; the message is the verdict, which begins with the first cause."""

    def __init__(self, verdict: str, exit_code: int = FAILED) -> None:
        self.exit_code = exit_code
        super().__init__(verdict)


class SubmissionRefused(DureError):
    """Refusal by a cluster's own command (`sbatch`, `kubectl`); its output is the message."""


class RunsDiffer(DureError):
    """Difference between two runs that were compared."""

    exit_code = FOUND


class FoundProblem(DureError):
    """Finding of a diagnosis on which it was asked to fail."""

    exit_code = FOUND


class Interrupted(DureError):
    """Stop of the run by a signal; the run can be resumed."""

    def __init__(self, message: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def message_of(error: BaseException) -> str:
    """Return an exception's message; a substitute, as Python's own tracebacks have it, if its `__str__` fails."""
    try:
        return str(error)
    except BaseException:  # even a call of `sys.exit`, by which the rank would leave without a word
        return "<exception str() failed>"
