"""Files of a checkpoint: a temporary directory, every rank's part, the manifest last, and the rename."""

import fcntl
import json
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dure.documents import parse_json
from dure.errors import CheckpointNotWritten, DiskFull, WeightsNotFinite
from dure.own_files import make_folder, open_own, sync_folder
from dure.training.checkpoints.durable_files import (
    FULL_TEXT,
    open_regular,
    raise_if_full,
    write_new_file,
)
from dure.training.checkpoints.manifest import (
    MANIFEST_MAX_BYTES,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    PositionEntry,
    seal,
)
from dure.training.checkpoints.rank_shard import PARTS, PieceTable, RankShard
from dure.training.checkpoints.state import Position
from dure.training.checkpoints.state_tree import encode
from dure.units import format_bytes

NAME = re.compile(r"samples-(\d{12,})(?:\.(\d+))?")
"""Name of a checkpoint; names sort by position. `.2` is a later one at the same position: existing ones are never
touched."""
WRITING = ".writing-"
_LOCK_PATIENCE_SECONDS = 2.0
"""Seconds within which a living rank 0 has locked the directory."""


@dataclass(kw_only=True)
class Target:
    """Destination of a checkpoint, and the space that it needs there."""

    root: Path
    """Folder of the run's checkpoints."""
    position: Position
    fence: Callable[[], None]
    """Function that raises if another node has taken over the run."""
    needed_bytes: int = 0
    """Bytes of all ranks' files, once they are known; 0 before."""

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Return the result of an action, and turn errors of the system into sentences.

        Raises:
            DiskFull: There is no space; the message gives the bytes needed.
            CheckpointNotWritten: The system refuses for another reason.
        """
        place = self.root / base_name(self.position)
        try:
            try:
                return action()
            except OSError as error:
                raise_if_full(error, place)
                what = f"{error.strerror or error}{f' ({Path(error.filename).name})' if error.filename else ''}"
                raise CheckpointNotWritten(
                    f"the checkpoint at {self.position.samples_seen} samples could not be written to {self.root}:"
                    f" {what}; {_text_on_others(self.root)}: mend the disk and go on with `dure train --resume`"
                ) from error
        except DiskFull as error:
            if not self.needed_bytes or FULL_TEXT not in str(error):
                raise
            needed = format_bytes(self.needed_bytes)
            raise DiskFull(f"a checkpoint needs {needed}, and {error}; {_text_on_others(self.root)}") from error

    def writing_name(self) -> str:
        """Choose the temporary directory's name, if there is space for its future contents.

        The directory is not created here: while a disk is busy with earlier writes, that alone may take longer than a
        step.

        Raises:
            DiskFull: There is not enough space.
        """
        make_folder(self.root, exist_ok=True)
        free = shutil.disk_usage(self.root).free
        if free < self.needed_bytes:
            raise DiskFull(
                f"a checkpoint needs {format_bytes(self.needed_bytes)} but {format_bytes(free)} is free in {self.root}:"
                " free some, keep fewer with --checkpoint.keep, or put the run elsewhere with --runs-dir;"
                f" {_text_on_others(self.root)}"
            )
        return f"{WRITING}{base_name(self.position)}-{secrets.token_hex(8)}"


class CheckpointWriter:
    """Writer of one rank's files into a temporary directory, and on rank 0 of the manifest, which ends with a rename.

    It communicates with other ranks only through that directory, so a thread may use it while training continues.
    """

    def __init__(
        self, target: Target, writing_name: str, share: RankShard, pieces: list[PieceTable], world_size: int
    ) -> None:
        """Prepare the writer; nothing is done yet.

        Args:
            target: Destination of the checkpoint.
            writing_name: Name of the temporary directory, the same on every rank.
            share: Shard that this rank writes.
            pieces: Pieces of sharded tensors, by rank.
            world_size: Number of ranks that write.
        """
        self.share = share
        self._target = target
        self._pieces = pieces
        self._world_size = world_size
        self._directory: Path | None = target.root / writing_name
        self._begun_at = time.monotonic()
        self._lock: int | None = None

    def _make_directory(self) -> Path:
        """Create the directory, on whichever rank comes first, and lock it on rank 0."""
        assert self._directory is not None
        make_folder(self._directory, exist_ok=True)
        if self.share.rank == 0:
            self._lock = lock_writing_directory(self._directory)
        return self._directory

    def write(self, between: Callable[[], None]) -> dict[str, Any]:
        """Write this rank's files, and return their sizes and hashes as plain JSON values.

        Args:
            between: Called after every few megabytes; an exception from it ends the writing.

        Raises:
            DiskFull: There is no space.
            CheckpointNotWritten: The system refuses.
            WeightsNotFinite: No run could continue from the weights.
        """
        position = self._target.position
        try:
            written = self._target.attempt(lambda: self.share.write(self._make_directory(), between))
        except WeightsNotFinite as error:
            raise WeightsNotFinite(
                f"{error} after step {position.step}, so the checkpoint at {position.samples_seen} samples is"
                " left out and those before it stay: look at the learning rate and at --clip-norm, and go on from the"
                " last one with `dure train --resume`"
            ) from error
        return {file: entry.model_dump() for file, entry in written.items()}

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Report the outcome of this rank's part to rank 0, by a file in the directory."""
        assert self._directory is not None
        new = self._directory / f"{_status_name(self.share.rank)}.writing"
        with suppress(OSError):  # rank 0 learns of a failure when all ranks meet
            with open(new, "w", encoding="utf-8", opener=open_own) as file:
                file.write(json.dumps(status))
            new.rename(self._directory / _status_name(self.share.rank))

    def read_statuses(self) -> list[Any] | None:
        """Return the statuses that the other ranks left, in the order of ranks, or None while one is missing.

        A failed rank ends the wait: its status is returned although others are missing.
        """
        assert self._directory is not None
        found = []
        for rank in range(1, self._world_size):
            path = self._directory / _status_name(rank)
            if path.exists():
                with open(open_regular(path, at_most=MANIFEST_MAX_BYTES), "rb") as file:
                    found.append(parse_json(file.read(), may_repeat_keys=True, most_depth=None))
        is_settled = len(found) == self._world_size - 1 or any("error" in status for status in found)
        return found if is_settled else None

    def commit(self, files: Sequence[Mapping[str, Any]], metrics: Any, is_best: bool) -> str:
        """Write the manifest and make the checkpoint visible, on rank 0; return its name.

        The order provides the protection: files and manifest are on disk before the name is, and the name is on disk
        before any rank learns of it.

        Args:
            files: Results of `write` of all ranks.
            metrics: Metrics for the manifest.
            is_best: Whether the manifest marks it as the best.
        """
        return str(self._target.attempt(lambda: self._commit(files, metrics, is_best)))

    def _commit(self, files: Sequence[Mapping[str, Any]], metrics: Any, is_best: bool) -> str:
        directory = self._directory
        assert directory is not None
        for rank in range(1, self._world_size):
            (directory / _status_name(rank)).unlink(missing_ok=True)
        manifest = self._manifest(files, metrics, is_best)
        if fault := manifest.fault():
            raise RuntimeError(f"the checkpoint would contradict itself, so that nobody could read it: {fault}")
        write_new_file(directory / MANIFEST_NAME, [seal(manifest)])
        sync_folder(directory)
        self._target.fence()
        root = self._target.root
        final = free_name(root, self._target.position)
        directory.rename(root / final)
        self._directory = None
        sync_folder(root)
        return final

    def _manifest(self, files: Sequence[Mapping[str, Any]], metrics: Any, is_best: bool) -> Manifest:
        entries = {part: self.share.entries(part, self._pieces) for part in PARTS}
        position = self._target.position
        return Manifest(
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            written_with={"torch": str(torch.__version__), "python": platform.python_version()},
            position=PositionEntry(samples_seen=position.samples_seen, step=position.step, epoch=position.epoch),
            world_size=self._world_size,
            is_best=is_best,
            metrics=encode(metrics, "metrics"),
            model=entries["model"],
            aliases=self.share.aliases,
            optimizer=entries["optimizer"],
            files={name: FileEntry(**entry) for answer in files for name, entry in answer.items()},
        )

    def is_still_written(self) -> bool:
        """Return whether rank 0 is still writing, judging by the directory."""
        if self._directory is None or not self._directory.exists():
            return False
        return time.monotonic() - self._begun_at < _LOCK_PATIENCE_SECONDS or is_being_written(self._directory)

    def abandon(self) -> None:
        """Remove a half-written directory; after the rename there is none."""
        if self._directory is not None and self.share.rank == 0:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._directory = self._lock = None


def _status_name(rank: int) -> str:
    return f".rank{rank:05d}.json"


def lock_writing_directory(directory: Path) -> int:
    """Lock the temporary directory of a save until the returned descriptor is closed.

    The lock ends with the process, whatever ends it. It distinguishes a leftover from a save in progress without
    process ids, which are reused and mean nothing in another container.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def is_being_written(directory: Path) -> bool:
    """Return whether a live process is saving into a temporary directory."""
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
    """Return the name of a checkpoint at a position."""
    return f"samples-{position.samples_seen:012d}"


def _text_on_others(root: Path) -> str:
    """Return the clause about existing checkpoints for the message that one could not be written."""
    if any(root.glob("samples-*")):
        return "the checkpoints before it are untouched"
    return "there is no checkpoint before it"


def free_name(root: Path, position: Position) -> str:
    """Return the first free name for a position."""
    base, revision = base_name(position), 1
    name = base
    while os.path.lexists(root / name):
        revision += 1
        name = f"{base}.{revision}"
    return name
