"""Proof that a script computes on several ranks what it computes on one: `dure prove`."""

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dure.api.script import ScriptSettings, run_script
from dure.cluster.rank import read_launcher
from dure.documents import read_json
from dure.errors import Misuse, SpecInvalid, WorkerFailed
from dure.failures.record import read_failure
from dure.host.devices import count_cores
from dure.records.run_dir import RunDir
from dure.scripts.prove.certificate import DIFFERS, Cause, Certificate

if TYPE_CHECKING:
    from dure.scripts.prove.recording import Order, Recording

_OF_TYPES = re.compile(r"dtype|[Ss]calar type|Float|Double|Half")
"""Words of errors that another precision may mend."""
_LOGS = re.compile(r"; see logs/ in \S+")
"""Hint at a folder that is removed."""
_WITHOUT_DROPOUT = (
    "dropout was left out for the comparison: its draws are other ones on each rank, which is a reason and no fault"
)
_BEHIND_STATISTICS = "with BatchNorm's running statistics in the place of those of a batch, nothing else differs"
_BEHIND_DRAWS = "with random numbers that are the same for the same samples, nothing else differs"
_OBSERVER = "dure.scripts.prove.observer"
"""Module that each rank loads before the script."""


@dataclass(frozen=True, kw_only=True)
class ProofSettings:
    """Settings of `dure prove`."""

    script: str
    arguments: Sequence[str] = ()
    is_module: bool = False
    nproc: int = 2
    steps: int = 6
    sample_steps: int = 400
    precision: str = "auto"
    """`float64`, `float32` for the script's own, or `auto` for float64 where the script allows it."""
    batch_size_argument: str | None = None
    """Argument of the script with the batch of a rank, which is multiplied for one process."""
    timeout_seconds: float = 300.0
    """Seconds that each run of the script may take; what it has done until then is compared."""
    face: str | None = None
    """Library whose interface the script finds in dure, such as `horovod`; None for none."""


def prove(settings: ProofSettings, output: Path | None = None) -> Certificate:
    """Run a script on several ranks and on one, with the same samples, and compare them step by step.

    Args:
        settings: Script, its arguments, and how it is compared.
        output: File that receives the certificate; None for none.

    Raises:
        Misuse: There is no such script, a setting is invalid, or the script takes no step of an optimiser.
        WorkerFailed: The script fails on several ranks.
    """
    _check(settings, output)
    from dure.scripts.prove.verdict import judge

    with _own_folder() as folder:
        precisions = ["float64", "float32"] if settings.precision == "auto" else [settings.precision]
        proof = _Proof(settings, folder)
        for precision in precisions:
            try:
                ranks = proof.ranks(_Way(precision=precision))
                break
            except WorkerFailed as error:
                if precision == precisions[-1] or not _OF_TYPES.search(str(error)):
                    raise WorkerFailed(_LOGS.sub("", str(error)), error.exit_code) from None
        certificate = Certificate(
            script=settings.script, arguments=list(settings.arguments), nproc=settings.nproc, precision=precision
        )
        if precision != precisions[0]:
            certificate.notes.append("the script fails in float64, so float32 is compared, with a larger tolerance")
        way = _Way(precision=precision)
        if any(recording.dropouts for recording in ranks):
            certificate.notes.append(_WITHOUT_DROPOUT)
            way = replace(way, has_dropout=False)
            ranks = proof.ranks(way)
        if (reason := _nothing_done(settings, ranks)) is not None:
            certificate.notes.append(reason)
        else:
            one, problem = proof.one(way, ranks)
            if problem:
                certificate.notes.append(problem)
            judge(certificate, ranks, one)
            if proof.hang and not certificate.causes:
                certificate.causes.append(_of_hang(proof.hang, ranks))
                certificate.verdict = DIFFERS
            found = {cause.id for cause in certificate.causes}
            if "batchnorm_statistics" in found:
                _look_behind(certificate, proof, replace(way, has_statistics=False), _BEHIND_STATISTICS)
            if "other_draws" in found:
                _look_behind(certificate, proof, replace(way, follows_samples=True), _BEHIND_DRAWS)
        certificate.notes += _notes_on_ranks(settings, ranks)
    if output is not None:
        _write(certificate, output)
    return certificate


