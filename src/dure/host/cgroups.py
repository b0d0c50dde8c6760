"""Linux's control groups, by which containers and jobs are limited: which ones a process is in."""

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def groups_of(controller: str, pid: int | None = None, root: Path = CGROUPS) -> Iterator[Path]:
    """Yield the folders of a process's groups for a controller, from its own up to the root of what is seen.

    A container may see its own group as the root, and know it by a path that is only there outside.

    Args:
        controller: `memory`, `cpu`, ...; those of version 2 are for all of them.
        pid: The process; None: this one.
        root: Where they are mounted.
    """
    try:
        lines = Path(f"/proc/{'self' if pid is None else pid}/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _number, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = root / controller if names else root
        folder = top / path.lstrip("/")
        yield from (folder, *(parent for parent in folder.parents if parent == top or top in parent.parents))
