"""One save in progress: the temporary directory, every rank's files, the manifest last, and the rename."""

import fcntl
import os
import platform
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dure.comm.groups import Group
from dure.errors import DiskFull, PeerLost
from dure.training.checkpoint_share import PARTS, PieceTable, Share, merged_state, share_of, without_copies
from dure.training.durable_files import raise_if_full, sync_directory, write_new_file
from dure.training.manifest import MANIFEST_NAME, FileEntry, Manifest, PositionEntry, seal
from dure.training.snapshot import Position, Snapshot
from dure.training.state_tree import encode
from dure.units import format_bytes

NAME = re.compile(r"samples-(\d{12,})(?:\.(\d+))?")
"""Sorts by position. `.2` is a later one at the same position, because one that is there is never touched."""
WRITING = ".writing-"
MARGIN_BYTES = 2**20
"""What the directory and a few lines of records may need beside the files."""
MANIFEST_BYTES_PER_TENSOR = 512


class CheckpointWriter:
    """What one rank does for one checkpoint. Rank 0 makes the directory, writes the manifest and renames.

    Each method is one phase, run on every rank and followed by an exchange of its answers, which are plain JSON
    values: no rank begins a phase before the one before has succeeded everywhere.
    """

    def __init__(self, root: Path, snapshot: Snapshot, position: Position, group: Group) -> None:
        """Prepare to save `snapshot` under `root`; nothing is done yet."""
        self._root = root
        self._snapshot = snapshot
        self._position = position
        self._group = group
        self._share: Share | None = None
        self._pieces: list[PieceTable] = []
        self._needed = 0
        self._directory: Path | None = None
        self._lock: int | None = None

    def run(self, metrics: Any, is_best: bool) -> tuple[Path, int]:
        """Go through all phases and return the checkpoint's path and its bytes.

        Raises:
            DiskFull: On every rank, when any of them lacks the room.
            PeerLost: Another rank could not do its part.
        """
        try:
            shares = self._agree("prepare", self._describe)
            self._adopt(shares)
            name = self._agree("begin", self._begin)[0]
            files = self._agree("write", lambda: self._write(name))
            final = self._agree("finish", lambda: self._commit(files, metrics, is_best))[0]
        finally:
            self._abandon()
        return self._root / final, sum(entry["num_bytes"] for answer in files for entry in answer.values())

    def _agree(self, phase: str, action: Callable[[], Any]) -> list[Any]:
        """Do this rank's part of a phase and exchange the answers; a failure anywhere is an error everywhere."""
        mine: Exception | None = None
        try:
            answer = {"answer": self._naming_full_disks(action)}
        except Exception as error:
            mine = error
            answer = {"error": f"{error}" or type(error).__name__, "is_full": isinstance(error, DiskFull)}
        answers = self._group.all_gather_json(answer)
        if mine is not None:
            raise mine
        for rank, other in enumerate(answers):
            if other.get("is_full"):
                raise DiskFull(other["error"])
            if "error" in other:
                raise PeerLost(
                    f"rank {rank} could not {phase} its part of the checkpoint"
                    f" at {self._position.samples_seen} samples: {other['error']}"
                )
        return [other["answer"] for other in answers]

    def _naming_full_disks(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except OSError as error:
            raise_if_full(error, self._root / base_name(self._position))
            raise

    def _describe(self) -> Any:
        self._share = share_of(self._snapshot, self._group.rank)
        tensors = sum(len(part) for part in self._share.parts.values())
        needed = self._share.num_bytes() + tensors * MANIFEST_BYTES_PER_TENSOR
        described = {"pieces": self._share.pieces(), "num_bytes": needed, "aliases": self._share.aliases}
        return {**described, "state": self._share.state.decode()} if self._snapshot.is_spread else described

    def _adopt(self, shares: list[Any]) -> None:
        assert self._share is not None
        self._pieces = without_copies([share["pieces"] for share in shares])
        self._share.keep_only(self._pieces[self._group.rank])
        if self._snapshot.is_spread and self._group.rank == 0:
            self._share.state = merged_state([share["state"].encode() for share in shares])
            for share in shares:
                self._share.aliases = {**share["aliases"], **self._share.aliases}
        self._needed = sum(share["num_bytes"] for share in shares) + MARGIN_BYTES

    def _begin(self) -> str | None:
        """Make the directory, on rank 0, when there is room for all that will be in it."""
        if self._group.rank:
            return None
        self._root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._root).free
        if free < self._needed:
            raise DiskFull(
                f"a checkpoint needs {format_bytes(self._needed)} but {format_bytes(free)} is free in {self._root}:"
                " free some, keep fewer with --keep-checkpoints, or put the run elsewhere with --runs-dir;"
                " the checkpoints before it are untouched"
            )
        self._directory, self._lock = make_writing_directory(self._root, self._position)
        return self._directory.name

    def _write(self, name: str) -> Any:
        assert self._share is not None
        return {file: entry.model_dump() for file, entry in self._share.write(self._root / name).items()}

    def _commit(self, files: list[Any], metrics: Any, is_best: bool) -> str | None:
        """Write the manifest and make the checkpoint visible, on rank 0.

        The order is the whole protection: files and manifest are on the disk before the name is, and the name is
        before anybody is told of it.
        """
        if self._group.rank:
            return None
        assert self._directory is not None
        manifest = self._manifest(files, metrics, is_best)
        write_new_file(self._directory / MANIFEST_NAME, [seal(manifest)])
        sync_directory(self._directory)
        final = free_name(self._root, self._position)
        self._directory.rename(self._root / final)
        self._directory = None
        sync_directory(self._root)
        return final

    def _manifest(self, files: list[Any], metrics: Any, is_best: bool) -> Manifest:
        assert self._share is not None
        entries = {part: self._share.entries(part, self._pieces) for part in PARTS}
        position = self._position
        return Manifest(
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            written_with={"torch": str(torch.__version__), "python": platform.python_version()},
            position=PositionEntry(samples_seen=position.samples_seen, step=position.step, epoch=position.epoch),
            world_size=self._group.world_size,
            is_best=is_best,
            metrics=encode(metrics, "metrics"),
            model=entries["model"],
            aliases=self._share.aliases,
            optimizer=entries["optimizer"],
            files={name: FileEntry(**entry) for answer in files for name, entry in answer.items()},
        )

    def _abandon(self) -> None:
        """Leave nothing half-written behind; after a rename there is nothing to leave."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._directory = self._lock = None


def make_writing_directory(root: Path, position: Position) -> tuple[Path, int]:
    """Make the temporary directory of a save, locked as long as the returned descriptor is open.

    The lock ends with the process, whatever ends it: so a leftover is told from a save in progress without trusting
    process ids, which are used again and mean nothing in another container.
    """
    for attempt in range(1000):
        directory = root / f"{WRITING}{base_name(position)}-{os.getpid()}{f'.{attempt}' if attempt else ''}"
        with suppress(FileExistsError):
            directory.mkdir()
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return directory, descriptor
    raise FileExistsError(f"a thousand leftovers of {WRITING}{base_name(position)} in {root}: remove them")


def is_being_written(directory: Path) -> bool:
    """Say whether a live process is saving into a temporary directory."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def base_name(position: Position) -> str:
    """Name a checkpoint by its position."""
    return f"samples-{position.samples_seen:012d}"


def free_name(root: Path, position: Position) -> str:
    """Return the first name for a position that is not taken."""
    base, revision = base_name(position), 1
    name = base
    while os.path.lexists(root / name):
        revision += 1
        name = f"{base}.{revision}"
    return name
