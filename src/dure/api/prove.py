"""Proof that a script computes on several ranks what it computes on one: `dure prove`."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dure.api.script import ScriptSettings, run_script
from dure.cluster.rank import read_launcher
from dure.errors import Misuse, SpecInvalid, WorkerFailed
from dure.scripts.prove.certificate import Certificate

if TYPE_CHECKING:
    from dure.scripts.prove.recording import Recording

_OF_TYPES = re.compile(r"dtype|[Ss]calar type|Float|Double|Half")
"""Words of errors that another precision may mend."""
_LOGS = re.compile(r"; see logs/ in \S+")
"""Hint at a folder that is removed."""
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
                ranks = proof.observed("ranks", precision)
                break
            except WorkerFailed as error:
                if precision == precisions[-1] or not _OF_TYPES.search(str(error)):
                    raise WorkerFailed(_LOGS.sub("", str(error)), error.exit_code) from None
        certificate = Certificate(
            script=settings.script, arguments=list(settings.arguments), nproc=settings.nproc, precision=precision
        )
        if precision != precisions[0]:
            certificate.notes.append("the script fails in float64, so float32 is compared, with a larger tolerance")
        if not any(recording.num_steps for recording in ranks):
            raise Misuse(
                f"{settings.script} takes no step of a torch optimiser in its ranks, so nothing can be compared: give "
                "a script that trains (one that starts processes of its own is not seen)"
            )
        if not all(recording.steps for recording in ranks):
            certificate.notes.append("some ranks take no step")
        one, problem = proof.one(precision, ranks)
        if problem:
            certificate.notes.append(problem)
        judge(certificate, ranks, one)
        if _is_of_dropout(certificate, ranks):
            _without_dropout(certificate, proof, precision)
        if any(recording.is_repeatable is False for recording in ranks):
            certificate.notes.append(
                "the data set gives the same sample otherwise each time (by a clock, or draws that no seed repeats): "
                "what the ranks were given was compared, and another run has other samples"
            )
    if output is not None:
        _write(certificate, output)
    return certificate


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
    if output is not None and not output.absolute().parent.is_dir():
        faults.append(f"output is {output}, but there is no such folder: make it first")
    if (launched := read_launcher()) is not None and launched.rank.world_size > 1:
        faults.append(
            f"{launched.by} started several processes, but a proof starts its ranks itself: start one process"
        )
    if faults:
        raise SpecInvalid(faults)


def _is_of_dropout(certificate: Certificate, ranks: Sequence["Recording"]) -> bool:
    return any(
        cause.id in ("other_draws", "mean_of_means", "batchnorm_statistics") for cause in certificate.causes
    ) and any(recording.dropouts for recording in ranks)


def _without_dropout(certificate: Certificate, proof: "_Proof", precision: str) -> None:
    """Compare once more without dropout, whose draws are other ones on each rank."""
    from dure.scripts.prove.verdict import judge

    ranks = proof.observed("ranks-without", precision, has_dropout=False)
    one, problem = proof.one(precision, ranks, has_dropout=False)
    if one is None:
        certificate.notes.append(problem)
        return
    again = Certificate(
        script=certificate.script, arguments=certificate.arguments, nproc=certificate.nproc, precision=precision
    )
    judge(again, ranks, one)
    certificate.steps, certificate.causes, certificate.verdict = again.steps, again.causes, again.verdict
    certificate.notes.append(
        "dropout was left out for the comparison: its draws are other ones on each rank, which is a reason and no fault"
    )


class _Proof:
    """Observed runs of a script, each in a folder of its own."""

    def __init__(self, settings: ProofSettings, folder: Path) -> None:
        self._settings, self._folder = settings, folder

    def observed(
        self, name: str, precision: str, *, has_dropout: bool = True, fed_from: Path | None = None
    ) -> list["Recording"]:
        from dure.scripts.prove.feeding import read_recordings
        from dure.scripts.prove.recording import Order

        settings = self._settings
        folder = self._folder / f"{name}-{precision}"
        folder.mkdir()
        order = Order(
            num_steps=settings.steps,
            num_sample_steps=settings.steps if fed_from else max(settings.steps, settings.sample_steps),
            is_float64=precision == "float64",
            has_dropout=has_dropout,
            fed_from=None if fed_from is None else str(fed_from),
        )
        order.write(folder)
        run_script(
            ScriptSettings(
                script=settings.script,
                arguments=self._arguments(1 if fed_from is None else settings.nproc),
                is_module=settings.is_module,
                nproc=str(settings.nproc if fed_from is None else 1),
                runs_dir=self._folder / "runs",
                name=folder.name,
                observer=(_OBSERVER, str(folder)),
                is_silent=True,
                on_hang="stop",
            )
        )
        return read_recordings(folder)

    def one(
        self, precision: str, ranks: Sequence["Recording"], *, has_dropout: bool = True
    ) -> tuple["Recording | None", str]:
        """Return the recording of one process that was given the samples of all ranks, or None and a reason."""
        source = self._folder / f"{'ranks' if has_dropout else 'ranks-without'}-{precision}"
        if not any(recording.fetches for recording in ranks):
            return None, (
                "the script takes its batches not from a torch.utils.data.DataLoader, so one process cannot be given "
                "them: only the ranks were compared with each other"
            )
        try:
            found = self.observed(
                "one" if has_dropout else "one-without", precision, has_dropout=has_dropout, fed_from=source
            )
        except WorkerFailed as error:
            first_line = str(error).splitlines()[0]
            return None, f"the script fails in one process that is given the samples of all ranks: {first_line}"
        if found and found[0].steps:
            return found[0], ""
        return None, (
            "one process takes no step: if the script goes on from a checkpoint that the ranks have just written, give "
            "it an argument for another folder, or remove the checkpoint and let it write none"
        )

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
