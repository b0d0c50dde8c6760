"""All checks of a preflight, on one host or on all: every node examines itself, all exchange facts, and judge alike."""

import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dure.documents import parse_json
from dure.errors import EnvironmentLacks, Interrupted, WorkerFailed
from dure.launch.nodes.addresses import split_address
from dure.launch.nodes.member import StoppedByPeer
from dure.launch.nodes.peers import Nodes
from dure.launch.nodes.rendezvous import NodeSettings, join
from dure.launch.nodes.secret import read_secret
from dure.preflight import collective
from dure.preflight.findings import Finding, Report, by_gravity, same_together, skipped
from dure.preflight.host_checks import host_checks
from dure.preflight.host_facts import HostFacts, Space, host_facts
from dure.preflight.node_checks import clock_check, device_check, folder_check, mtu_check, pair_checks, version_checks
from dure.preflight.node_pairs import try_pairs
from dure.preflight.node_records import record_of_node
from dure.preflight.settings import PreflightSettings, check_settings
from dure.process.stop_signals import stop_exit_code

_PIECE_CHARACTERS = 12_000
"""Maximum characters per message: JSON inside JSON may take twice as much, and all nodes' texts must fit into one
message.
"""


def preflight(settings: PreflightSettings) -> Report:
    """Check whether a planned run is possible, on this host and on all others; nothing is left behind.

    Raises:
        SpecInvalid: Settings are invalid.
        Misuse: The hosts' settings differ, or this one may not meet the others in this way.
        Interrupted: A signal stopped it.
    """
    check_settings(settings)
    began = time.perf_counter()
    if settings.several is None:
        facts = host_facts(settings)
        report = _judged(settings, [facts], [facts.host], [], lambda mine: [mine], None)
    else:
        report = _on_nodes(settings, settings.several)
    return replace(report, seconds=time.perf_counter() - began)


def _on_nodes(settings: PreflightSettings, several: NodeSettings) -> Report:
    agreed = {
        "command": settings.command,
        "backend": settings.backend,
        "timeout": settings.timeout_seconds,
        "start": settings.start,
        "num_workers": settings.num_workers,
        "share_devices": settings.share_devices,
    }
    try:
        with join(several, agreed, settings.num_ranks, compares_versions=False) as nodes:
            return _together(settings, several, nodes)
    except StoppedByPeer as stop:
        raise Interrupted("the preflight was stopped on another node", stop_exit_code(stop.number)) from None
    except (EnvironmentLacks, WorkerFailed) as error:
        # the others are unreachable: the faults of this host are still worth reporting
        lost = Finding(name="nodes", status="failure", seen=str(error))
        facts = host_facts(settings, node_rank=several.node_rank)
        own = [replace(finding, nodes=(0,)) for finding in host_checks(facts, settings, settings.num_ranks)]
        hidden = {"interface", "ports"}  # it is not known which address would be used
        kept = [finding for finding in own if finding.name not in hidden]
        return Report(findings=by_gravity([lost, *kept]), nodes=(asdict(facts),), names=(facts.host,))


def _together(settings: PreflightSettings, several: NodeSettings, nodes: Nodes) -> Report:
    host, _port = split_address(several.rendezvous)
    secret = read_secret(several.secret_file, host=host, may_make=False)
    mine = host_facts(
        settings,
        node_rank=nodes.me.node_rank,
        address=nodes.own_address,
        interface=nodes.interface or "none",
        first_address=nodes.members[0].address,
    )
    names = [str(member) for member in nodes.members]
    versions = nodes.gather(mine.versions)
    if any(one["dure"] != versions[0]["dure"] for one in versions):
        # another version of dure may send other facts, in another order
        why_not = skipped("all else", "with different versions of dure there is nothing to be compared")
        return Report(findings=by_gravity([*version_checks(versions, names), why_not]), names=tuple(names))
    facts = [record_of_node(HostFacts, one, rank) for rank, one in enumerate(gather_long(nodes, asdict(mine)))]
    attempts = try_pairs(nodes, secret)
    seen = _folder_seen(nodes, mine.runs)
    folder = folder_check([is_seen for _, is_seen in seen], names, seen[0][0], is_needed=settings.needs_shared_folder)
    between = [
        *pair_checks(attempts, nodes.members),
        *clock_check(attempts, names),
        *mtu_check(facts, names),
        *folder,
    ]
    return _judged(settings, facts, names, between, lambda words: gather_long(nodes, words), nodes)


def _judged(
    settings: PreflightSettings,
    facts: Sequence[HostFacts],
    names: Sequence[str],
    between: Sequence[Finding],
    gather: Callable[[Any], list[Any]],
    nodes: Nodes | None,
) -> Report:
    """Judge the facts, then make ranks try a collective; all nodes decide alike, so either all try it or none."""
    world_size = sum(host.num_ranks for host in facts)
    own = [
        replace(finding, nodes=(rank,))
        for rank, host in enumerate(facts)
        for finding in host_checks(host, settings, world_size)
    ]
    findings = [
        *version_checks([host.versions for host in facts], names),
        *device_check(facts, names),
        *between,
        *same_together(own),
    ]
    why_not = _why_no_collective(findings, world_size)
    backend = collective.backend_of(settings, world_size)
    if why_not is None:
        findings += collective.try_collective(settings, names, gather, nodes)
    else:
        findings.append(skipped(collective.NAME, why_not))
    return Report(
        findings=by_gravity(findings),
        nodes=tuple(asdict(host) for host in facts),
        names=tuple(names),
        backend=backend,
    )


def _why_no_collective(findings: Sequence[Finding], world_size: int) -> str | None:
    """Return the reason why ranks would not even start, or None."""
    if world_size == 1:
        return "one rank has nobody to talk to"
    hopeless = ("versions", "devices", "pairs", "interface", "ports", "open files", "GPUs")
    names = dict.fromkeys(finding.name for finding in findings if finding.status == "failure")
    in_the_way = [name for name in names if name in hopeless]
    return f"it could not come through: see {', '.join(in_the_way)}" if in_the_way else None


def gather_long(nodes: Nodes, mine: Any) -> list[Any]:
    """Return the values of all nodes, even if longer than one message: in pieces, one node after the other."""
    text = json.dumps(mine)
    pieces = [text[start : start + _PIECE_CHARACTERS] for start in range(0, len(text), _PIECE_CHARACTERS)]
    counts = nodes.gather(len(pieces))
    gathered = []
    for rank, count in enumerate(counts):
        parts = [
            nodes.gather(pieces[number] if rank == nodes.me.node_rank else None)[rank] for number in range(int(count))
        ]
        gathered.append(parse_json("".join(parts)))
    return gathered


def _folder_seen(nodes: Nodes, runs: Space) -> list[tuple[str, bool]]:
    """Detect, with a small temporary file of node 0, which nodes see its runs folder.

    A node whose own folder is faulty, which another check reports, does not look.
    """
    if nodes.me.node_rank:
        folder, mark = nodes.gather(None)[0]
        is_seen = mark is None
        with suppress(OSError):
            is_seen = is_seen or (runs.error is None and Path(mark).is_file())
        return [(str(one[0]), bool(one[1])) for one in nodes.gather([folder, is_seen])]
    path = Path(runs.path, f".dure-preflight-{os.getpid()}-{secrets.token_hex(8)}")
    mark = None
    try:
        with suppress(OSError):
            if runs.error is None:
                path.touch()
                mark = str(path)
        nodes.gather([runs.path, mark])
        return [(str(one[0]), bool(one[1])) for one in nodes.gather([runs.path, True])]
    finally:
        if mark is not None:
            path.unlink(missing_ok=True)
