"""`dure run`: any script on many ranks, as torchrun would run it."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from dure.cli.options import torchrun_flags
from dure.cli.options.nodes import NodeRank, NumNodes, PublicAddressFlag, Rendezvous, RendezvousTimeout, SecretFile
from dure.errors import Misuse, WorkerFailed
from dure.terminal import print_status, shell_word

_END_OF_FLAGS = "--"
_TRUTHS = torchrun_flags.TRUTHS | {"no-prefix", "allow-public-address", "preflight", "record", "share-run", "help", "h"}
"""Flags without a value; the token after any other flag is its value and not the script."""


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens up to the script, and the verb with the script's own arguments, which are not parsed.

    `--` may end the flags before the script; after the script, `--` belongs to the script, as with `python`.
    """
    flags: list[tuple[str, str | None]] = []
    position = 1
    while position < len(tokens) and tokens[position].startswith("-") and tokens[position] != _END_OF_FLAGS:
        flag, is_one, value = tokens[position].partition("=")
        is_last = tokens[position + 1 : position + 2] in ([], [_END_OF_FLAGS])
        has_value = not is_one and torchrun_flags.bare_name(flag) not in _TRUTHS and not is_last
        flags.append((flag, value if is_one else tokens[position + 1] if has_value else None))
        position += 1 + has_value
    ours, notes = torchrun_flags.translated(flags)
    end = position + (tokens[position : position + 1] == [_END_OF_FLAGS])
    own = [tokens[0], *ours, *tokens[position : end + 1]]
    arguments = tokens[end + 1 :]

    def command(*args: Any, **settings: Any) -> None:
        for note in notes:
            print_status(note)
        run(*args, **settings, arguments=tuple(arguments))

    parameters = inspect.signature(run).parameters.values()
    command.__doc__ = run.__doc__
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter for parameter in parameters if parameter.name != "arguments"]
    )
    return own, command


def run(
    script: Annotated[str | None, Parameter(help="a script's path, or a module's name after -m")] = None,
    /,
    *,
    nproc: Annotated[
        str,
        Parameter(
            name=("--nproc", "--nproc-per-node"),
            help="ranks on each node: a number, auto (one per accelerator, or one), gpu, or cpu (one per core)",
        ),
    ] = "auto",
    module: Annotated[
        bool, Parameter(name=("--module", "-m"), negative=(), show_default=False, help="it is a module's name")
    ] = False,
    nnodes: NumNodes = 1,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
    secret_file: SecretFile = None,
    rendezvous_timeout: RendezvousTimeout = 600.0,
    allow_public_address: PublicAddressFlag = False,
    preflight: Annotated[
        bool,
        Parameter(
            negative=(), show_default=False, help="check machines and network first, and start only if all is well"
        ),
    ] = False,
    record: Annotated[
        bool,
        Parameter(
            negative=(), show_default=False, help="record every step of every rank, for dure doctor and dure report"
        ),
    ] = False,
    trace: Annotated[
        int | None,
        Parameter(
            help="record, and write so many steps of all ranks, and their operators, as a trace for Perfetto",
            show_default=False,
        ),
    ] = None,
    start: Annotated[Literal["auto", "fork", "spawn"], Parameter(help="how processes start")] = ("auto"),
    max_restarts: Annotated[int, Parameter(help="restarts of all ranks after one failed")] = 0,
    on_hang: Annotated[
        Literal["wait", "restart", "stop"], Parameter(help="when no step finishes: say why, and then")
    ] = "wait",
    hang_after: Annotated[
        float | None,
        Parameter(
            help="seconds without an optimiser's step or a call of a process group (default: 10, or 10 median steps; "
            "300 before 3 steps or a call are known; 6 times that before a rank that may only be slow is ended)",
            show_default=False,
        ),
    ] = None,
    grace_seconds: Annotated[
        float, Parameter(help="seconds from a stop signal until ranks that have not ended are ended")
    ] = 30.0,
    threads: Annotated[
        int | None, Parameter(help="CPU threads per rank (default: cores / ranks)", show_default=False)
    ] = None,
    local_rank_argument: Annotated[
        Literal["auto", "none", "dash", "underscore", "apex"],
        Parameter(
            help="give --local-rank or --local_rank, as the old launcher did, or --world-size and --rank, as Apex's; "
            "auto looks whether the script wants the first"
        ),
    ] = "auto",
    no_prefix: Annotated[
        bool, Parameter(name="--no-prefix", negative=(), show_default=False, help="show lines without their rank")
    ] = False,
    local_ranks_filter: Annotated[
        str | None, Parameter(help="show only these ranks of this node, as 0,1; logs have all", show_default=False)
    ] = None,
    role: Annotated[str, Parameter(help="ROLE_NAME for the script")] = "default",
    runs_dir: Annotated[Path, Parameter(help="folder of the runs")] = Path("runs"),
    name: Annotated[str | None, Parameter(help="its name (default: date and script)", show_default=False)] = None,
    as_: Annotated[
        Literal["apex", "horovod"] | None,
        Parameter(name="--as", show_default=False, help="let the script import this library, which dure stands in for"),
    ] = None,
    share_run: Annotated[
        bool,
        Parameter(negative=(), show_default=False, help="let others read the run's folder as far as the umask does"),
    ] = False,
    arguments: tuple[str, ...] = (),
) -> None:
    """Run any PyTorch script on many ranks, unchanged: torchrun's variables are set.

    Flags come before the script, and -- may end them; everything after the script belongs to it.
    """
    if script is None:
        raise Misuse("no script is given: write `dure run --nproc 2 train.py ARGUMENTS`")
    from dure.api.script import ScriptSettings, run_script

    settings = ScriptSettings(
        script=script,
        arguments=arguments,
        is_module=module,
        nproc=nproc,
        start=start,
        max_restarts=max_restarts,
        on_hang=on_hang,
        hang_after=hang_after,
        grace_seconds=grace_seconds,
        threads=threads,
        local_rank_argument=local_rank_argument,
        with_prefix=not no_prefix,
        nnodes=nnodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
        secret_file=secret_file,
        rendezvous_timeout=rendezvous_timeout,
        allow_public_address=allow_public_address,
        runs_dir=runs_dir,
        name=name,
        share_run=share_run,
        preflight=preflight,
        record=record or trace is not None,
        trace=trace,
        shown_ranks=local_ranks_filter,
        role=role,
        face=as_,
    )
    try:
        path = run_script(settings)
    except WorkerFailed as error:
        late = _own_flag_among(arguments)
        if late is None or error.exit_code != Misuse.exit_code:
            raise
        hint = f"{late} stands after the script and so went to it: flags of dure run stand before the script"
        raise WorkerFailed(f"{error}\n  {hint}", error.exit_code) from None
    if settings.record:
        _print_slowest(path)


def _print_slowest(path: Path) -> None:
    """Print what costs a recorded run the most time; its output is the script's, so this goes to stderr."""
    from dure.doctor.slowness import slowest_of

    if (slowest := slowest_of(path)) is not None:
        print_status(f"slow: {slowest}; see `dure doctor {shell_word(path)}`")


def _own_flag_among(arguments: tuple[str, ...]) -> str | None:
    """Return the first of a script's arguments that is a flag of ours or of torchrun's, or None."""
    names = {name.replace("_", "-") for name in inspect.signature(run).parameters} | torchrun_flags.known()
    flags = [each.partition("=")[0] for each in arguments if each.startswith("--")]
    return next((flag for flag in flags if torchrun_flags.bare_name(flag) in names), None)