def _nothing_done(settings: ProofSettings, ranks: Sequence["Recording"]) -> str | None:
    """Return a sentence if no rank has taken a step because the time was over; None if there are steps.

    Raises:
        Misuse: The script takes no step at all.
    """
    if any(recording.num_steps for recording in ranks):
        return None
    if any(recording.end == "time" for recording in ranks):
        return (
            f"no rank takes a step of an optimiser within {settings.timeout_seconds:g} s (--timeout): give the script "
            "less data or a smaller model, or more time"
        )
    raise Misuse(
        f"{settings.script} takes no step of a torch optimiser in its ranks, so nothing can be compared: give "
        "a script that trains (one that starts processes of its own is not seen, and one that goes on from a "
        "checkpoint may have nothing left to do)"
    )


def _notes_on_ranks(settings: ProofSettings, ranks: Sequence["Recording"]) -> Iterator[str]:
    if any(recording.num_steps for recording in ranks) and not all(recording.steps for recording in ranks):
        yield "some ranks take no step"
    if any(recording.end == "time" for recording in ranks) and any(recording.num_steps for recording in ranks):
        least = min(recording.num_steps for recording in ranks)
        yield (
            f"the ranks were ended after {settings.timeout_seconds:g} s (--timeout) and {least} "
            f"step{'s' * (least != 1)}, so what comes after is not seen"
        )
    if any(recording.is_repeatable is False for recording in ranks):
        yield (
            "the data set gives the same sample otherwise each time (by a clock, or draws that no seed repeats): "
            "what the ranks were given was compared, and another run has other samples"
        )


def _of_hang(reason: str, ranks: Sequence["Recording"]) -> Cause:
    first = min(ranks, key=lambda recording: recording.num_steps)
    return Cause(
        id="ranks_hang",
        what=f"the ranks hang after {first.num_steps} steps: {reason}",
        cure="let all ranks make the same calls in the same order, and leave loops at the same step",
        line=first.steps[-1].line if first.steps else "",
        step=first.num_steps + 1,
    )


def _look_behind(certificate: Certificate, proof: "_Proof", way: "_Way", note: str) -> None:
    """Compare once more without what a cause may hide others behind, and add these, or else a note."""
    from dure.scripts.prove.verdict import judge

    try:
        ranks = proof.ranks(way)
    except WorkerFailed:
        return
    one, _ = proof.one(way, ranks)
    if one is None:
        return
    again = judge(
        Certificate(script=certificate.script, arguments=[], nproc=certificate.nproc, precision=certificate.precision),
        ranks,
        one,
        has_samples=False,
    )
    behind = [cause for cause in again.causes if cause.id not in {known.id for known in certificate.causes}]
    if way.follows_samples and any(_draw_apart(one, recording) for recording in ranks):
        return  # there are draws of another size in one process, which cannot be made the same
    certificate.causes += behind
    if not behind:
        certificate.notes.append(note)


def _draw_apart(one: "Recording", rank: "Recording") -> bool:
    """Return whether draws that do not follow the samples differ before the end of what both have recorded."""
    return any(state != other for state, other in zip(one.draw_states, rank.draw_states, strict=False))


def _write(certificate: Certificate, output: Path) -> None:
    temporary = output.with_name(f".{output.name}.part")
    try:
        temporary.write_text(json.dumps(certificate.to_json(), indent=2) + "\n", encoding="utf-8")
        temporary.rename(output)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise Misuse(f"{output} cannot be written ({error.strerror}): give a file in a folder that is there") from None


