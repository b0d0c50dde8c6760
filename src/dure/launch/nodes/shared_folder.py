"""Folder of a multi-node run: a check which nodes share node 0's, and own folders for the others."""

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dure.launch.nodes.peers import Nodes
from dure.own_files import touch
from dure.records.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class MetFolder:
    """A run's folder on this node."""

    run: RunDir
    is_own: bool
    """True if this node created the folder: node 0, or a node that does not see node 0's."""


def meet_in_folder(
    nodes: Nodes, make: Callable[[], RunDir], make_own: Callable[[str], RunDir], *, is_new: bool = True
) -> MetFolder:
    """Create the run's folder on node 0, and detect with a small file in it which nodes see it.

    Args:
        nodes: All nodes; every node must call this.
        make: On node 0: opens or creates the folder.
        make_own: On a node that does not see it: creates one with the same name, or refuses.
        is_new: Whether node 0 creates it, so that it is removed if a node refuses.
    """
    if nodes.is_alone:
        return MetFolder(run=make(), is_own=True)
    if nodes.me.node_rank == 0:
        run = make()
        mark = run.path / f".seen-{secrets.token_hex(8)}"
        touch(mark)
        try:
            nodes.gather([str(mark.resolve()), run.name])
            nodes.gather(True)
        except BaseException:
            if is_new:
                run.discard()
            raise
        finally:
            mark.unlink(missing_ok=True)
        return MetFolder(run=run, is_own=True)
    mark_path, name = nodes.gather(None)[0]
    is_seen = False
    with suppress(OSError):
        is_seen = Path(mark_path).is_file()
    run = RunDir(Path(mark_path).parent) if is_seen else make_own(name)
    nodes.gather(is_seen)
    return MetFolder(run=run, is_own=not is_seen)
