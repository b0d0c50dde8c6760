"""Lists in Slurm's notation: hosts (`node[1-3,7],login`) and tasks per node (`2(x3),1`)."""

import re
from collections.abc import Iterator

MOST_HOSTS = 100_000
"""Maximum number of entries in a list: `node[0-999999999]` is a typo, or an attempt to exhaust memory."""

_PART = re.compile(r"(?P<prefix>[^\[\],]*)(?:\[(?P<ranges>[^\[\]]*)\])?")
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?")
_REPEATED = re.compile(r"(?P<number>\d+)(?:\(x(?P<times>\d+)\))?")


def tasks_on_node(text: str, node: int) -> int:
    """Return the tasks of one node: in `2(x3),1` two on each of the first three nodes, one on the fourth.

    Raises:
        ValueError: It is not such a list, or has no such node.
    """
    nodes_left = node
    for part in text.split(","):
        match = _REPEATED.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text[:80]!r} is no list of tasks per node")
        nodes_left -= int(match["times"] or 1)
        if nodes_left < 0:
            return int(match["number"])
    raise ValueError(f"{text[:80]!r} has no node {node}")


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list in order: `n[08-10,3]` is n08, n09, n10, n3.

    Raises:
        ValueError: It is not such a list.
    """
    hosts: list[str] = []
    for entry in _entries(text):
        for host in _expand_entry(entry):
            hosts.append(host)
            if len(hosts) > MOST_HOSTS:
                raise ValueError(f"{text[:80]!r} is a list of more than {MOST_HOSTS} hosts")
    if not hosts:
        raise ValueError("the list of hosts is empty")
    return hosts


def _entries(text: str) -> Iterator[str]:
    """Yield the parts between commas outside brackets."""
    depth, begin = 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"{text[:80]!r} is no list of hosts: its brackets do not match")
        if letter == "," and depth == 0:
            yield text[begin:position]
            begin = position + 1
    if depth:
        raise ValueError(f"{text[:80]!r} is no list of hosts: its brackets do not match")
    if text[begin:]:
        yield text[begin:]


def _expand_entry(entry: str) -> Iterator[str]:
    """Expand the first brackets of an entry, then the rest: `rack[0-1]node[1-2]` has two pairs."""
    match = _PART.match(entry)
    assert match is not None  # both parts may be empty
    if match["ranges"] is None:
        if match.end() != len(entry) or not entry:
            raise ValueError(f"{entry[:80]!r} is no host")
        yield entry
        return
    rest = entry[match.end() :]
    for number in _numbers(match["ranges"], entry):
        for ending in _expand_entry(rest) if rest else ("",):
            yield f"{match['prefix']}{number}{ending}"


def _numbers(ranges: str, entry: str) -> Iterator[str]:
    """Yield the numbers of `08-10,3`, padded with zeros like the first of each range."""
    for one in ranges.split(","):
        match = _RANGE.fullmatch(one)
        if match is None:
            raise ValueError(f"{entry[:80]!r} is no list of hosts: {one[:20]!r} is no range of numbers")
        first, last = match["first"], match["last"] or match["first"]
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"
