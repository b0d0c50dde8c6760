"""The checkpoints of a run: whatever happens, the newest whole one can be found and is what was written.

A checkpoint is a fresh directory under a temporary name. Every rank writes its files and forces them to the disk; the
manifest with their sizes and SHA-256 comes last; one rename makes the directory visible. So a crash at any moment
leaves the older checkpoints and at most a `.writing-` directory, which is no checkpoint and is removed at the next
start. Nothing is ever written into a directory that is a checkpoint already.

    checkpoints/
      samples-000000001024/    manifest.json, model.safetensors, optimizer.safetensors, state.json, rank<r>.safetensors
      latest, best             names, for people and scripts; dure itself trusts only the manifests
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from dure.errors import CheckpointDamaged, CheckpointMismatch, DureError
from dure.training.checkpoints.durable_files import open_regular, replace_file, sync_directory
from dure.training.checkpoints.manifest import Manifest, read_manifest
from dure.training.checkpoints.reader import verify
from dure.training.checkpoints.writer import NAME, WRITING, is_being_written

TRASH = ".trash-"


class CheckpointStore:
    """The catalogue of one run's checkpoints. Nothing in it is collective: any one rank may ask."""

    def __init__(
        self, root: Path, keep: int, warn: Callable[[str], None], fence: Callable[[], None] = lambda: None
    ) -> None:
        """Name the folder; nothing is read or written yet.

        Args:
            root: The folder; it is made when the first checkpoint is saved.
            keep: How many of the newest to keep, in addition to the best.
            warn: Receives one sentence for each thing that is wrong without ending the run.
            fence: Asked before a checkpoint is completed; raises where another has taken over the run.
        """
        self.root = root
        self.fence = fence
        self._keep = max(keep, 1)
        self._warn = warn
        self._damaged: set[str] = set()

    def take_in(self, path: Path, *, is_best: bool) -> None:
        """Point to a checkpoint that was written, and remove old ones. It is safe: what fails here is only told."""
        try:
            replace_file(self.root / "latest", f"{path.name}\n")
            if is_best:
                replace_file(self.root / "best", f"{path.name}\n")
            self._remove_old(path)
        except (OSError, DureError) as error:
            self._warn(f"checkpoint {path.name} is saved, but tidying up after it failed: {error}")

    def _remove_old(self, newest: Path) -> None:
        """Keep the newest K positions up to the one just saved, and the best.

        Those beyond it are left alone. They are of a run that was resumed from further back because they were damaged,
        and must neither count as the newest nor be destroyed before a person has seen them.
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
            elif path not in (best, newest):  # what was saved just now goes for no reason
                self._remove(path)

    def _remove(self, path: Path) -> None:
        # renamed first: a crash in the middle must not leave something that bears a checkpoint's name
        trash = path.with_name(f"{TRASH}{path.name}")
        _discard(trash)
        path.rename(trash)
        _discard(trash)

    def remove_leftovers(self) -> None:
        """Remove what saves that never ended, and removals that never ended, left behind. For rank 0, at the start."""
        if not self.root.is_dir():
            return
        for path in [*self.root.glob(f"{WRITING}*"), *self.root.glob(f"{TRASH}*")]:
            if path.is_dir() and not path.is_symlink() and not is_being_written(path):
                shutil.rmtree(path, ignore_errors=True)
        sync_directory(self.root)

    def positions(self) -> list[tuple[Path, int]]:
        """Return every checkpoint, good or not, with the samples seen by then; the newest first."""
        return [(path, _key(path)[0]) for path in self._named()]

    def newest_valid(self) -> Path | None:
        """Return the newest checkpoint of which every byte is what was written, or None when there is none.

        Each damaged one is reported by name with the reason, and then which one is taken instead.
        """
        return self._first_valid(self._named(), "the newest good one")

    def best(self) -> Path | None:
        """Return the checkpoint that was the best when it was saved; the newest good one when that cannot be used."""
        declared = [path for path, manifest in self._readable() if manifest.is_best]
        found = self._first_valid(declared, "the best before it")
        if found is None and (found := self._first_valid(self._named())) is not None:
            self._warn(f"there is no good checkpoint that is marked as the best; taking the newest, {found.name}")
        return found

    def _first_valid(self, candidates: list[Path], what: str | None = None) -> Path | None:
        """Return the first good one; say `what` it is if others came before it. Of each damaged one is told once."""
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
        """List everything that bears a checkpoint's name, the newest first."""
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
        """Tell from manifest and sizes, without reading it all, whether a checkpoint counts among the kept."""
        try:
            for name, entry in read_manifest(path).files.items():
                os.close(open_regular(path / name, entry.num_bytes))
        except CheckpointDamaged:
            return False
        except CheckpointMismatch:
            return True  # of a newer dure: not for this one to judge, nor to remove
        return path.name not in self._damaged


def _discard(path: Path) -> None:
    """Remove a folder if it is there; of a link only the link, for what it leads to is not this run's."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _key(path: Path) -> tuple[int, int]:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)
