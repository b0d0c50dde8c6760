"""Linux control groups of a process, which limit containers and jobs."""

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""Mount point of the groups."""


def groups_of(controller: str, pid: int | None = None) -> Iterator[Path]:
    """Yield the folders of a process's groups for a controller, from its own up to the visible root.

    A container may see its own group as the root, and know it by a path that exists only outside.

    Args:
        controller: `memory`, `cpu`, ...; groups of version 2 are for all of them.
        pid: Id of the process; None for this one.
    """
    try:
        lines = Path(f"/proc/{'self' if pid is None else pid}/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _number, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = CGROUPS / controller if names else CGROUPS
        folder = top / path.lstrip("/")
        yield from (folder, *(parent for parent in folder.parents if parent == top or top in parent.parents))