@contextmanager
def _own_folder() -> Iterator[Path]:
    # a TemporaryDirectory would also be removed by each forked rank at its end
    folder = Path(tempfile.mkdtemp(prefix="dure-prove-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check(settings: ProofSettings, output: Path | None) -> None:
    """Refuse settings with which nothing could be proven.

    Raises:
        SpecInvalid: There are such settings; the message lists all of them.
    """
    faults = [
        f"{name} is {value} but must be from {least} to {most}"
        for name, value, least, most in (
            ("nproc", settings.nproc, 2, 64),
            ("steps", settings.steps, 1, 1000),
            ("sample_steps", settings.sample_steps, 1, 1_000_000),
        )
        if not least <= value <= most
    ]
    if not 0 < settings.timeout_seconds < math.inf:
        faults.append(f"timeout is {settings.timeout_seconds:g} but must be a number of seconds above 0")
    if output is not None and not output.absolute().parent.is_dir():
        faults.append(f"output is {output}, but there is no such folder: make it first")
    if (launched := read_launcher()) is not None and launched.rank.world_size > 1:
        faults.append(
            f"{launched.by} started several processes, but a proof starts its ranks itself: start one process"
        )
    if faults:
        raise SpecInvalid(faults)


@dataclass(frozen=True, kw_only=True)
class _Way:
    """Way in which the script is run for a comparison."""

    precision: str
    has_dropout: bool = True
    has_statistics: bool = True
    follows_samples: bool = False

    @property
    def name(self) -> str:
        """Name of the runs' folders."""
        left_out = "-no-dropout" * (not self.has_dropout) + "-no-statistics" * (not self.has_statistics)
        return f"{self.precision}{left_out}{'-draws' * self.follows_samples}"


class _Proof:
    """Observed runs of a script, each in a folder of its own."""

    def __init__(self, settings: ProofSettings, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self.hang = ""
        """Reason for which the ranks hang, if they do so for certain."""

    def ranks(self, way: _Way) -> list["Recording"]:
        """Return the recordings of all ranks.

        Raises:
            WorkerFailed: The script fails. It does not if a rank is left alone in a call that needs all.
        """
        settings = self._settings
        name = f"ranks-{way.name}"
        order = self._order(way, num_sample_steps=max(settings.steps, settings.sample_steps))
        try:
            return self._observed(name, order, nproc=settings.nproc, arguments=list(settings.arguments))
        except WorkerFailed:
            found = self._left_alone(name)
            if found is None:
                raise
            return found

    def _order(self, way: _Way, *, num_sample_steps: int) -> "Order":
        from dure.scripts.prove.recording import Order

        return Order(
            num_steps=self._settings.steps,
            num_sample_steps=num_sample_steps,
            is_float64=way.precision == "float64",
            has_dropout=way.has_dropout,
            has_statistics=way.has_statistics,
            follows_samples=way.follows_samples,
            most_seconds=self._settings.timeout_seconds,
        )

    def _observed(self, name: str, order: "Order", *, nproc: int, arguments: list[str]) -> list["Recording"]:
        from dure.scripts.prove.checkpoints import put_back
        from dure.scripts.prove.feeding import read_recordings

        folder = self._folder / name
        folder.mkdir()
        order.write(folder)
        run = ScriptSettings(
            script=self._settings.script,
            arguments=arguments,
            is_module=self._settings.is_module,
            nproc=str(nproc),
            runs_dir=self._folder / "runs",
            name=name,
            # as many in one process as in a rank: the same sums, and no threads that wait for a busy core
            threads=max(1, count_cores() // self._settings.nproc),
            observer=(_OBSERVER, str(folder)),
            is_silent=True,
            on_hang="stop",
            face=self._settings.face,
        )
        try:
            run_script(run)
        finally:
            put_back(folder)
        return read_recordings(folder)

    def _left_alone(self, name: str) -> list["Recording"] | None:
        """Return the recordings of ranks that failed because they do not make the same calls, or in the end; else None.

        Such ranks were lost by others because their script was over, or hang with them.
        """
        from dure.scripts.prove.feeding import read_recordings

        found, run = read_recordings(self._folder / name), RunDir(self._folder / "runs" / name)
        if len(found) < self._settings.nproc or not any(recording.num_steps for recording in found):
            return None
        failures = [read_failure(run.path, recording.rank) for recording in found]
        if any(failure is not None and not failure.is_consequence for failure in failures):
            return None
        for recording, failure in zip(found, failures, strict=True):
            if failure is not None or recording.end == "":
                recording.end = "failed"
        if any(recording.end in ("script", "time") for recording in found):
            return found
        self.hang = _certain_hang(run)
        return found if self.hang else None

    def one(self, way: _Way, ranks: Sequence["Recording"]) -> tuple["Recording | None", str]:
        """Return the recording of one process that was given the samples of all ranks, or None and a reason."""
        if not any(fetch.is_trained for recording in ranks for fetch in recording.fetches):
            return None, (
                "the script takes its batches not from a torch.utils.data.DataLoader, so one process cannot be given "
                "them: only the ranks were compared with each other"
            )
        least = min(recording.num_steps for recording in ranks if recording.num_steps)
        order = replace(self._order(way, num_sample_steps=least), fed_from=str(self._folder / f"ranks-{way.name}"))
        try:
            found = self._fed(f"one-{way.name}", order)
            if _takes_in_turns(found, ranks):
                found = self._fed(f"one-{way.name}-in-turns", replace(order, in_turns=True))
        except WorkerFailed as error:
            first_line = _LOGS.sub("", str(error).splitlines()[0])
            return None, f"the script fails in one process that is given the samples of all ranks: {first_line}"
        if found is not None and found.steps:
            return found, ""
        if found is not None and found.end == "time":
            return None, f"one process takes no step within {self._settings.timeout_seconds:g} s (--timeout)"
        return None, (
            "one process takes no step: if the script goes on from what the ranks have just written (only files of "
            "torch.save and safetensors are put back), give it an argument for another folder, or let it write nothing"
        )

    def _fed(self, name: str, order: "Order") -> "Recording | None":
        arguments = self._arguments(self._settings.nproc)
        return next(iter(self._observed(name, order, nproc=1, arguments=arguments)), None)

    def _arguments(self, factor: int) -> list[str]:
        """Return the script's arguments, with the batch of one process multiplied."""
        name, arguments = self._settings.batch_size_argument, list(self._settings.arguments)
        if name is None or factor == 1:
            return arguments
        for place, argument in enumerate(arguments):
            flag, has_value, value = argument.partition("=")
            if flag != name:
                continue
            where = place if has_value else place + 1
            text = value if has_value else arguments[where] if where < len(arguments) else ""
            if not text.isdecimal():
                break
            arguments[where] = f"{flag}={int(text) * factor}" if has_value else str(int(text) * factor)
            return arguments
        raise Misuse(
            f"--batch-size-argument is {name}, but the script's arguments have no number after it: add it to the "
            "arguments, with its default"
        )


def _certain_hang(run: RunDir) -> str:
    """Return the reason of a run's last hang, if it would not have ended by itself; else nothing."""
    for path in reversed(run.hangs()):
        record = read_json(path)
        if record.get("is_certain"):
            return str(record.get("text", "")).partition("\n")[0].partition(": ")[2]
    return ""


def _takes_in_turns(one: "Recording | None", ranks: Sequence["Recording"]) -> bool:
    """Return whether one process reads as many more batches for a step as there are ranks, each as large as a rank's.

    Such a script divides the number of accumulated batches by the number of ranks.
    """
    if one is None or (one.end != "script" and not one.steps):
        return False

    def count(recording: "Recording") -> int:
        """Return the number of batches of the first step."""
        return sum(fetch.step == 0 and fetch.is_trained and fetch.samples is not None for fetch in recording.fetches)

    expected = count(ranks[0])
    return expected > 0 and (count(one) == len(ranks) * expected if one.steps else expected > 1)
