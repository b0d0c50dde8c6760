"""`dure preflight`: check of machines and network before a run."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from dure.cli.options.nodes import MostNodes, NodeRank, PublicAddressFlag, Rendezvous, RendezvousTimeout, SecretFile
from dure.cli.output import JsonFlag
from dure.errors import EnvironmentLacks, SpecInvalid
from dure.terminal import one_line, print_json, print_text

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from dure.preflight.findings import Finding, Report

_STYLES = {"failure": "bold red", "warning": "bold yellow", "ok": "green", "skipped": "dim"}
_MOST_BAD = 8
"""Maximum problems shown per check: if a host cannot be reached, every other host reports it."""


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens and the verb."""
    return tokens, preflight


def preflight(
    *,
    nproc: Annotated[
        str,
        Parameter(
            name=("--nproc", "--nproc-per-node"),
            help="ranks on each node: a number, or auto: one per accelerator, 2 without any",
        ),
    ] = "auto",
    device: Annotated[
        str, Parameter(help="cpu, or the kind of torch's accelerator, as cuda; auto takes an accelerator if any")
    ] = "auto",
    backend: Annotated[
        str,
        Parameter(help="auto: that of the device, as nccl, or shared memory (dure_shm) between CPU ranks, or gloo"),
    ] = "auto",
    share_devices: Annotated[
        bool, Parameter(negative=(), show_default=False, help="let several processes use one device")
    ] = False,
    threads: Annotated[
        int | None, Parameter(help="CPU threads per rank (default: cores / ranks)", show_default=False)
    ] = None,
    num_workers: Annotated[int, Parameter(help="loader processes per rank, which need /dev/shm and open files")] = 0,
    start: Annotated[Literal["auto", "fork", "spawn"], Parameter(help="how processes start")] = "auto",
    timeout: Annotated[
        float,
        Parameter(name=("--timeout", "--timeout-seconds"), help="seconds that the collectives may take, all together"),
    ] = 30.0,
    nnodes: MostNodes = 1,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
    secret_file: SecretFile = None,
    rendezvous_timeout: RendezvousTimeout = 600.0,
    allow_public_address: PublicAddressFlag = False,
    runs_dir: Annotated[Path, Parameter(help="folder of the runs")] = Path("runs"),
    json: JsonFlag = False,
) -> None:
    """Check that these machines are ready for a run: versions, network, clocks, limits, disk, GPUs, a collective.

    Ends with 3 if anything is missing, and shows a cure for each problem; warnings do not count. Leaves nothing behind.
    """
    from dure.launch.nodes.rendezvous import node_settings
    from dure.preflight.all_checks import preflight as check_all
    from dure.preflight.settings import PreflightSettings, check_settings
    from dure.spec.fields import MOST_PROCESSES

    faults: list[str] = []
    several, kind, num_ranks = None, _kind_of(device), 1
    try:
        several = node_settings(
            nnodes=nnodes,
            node_rank=node_rank,
            rendezvous=rendezvous,
            secret_file=secret_file,
            timeout_seconds=rendezvous_timeout,
            allow_public_address=allow_public_address,
        )
    except SpecInvalid as error:
        faults += error.faults
    if nproc == "auto":
        num_ranks = _auto_ranks(kind)
    elif re.fullmatch(r"[0-9]{1,9}", nproc):
        num_ranks = int(nproc)
    else:
        faults.append(f"nproc is {nproc!r} but must be from 1 to {MOST_PROCESSES}, or auto")
    settings = PreflightSettings(
        num_ranks=num_ranks,
        num_devices=num_ranks,
        device=kind,
        backend=backend,
        threads=threads,
        num_workers=num_workers,
        runs_dir=runs_dir,
        timeout_seconds=timeout,
        start=start,
        share_devices=share_devices,
        several=several,
    )
    try:
        check_settings(settings)
    except SpecInvalid as error:
        faults += error.faults
    if faults:
        raise SpecInvalid(faults)
    report = check_all(settings)
    if json:
        print_json(report.to_json())
    else:
        from dure.styled import draw

        draw(table(report))
    if report.failures:
        raise EnvironmentLacks(report.verdict)
    if not json:
        print_text(one_line(report.verdict))


def _kind_of(device: str) -> str:
    """Return the type of device of a run; a requested one is kept, so that a check can report it missing."""
    from dure.host.devices import resolve_device

    return resolve_device("auto") if device == "auto" else device


def _auto_ranks(kind: str) -> int:
    from dure.host.devices import count_accelerators, count_cores

    # a single rank would omit the most important check: that ranks can reach each other
    return count_accelerators(kind) if kind != "cpu" and count_accelerators(kind) else min(2, count_cores())


def table(report: "Report") -> "Table":
    """Render a report as a table, with problems first."""
    from rich.table import Table

    from dure.styled import styled

    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(style="bold", min_width=11, max_width=14, overflow="fold")
    grid.add_column(overflow="fold", ratio=1)
    for finding, more in _shortened(report):
        grid.add_row(
            styled(finding.status, _STYLES[finding.status]), finding.name, _finding_text(report, finding, more)
        )
    return grid


def _shortened(report: "Report") -> "Iterator[tuple[Finding, int]]":
    """Yield the problems, up to a maximum per check, then successful checks once, with the number of further nodes."""
    others: dict[str, list[Finding]] = {}
    count: Counter[str] = Counter()
    for finding in report.findings:
        if finding.status not in ("failure", "warning"):
            others.setdefault(f"{finding.status} {finding.name}", []).append(finding)
            continue
        count[finding.name] += 1
        if count[finding.name] <= _MOST_BAD:
            yield finding, 0
        elif count[finding.name] == _MOST_BAD + 1:
            num_more = sum(other.name == finding.name for other in report.findings) - _MOST_BAD
            yield replace(finding, seen=f"{num_more} more: --json has them all", rule="", cure="", nodes=()), 0
    for alike in others.values():
        yield alike[0], sum(len(finding.nodes) for finding in alike[1:])


def _finding_text(report: "Report", finding: "Finding", more: int) -> "Text":
    from dure.styled import joined, styled_lines

    is_bad = finding.status in ("failure", "warning")
    nodes = report.nodes_text(finding)
    where = f"{nodes}: " if nodes else ""
    rest = f"; {more} more node{'s' * (more > 1)} well" if more else ""
    if not is_bad:
        return joined(f"{where}{finding.seen}{rest}")
    rule = f", but {finding.rule}" if finding.rule else ""
    cure = (styled_lines("\ncure: ", "bold"), finding.cure) if finding.cure else ()
    return joined(f"{where}{finding.seen}{rule}", *cure)
