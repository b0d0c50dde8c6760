"""`dure prove`: whether a script computes on several ranks what it computes on one."""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from dure.cli.output import JsonFlag
from dure.errors import FoundProblem, Misuse
from dure.terminal import print_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dure.scripts.prove.certificate import Certificate

_END_OF_FLAGS = "--"
_STYLES = {"equal": "bold green", "differs": "bold red", "unproven": "bold yellow"}
_WORDS = {
    "equal": "computes on {n} ranks what it computes on one",
    "differs": "does not compute on {n} ranks what it computes on one",
    "unproven": "could not be compared with one process",
}


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens up to `--`, and the verb with the script's arguments after it."""
    if _END_OF_FLAGS not in tokens:
        return tokens, prove
    end = tokens.index(_END_OF_FLAGS)
    return [*tokens[:end], *(f"--argument={each}" for each in tokens[end + 1 :])], prove


def prove(
    script: Annotated[str, Parameter(help="a script that trains with torch, or a module's name with -m")],
    /,
    *,
    nproc: Annotated[int, Parameter(help="ranks that are compared with one process")] = 2,
    arguments: Annotated[
        str | None,
        Parameter(
            help="the script's arguments in one word; or write them after --",
            show_default=False,
            allow_leading_hyphen=True,
        ),
    ] = None,
    argument: Annotated[tuple[str, ...], Parameter(show=False, negative=(), allow_leading_hyphen=True)] = (),
    module: Annotated[
        bool, Parameter(name=("--module", "-m"), negative=(), show_default=False, help="it is a module's name")
    ] = False,
    steps: Annotated[int, Parameter(help="steps whose gradients and weights are compared")] = 6,
    sample_steps: Annotated[int, Parameter(help="steps for which the samples are followed, if it takes so many")] = 400,
    precision: Annotated[
        Literal["auto", "float64", "float32"],
        Parameter(help="convert model and floating batches to float64, or not; auto: where the script allows it"),
    ] = "auto",
    batch_size_argument: Annotated[
        str | None,
        Parameter(
            help="argument with which the script takes the batch of a rank: one process gets that of all",
            show_default=False,
            allow_leading_hyphen=True,
        ),
    ] = None,
    timeout: Annotated[
        float,
        Parameter(
            name=("--timeout", "--timeout-seconds"),
            help="seconds that each run of the script may take; what it has done until then is compared",
        ),
    ] = 300.0,
    as_: Annotated[
        Literal["horovod"] | None,
        Parameter(name="--as", show_default=False, help="let the script import this library, which dure stands in for"),
    ] = None,
    output: Annotated[Path, Parameter(help="file for the certificate")] = Path("certificate.json"),
    json: JsonFlag = False,
) -> None:
    """Compare a script on several ranks with one process, step by step. Exits with 4 unless they are equal."""
    from dure.api.prove import ProofSettings
    from dure.api.prove import prove as proven

    if arguments is not None and argument:
        raise Misuse("the script's arguments are given twice: write --arguments '...', or -- and then the arguments")
    try:
        words = argument if arguments is None else tuple(shlex.split(arguments))
    except ValueError as error:
        raise Misuse(f"--arguments cannot be divided into words ({error}): close every quotation mark") from None
    settings = ProofSettings(
        script=script,
        arguments=words,
        is_module=module,
        nproc=nproc,
        steps=steps,
        sample_steps=sample_steps,
        precision=precision,
        batch_size_argument=batch_size_argument,
        timeout_seconds=timeout,
        face=as_,
    )
    found = proven(settings, output)
    if json:
        print_json(found.to_json())
    else:
        from dure.styled import draw

        for line in _lines(found, output):
            draw(line)
    if found.verdict != "equal":
        raise FoundProblem(f"{script} {_WORDS[found.verdict].format(n=nproc)}")


def _lines(found: "Certificate", output: Path) -> Iterator["RenderableType"]:
    from dure.styled import Hanging, joined, styled

    yield Hanging(
        joined(
            (found.verdict, _STYLES[found.verdict]), f"  {found.script} {_WORDS[found.verdict].format(n=found.nproc)}"
        )
    )
    for cause in found.causes:
        yield ""
        where = f" (step {cause.step})" if cause.step is not None else ""
        yield Hanging(joined((cause.id, "bold"), f"  {cause.what}{where}"))
        if cause.line:
            yield styled(f"  at {cause.line}", overflow="fold")
        yield Hanging(joined(("  cure: ", "bold"), cause.cure))
    yield ""
    steps = f"{len(found.steps)} step{'s' * (len(found.steps) != 1)}"
    if found.verdict == "unproven":
        yield styled(f"  {steps} of the ranks compared with each other", "dim")
    elif found.steps:
        gradients, weights = max(step.gradients for step in found.steps), max(step.weights for step in found.steps)
        text = f"  {steps} compared in {found.precision}; largest relative difference: gradients {gradients:.1e}, "
        yield Hanging(joined((f"{text}weights {weights:.1e} (up to {found.tolerance:.0e} is rounding)", "dim")))
        if found.num_sketched_steps:
            more = found.num_sketched_steps
            yield styled(f"  {more} more step{'s' * (more != 1)} compared by sketches", "dim")
    yield Hanging(joined((f"  samples followed for {found.num_followed_steps} steps; certificate: {output}", "dim")))
    for note in found.notes:
        yield Hanging(joined(("  note: ", "bold"), note))
