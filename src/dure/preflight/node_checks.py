"""Checks across nodes: their common properties, and the links between them."""

from collections.abc import Mapping, Sequence

from dure.launch.nodes.member import Member
from dure.preflight.findings import Finding, failure, ok, skipped, warning
from dure.preflight.host_facts import HostFacts
from dure.preflight.node_pairs import Attempt

_MOST_CLOCK_SECONDS = 0.5
"""Maximum difference of clocks in seconds: records of several hosts are compared by time, and ranks beat in tenths of a
second.
"""
_MUST_BE_SAME = ("Python", "torch", "dure", "CUDA", "NCCL")
_SAFELY_DIFFERENT = ("NVIDIA driver",)


def version_checks(software_of_nodes: Sequence[Mapping[str, str | None]], names: Sequence[str]) -> list[Finding]:
    """Compare the software of all nodes."""
    found = []
    for software in (*_MUST_BE_SAME, *_SAFELY_DIFFERENT):
        versions = [versions.get(software) for versions in software_of_nodes]
        different = [rank for rank, version in enumerate(versions) if version != versions[0]]
        if not different:
            continue
        first = different[0]
        more = f", and on {len(different) - 1} more another than on node 0" if len(different) > 1 else ""
        seen = f"{software} is {versions[0]} on {names[0]} and {versions[first]} on {names[first]}{more}"
        pair = (names[0], names[first])
        if software in _SAFELY_DIFFERENT:
            rule, cure = "NCCL is tried with equal drivers", "install the same driver on all nodes"
            found.append(warning("versions", seen, rule, cure, pair))
        else:
            rule = "ranks of different versions may fail or compute something else"
            found.append(failure("versions", seen, rule, f"install the same {software} on all nodes", pair))
    known = [f"{name} {version}" for name, version in software_of_nodes[0].items() if version is not None]
    return found or [ok("versions", ", ".join(known) + (" on all nodes" if len(software_of_nodes) > 1 else ""))]


def device_check(facts: Sequence[HostFacts], names: Sequence[str]) -> list[Finding]:
    """Compare the kind of devices that nodes would use."""
    for rank, host in enumerate(facts):
        if host.device != facts[0].device:
            seen = f"the device is {facts[0].device} on {names[0]} and {host.device} on {names[rank]}"
            cure = f"look why {names[0 if facts[0].device == 'cpu' else rank]} shows no GPU, or use --device cpu"
            return [failure("devices", seen, "all ranks must use the same kind", cure, (names[0], names[rank]))]
    return []


# --- links


def pair_checks(attempts: Sequence[Attempt], members: Sequence[Member]) -> list[Finding]:
    """Judge every link between two nodes."""
    if len(members) < 2:
        return [skipped("pairs", "there is one host")]
    bad = [_lost(attempt, members) for attempt in attempts if attempt.cause is not None]
    if bad:
        return bad
    slowest = max(attempts, key=lambda attempt: attempt.round_trip_seconds or 0.0)
    longest = 1000 * (slowest.round_trip_seconds or 0.0)
    ends = f"node {slowest.source} to node {slowest.target}"
    return [ok("pairs", f"all {len(attempts)} ways; the slowest, {ends}, takes {longest:.2f} ms")]


def _lost(attempt: Attempt, members: Sequence[Member]) -> Finding:
    """Return a finding about a link that does not work, with the cure for its cause."""
    source, target = members[attempt.source], members[attempt.target]
    ways = f"from {source.address} to {attempt.address}"
    rule, cure = {
        "refused": (
            "it listens there",
            f"let the firewall of {target.host} accept connections {ways} on all ports, for ranks take any free one",
        ),
        "silent": (
            "it listens there",
            f"let the firewalls between them pass all TCP ports {ways}, and see that {target.host} has a route back "
            f"(there: `ip route get {source.address}`)",
        ),
        "no route": (
            "ranks of all nodes talk to each other",
            f"add a route (on {source.host}: `ip route get {attempt.address}` must name one), or give a --rendezvous "
            "in a network that all nodes are in",
        ),
        "forbidden": (
            "ranks of all nodes talk to each other",
            f"let the firewall of {source.host} itself pass connections to {attempt.address}",
        ),
        "stranger": (
            "whoever answers there does not know this run's secret",
            f"see that no other machine has the address {attempt.address}, and that nothing translates it (NAT)",
        ),
        "stalled": (
            "short messages come through and long ones do not",
            "give all interfaces on the way the same MTU (`ip link set IFACE mtu 1500`), or let ICMP pass",
        ),
        "closed": (
            "ranks listen there",
            f"see on {target.host} why it cannot listen on {attempt.address} (`ip address`)",
        ),
    }.get(attempt.cause or "", ("ranks of all nodes talk to each other", f"look at the network of {source.host}"))
    seen = f"{source} does not reach {target} at {attempt.address} ({attempt.said})"
    return failure("pairs", seen, rule, cure, (str(source), str(target)))


