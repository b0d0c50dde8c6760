"""Kills by the kernel's out-of-memory killer, and whose memory was exhausted: the host's or a container's."""

from pathlib import Path

from dure.host.cgroups import groups_of

_VMSTAT = Path("/proc/vmstat")
_NO_LIMIT_BYTES = 2**60
"""Lower bound of limits that mean none; version 1 of the groups writes about 2**63 for no limit."""
_CHARGED_AT_ONCE_BYTES = 2**22
"""Bytes below a limit that already meet it: the kernel charges memory in portions, and refused a 2 MiB huge page before
the exact limit."""


class OomWatch:
    """Kernel counters at the start of a process, for comparison with those after its end.

    The process's own group counts the processes killed in it, whichever memory was exhausted; it is exact if it can be
    read. The host's counter includes all containers, so that a kill in another one would look like this process's.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._host_before = _number(_VMSTAT, "oom_kill")
        self._groups: list[Path] = []
        self._before: dict[Path, tuple[int | None, int | None]] = {}
        self.look()

    def look(self) -> None:
        """Find the process's groups while it lives, because it may have been moved."""
        groups = list(groups_of("memory", self._pid))
        # version 1 reports the root group for a process that is about to end
        if groups and groups[0] not in self._groups:
            self._groups, self._before = groups, {group: _counts(group) for group in groups}

    def was_killed(self) -> bool | None:
        """Return whether the kernel killed the process, which was killed, for lack of memory; None if unknown."""
        own = next((group for group in self._groups if self._before[group][0] is not None), None)
        if own is not None and (kills := _counts(own)[0]) is not None:
            return kills != self._before[own][0]
        now = _number(_VMSTAT, "oom_kill")
        return None if self._host_before is None or now is None else now > self._host_before

    def limit_bytes(self) -> int | None:
        """Return the limit of the innermost group (a container, a job) that was full meanwhile; None if none was."""
        for group in self._groups:
            before, now, limit = self._before[group][1], _counts(group)[1], _limit(group)
            if limit is None:
                continue
            if (before is not None and now is not None and now > before) or _met_with_swap(group, limit):
                return limit
        return None


def _counts(group: Path) -> tuple[int | None, int | None]:
    """Return the number of processes that the kernel killed in a group, and how often the group was full."""
    if (kills := _number(group / "memory.events", "oom_kill")) is not None:
        return kills, _number(group / "memory.events", "oom")
    return _number(group / "memory.oom_control", "oom_kill"), _number(group / "memory.failcnt")


def _met_with_swap(group: Path, limit: int) -> bool:
    """Return whether memory plus swap met a limit no higher than memory's, which newer kernels do not count."""
    together, most = _number(group / "memory.memsw.limit_in_bytes"), _number(group / "memory.memsw.max_usage_in_bytes")
    return together is not None and most is not None and together <= limit and most > together - _CHARGED_AT_ONCE_BYTES


def _limit(group: Path) -> int | None:
    limits = _number(group / "memory.max"), _number(group / "memory.limit_in_bytes")
    return next((limit for limit in limits if limit is not None and limit < _NO_LIMIT_BYTES), None)


def _number(file: Path, name: str | None = None) -> int | None:
    """Return the number in a file, either alone or after a name; None if there is none."""
    try:
        for line in file.read_text(encoding="ascii").splitlines():
            words = line.split()
            if words[:-1] == ([] if name is None else [name]):
                return int(words[-1])
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return None
