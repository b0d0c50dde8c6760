"""Checkpoints of a run: at any time the newest complete one can be found and is known to be intact.

A checkpoint starts as a new directory with a temporary name. Every rank writes its files and flushes them to disk; the
manifest with their sizes and digests follows last; one rename makes the directory visible. A crash at any moment
therefore leaves the old checkpoints and at most a `.writing-` directory. That is not a checkpoint, and is removed at
the next start. Nothing is ever written into an existing checkpoint directory.

    checkpoints/
      samples-000000001024/    manifest.json, model.safetensors, optimizer.safetensors, state.json, rank<r>.safetensors
      latest, best             names, for people and scripts; dure itself trusts only the manifests
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from dure.errors import CheckpointDamaged, CheckpointMismatch, DureError
from dure.own_files import sync_folder
from dure.training.checkpoints.durable_files import HALF_REPLACED, open_regular, replace_file
from dure.training.checkpoints.manifest import Manifest, read_manifest
from dure.training.checkpoints.reader import verify
from dure.training.checkpoints.writer import NAME, WRITING, is_being_written

TRASH = ".trash-"


class CheckpointStore:
    """Catalogue of one run's checkpoints. No method is collective: any one rank may call it."""

    def __init__(
        self, root: Path, keep: int, warn: Callable[[str], None], fence: Callable[[], None] = lambda: None
    ) -> None:
        """Set the folder; nothing is read or written yet.

        Args:
            root: Folder of the checkpoints, created when the first one is saved.
            keep: Number of newest checkpoints to keep, in addition to the best.
            warn: Receives one sentence for each problem that does not end the run.
            fence: Called before a checkpoint is completed; raises if another node has taken over the run.
        """
        self.root = root
        self.fence = fence
        self._keep = max(keep, 1)
        self._warn = warn
        self._damaged: set[str] = set()

    def take_in(self, path: Path, *, is_best: bool) -> None:
        """Point `latest` and `best` to a written checkpoint, and remove old ones; errors only cause a warning."""
        try:
            replace_file(self.root / "latest", f"{path.name}\n")
            if is_best:
                replace_file(self.root / "best", f"{path.name}\n")
            self._remove_old(path)
        except (OSError, DureError) as error:
            self._warn(f"checkpoint {path.name} is saved, but tidying up after it failed: {error}")

    def _remove_old(self, newest: Path) -> None:
        """Keep the newest K positions up to the one just saved, and the best.

        Later positions are left alone: the run resumed before them because they are damaged. They must not count as the
        newest, nor be deleted before a person has seen them.
        """
        marked = (path for path, manifest in self._readable() if manifest.is_best and _key(path) <= _key(newest))
        best = next((path for path in marked if self._looks_whole(path)), None)
        kept: set[str] = set()
        for path in self._named():
            if _key(path) > _key(newest):
                continue
            position = path.name.partition(".")[0]
            if position not in kept and len(kept) < self._keep and self._looks_whole(path):
                kept.add(position)
            elif path not in (best, newest):  # never remove what was just saved
                self._remove(path)

    def _remove(self, path: Path) -> None:
        # rename first: a crash during the removal must not leave a partial directory with a checkpoint's name
        trash = path.with_name(f"{TRASH}{path.name}")
        _discard(trash)
        path.rename(trash)
        _discard(trash)

    def remove_leftovers(self) -> None:
        """Remove what interrupted saves and removals left behind; called on rank 0, at the start."""
        if not self.root.is_dir():
            return
        for path in [*self.root.glob(f"{WRITING}*"), *self.root.glob(f"{TRASH}*")]:
            if path.is_dir() and not path.is_symlink() and not is_being_written(path):
                shutil.rmtree(path, ignore_errors=True)
        for path in self.root.glob(HALF_REPLACED):
            path.unlink(missing_ok=True)
        sync_folder(self.root)

    def positions(self) -> list[tuple[Path, int]]:
        """Return all checkpoints, valid or not, with their samples seen; the newest first."""
        return [(path, _key(path)[0]) for path in self._named()]

    def newest_valid(self) -> Path | None:
        """Return the newest checkpoint whose bytes are all as written, or None if there is none.

        A warning names each damaged one with the reason, and then the one used instead.
        """
        return self._first_valid(self._named(), "the newest good one")

    def best(self) -> Path | None:
        """Return the checkpoint that was the best when saved; the newest valid one if that cannot be used."""
        declared = [path for path, manifest in self._readable() if manifest.is_best]
        found = self._first_valid(declared, "the best before it")
        if found is None and (found := self._first_valid(self._named())) is not None:
            self._warn(f"there is no good checkpoint that is marked as the best; taking the newest, {found.name}")
        return found

    def _first_valid(self, candidates: list[Path], what: str | None = None) -> Path | None:
        """Return the first valid one; warn that it is `what` if others were skipped. Warn once of each damaged one."""
        skipped = False
        for path in candidates:
            try:
                verify(path)
            except (CheckpointDamaged, CheckpointMismatch) as error:
                if path.name not in self._damaged:
                    self._warn(str(error))
                self._damaged.add(path.name)
                skipped = True
                continue
            self._damaged.discard(path.name)
            if skipped and what is not None:
                self._warn(f"taking {path.name}, {what}")
            return path
        return None

    def _named(self) -> list[Path]:
        """Return all directories with a checkpoint's name, the newest first."""
        if not self.root.is_dir():
            return []
        found = [path for path in self.root.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=_key, reverse=True)

    def _readable(self) -> list[tuple[Path, Manifest]]:
        found = []
        for path in self._named():
            try:
                found.append((path, read_manifest(path)))
            except (CheckpointDamaged, CheckpointMismatch):
                continue
        return found

    def _looks_whole(self, path: Path) -> bool:
        """Return whether a checkpoint looks complete by its manifest and file sizes, without reading everything."""
        try:
            for name, entry in read_manifest(path).files.items():
                os.close(open_regular(path / name, entry.num_bytes))
        except CheckpointDamaged:
            return False
        except CheckpointMismatch:
            return True  # of a newer dure, so not to be judged or removed by this one
        return path.name not in self._damaged


def _discard(path: Path) -> None:
    """Remove a folder if it exists; of a link only the link, because its target does not belong to this run."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _key(path: Path) -> tuple[int, int]:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)