def clock_check(attempts: Sequence[Attempt], names: Sequence[str]) -> list[Finding]:
    """Compare the clocks of all nodes with node 0's."""
    if len(names) < 2:
        return [skipped("clocks", "there is one host")]
    found, worst = [], (0.0, 0.0)
    for rank in range(1, len(names)):
        offset = clock_ahead(attempts, rank)
        if offset is None:
            found.append(skipped("clocks", f"{names[rank]} and {names[0]} did not reach each other"))
            continue
        ahead, give_or_take = offset
        worst = max(worst, (abs(ahead), give_or_take))
        if abs(ahead) - give_or_take > _MOST_CLOCK_SECONDS:
            way = "ahead of" if ahead > 0 else "behind"
            found.append(
                warning(
                    "clocks",
                    f"the clock of {names[rank]} is {abs(ahead):.3g} s {way} that of {names[0]}",
                    f"more than {_MOST_CLOCK_SECONDS} s puts the records of nodes in a wrong order",
                    "let both follow a time server (`timedatectl set-ntp true`, chrony)",
                    (names[0], names[rank]),
                )
            )
    return found or [ok("clocks", f"at most {1000 * worst[0]:.1f} ms apart (± {1000 * worst[1]:.1f} ms)")]


def clock_ahead(attempts: Sequence[Attempt], rank: int) -> tuple[float, float] | None:
    """Return the lead of a node's clock over node 0's, and its error bound, in seconds; None if neither is reached."""
    for attempt in attempts:
        is_from, is_to = (attempt.source, attempt.target) == (rank, 0), (attempt.source, attempt.target) == (0, rank)
        if (is_from or is_to) and attempt.ahead_seconds is not None and attempt.round_trip_seconds is not None:
            return (attempt.ahead_seconds if is_to else -attempt.ahead_seconds), attempt.round_trip_seconds / 2
    return None


def mtu_check(facts: Sequence[HostFacts], names: Sequence[str]) -> list[Finding]:
    """Compare the packet sizes on the links to other nodes."""
    sizes = {names[rank]: host.interface.mtu for rank, host in enumerate(facts) if host.interface is not None}
    if len(set(sizes.values())) < 2:
        return []
    least, most = min(sizes, key=lambda name: sizes[name]), max(sizes, key=lambda name: sizes[name])
    seen = f"the MTU is {sizes[least]} on {least} and {sizes[most]} on {most}"
    cure = "give all the same (`ip link set IFACE mtu ...`)"
    return [warning("interface", seen, "packets are cut or lost where it changes", cure, (least, most))]


def folder_check(seen_by: Sequence[bool], names: Sequence[str], folder: str, *, is_needed: bool) -> list[Finding]:
    """Judge whether all nodes see node 0's runs folder."""
    blind = [names[rank] for rank, is_seen in enumerate(seen_by) if not is_seen]
    if not blind:
        return [ok("shared folder", f"all nodes see {folder}")]
    seen = f"{', '.join(blind)} do{'es' * (len(blind) == 1)} not see {folder} of node 0"
    cure = "put --runs-dir on a file system that all nodes share, under the same path"
    rule = "every rank writes its share of the checkpoints there"
    if is_needed:
        return [failure("shared folder", seen, rule, cure)]
    return [warning("shared folder", seen, f"under dure train {rule}; dure run needs none", cure)]
