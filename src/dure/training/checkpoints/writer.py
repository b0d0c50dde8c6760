"""One save in progress: the temporary directory, every rank's files, the manifest last, and the rename."""

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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from dure.comm.groups import Group
from dure.documents import parse_json
from dure.errors import CheckpointNotWritten, DiskFull, DureError, PeerLost, StateChanged, WeightsNotFinite
from dure.own_files import make_folder, open_own
from dure.training.checkpoints.durable_files import (
    FULL_WORDS,
    open_regular,
    raise_if_full,
    sync_directory,
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
from dure.training.checkpoints.rank_shard import PARTS, PieceTable, Share, merged_state, share_of, without_copies
from dure.training.checkpoints.staging import HostCopies
from dure.training.checkpoints.state import Position, Snapshot
from dure.training.checkpoints.state_tree import encode
from dure.units import format_bytes

NAME = re.compile(r"samples-(\d{12,})(?:\.(\d+))?")
"""Sorts by position. `.2` is a later one at the same position, because one that is there is never touched."""
WRITING = ".writing-"
MARGIN_BYTES = 2**20
"""Bytes that the directory and a few lines of records may need in addition to the files."""
MANIFEST_BYTES_PER_TENSOR = 512
_LOCK_PATIENCE_SECONDS = 2.0
"""Seconds in which rank 0, if it lives, has locked the directory."""
MOST_OF_MEMORY = 0.5
"""Fraction of the host's free memory that the copies of all ranks may take."""


class CheckpointWriter:
    """Writer of one rank's part of one checkpoint. Rank 0 makes the directory, writes the manifest and renames.

    `begin` is for all ranks together; a failure of one is a failure of all. What comes after it exchanges nothing, so
    that a thread may do it while training goes on.
    """

    def __init__(
        self, root: Path, snapshot: Snapshot, position: Position, group: Group, fence: Callable[[], None]
    ) -> None:
        """Prepare to save `snapshot` under `root`; nothing is done yet. `fence` refuses where it is not ours to."""
        self.root = root
        self._fence = fence
        self.position = position
        self.rank = group.rank
        self.world_size = group.world_size
        self.is_copied = False
        """True if a copy is written: the tensors themselves may change once it is complete."""
        self.copies: HostCopies | None = None
        """Staging buffer that makes the copy; None if there is none."""
        self.copied_bytes = self.free_bytes = 0
        """Bytes that the copies of all ranks would take beyond their present buffers, and bytes of free memory."""
        self._snapshot = snapshot
        self._group = group
        self._share: Share | None = None
        self._pieces: list[PieceTable] = []
        self._needed = 0
        self._directory: Path | None = None
        self._begun_at = time.monotonic()
        self._lock: int | None = None

    def begin(self, copies: HostCopies | None = None) -> None:
        """Agree on who writes what, make the directory when there is room, and copy the tensors if asked to.

        Args:
            copies: Takes the copy, unless memory is short: `is_copied` says which.

        Communication: two gathered JSON messages, about 200 bytes per rank and, with sharded tensors, 100 per piece.

        Raises:
            DiskFull: On every rank, when there is no room.
            CheckpointNotWritten: On a rank that could not do its part.
            PeerLost: Another rank could not do its part.
        """
        try:
            self._adopt(self._agree("prepare", lambda: self._describe(copies)))
            name = self._agree("begin", self._name_directory)[0]
            self._directory = self.root / name
            if copies is not None and self.copied_bytes <= MOST_OF_MEMORY * self.free_bytes:
                assert self._share is not None
                self._share, self.is_copied, self.copies = copies.of(self._share), True, copies
        except BaseException:
            self.abandon()
            raise
        # what is in it lives longer than this save where it is another one's
        self._snapshot = Snapshot()

    def _agree(self, phase: str, action: Callable[[], Any]) -> list[Any]:
        """Do this rank's part of a phase and exchange the answers; a failure anywhere is an error everywhere."""
        mine: Exception | None = None
        try:
            answer = {"answer": self._saying(action)}
        except Exception as error:
            mine = error
            answer = word_of(error)
        answers = self._group.all_gather_json(answer)
        if mine is not None:
            raise mine
        self.raise_what_others_said(answers, phase)
        return [other["answer"] for other in answers]

    def raise_what_others_said(self, answers: Sequence[Mapping[str, Any]], phase: str) -> None:
        """Raise what went wrong on another rank, if anything did.

        Raises:
            DiskFull: It found no room.
            StateChanged: What it copied did not stay as it was.
            WeightsNotFinite: What it was to write is not finite.
            PeerLost: Anything else.
        """
        for rank, other in enumerate(answers):
            if (kind := _TOLD.get(other.get("kind"))) is not None:
                raise kind(other["error"])
            if "error" in other:
                raise PeerLost(
                    f"rank {rank} could not {phase} its part of the checkpoint"
                    f" at {self.position.samples_seen} samples: {other['error']}"
                )

    def _saying(self, action: Callable[[], Any]) -> Any:
        """Turn what the system says into a sentence, with the bytes needed where there were too few."""
        place = self.root / base_name(self.position)
        try:
            try:
                return action()
            except OSError as error:
                raise_if_full(error, place)
                what = f"{error.strerror or error}{f' ({Path(error.filename).name})' if error.filename else ''}"
                raise CheckpointNotWritten(
                    f"the checkpoint at {self.position.samples_seen} samples could not be written to {self.root}:"
                    f" {what}; {_words_of_others(self.root)}: mend the disk and go on with `dure train --resume`"
                ) from error
        except DiskFull as error:
            if not self._needed or FULL_WORDS not in str(error):
                raise
            needed = format_bytes(self._needed)
            raise DiskFull(f"a checkpoint needs {needed}, and {error}; {_words_of_others(self.root)}") from error

    def _describe(self, copies: HostCopies | None) -> Any:
        self._share = share_of(self._snapshot, self.rank)
        tensors = sum(len(part) for part in self._share.parts.values())
        needed = self._share.most_bytes() + tensors * MANIFEST_BYTES_PER_TENSOR
        described = {"pieces": self._share.pieces(), "num_bytes": needed, "aliases": self._share.aliases}
        if copies is not None:
            missing = copies.missing_bytes(self._share)
            described |= {"copied": missing, "free": psutil.virtual_memory().available if missing else None}
        return {**described, "state": self._share.state.decode()} if self._snapshot.is_spread else described

    def _adopt(self, shares: list[Any]) -> None:
        assert self._share is not None
        self._pieces = without_copies([share["pieces"] for share in shares])
        self._share.keep_only(self._pieces[self.rank])
        if self._snapshot.is_spread and self.rank == 0:
            self._share.state = merged_state([share["state"].encode() for share in shares])
            for share in shares:
                self._share.aliases = {**share["aliases"], **self._share.aliases}
        self._needed = sum(share["num_bytes"] for share in shares) + MARGIN_BYTES
        self.copied_bytes = sum(share.get("copied", 0) for share in shares)
        free = [share["free"] for share in shares if share.get("free") is not None]
        self.free_bytes = min(free, default=0)

    def _name_directory(self) -> str | None:
        """Choose the directory's name, on rank 0, when there is room for all that will be in it.

        It is not made here: while a disk is busy with what was written before, that alone may take longer than a step.
        """
        if self.rank:
            return None
        make_folder(self.root, exist_ok=True)
        free = shutil.disk_usage(self.root).free
        if free < self._needed:
            raise DiskFull(
                f"a checkpoint needs {format_bytes(self._needed)} but {format_bytes(free)} is free in {self.root}:"
                " free some, keep fewer with --keep-checkpoints, or put the run elsewhere with --runs-dir;"
                f" {_words_of_others(self.root)}"
            )
        return f"{WRITING}{base_name(self.position)}-{secrets.token_hex(8)}"

    def _make_directory(self) -> None:
        """Make the directory, on whatever rank comes first, and lock it on rank 0."""
        assert self._directory is not None
        make_folder(self._directory, exist_ok=True)
        if self.rank == 0:
            self._lock = lock_writing_directory(self._directory)

    def write(self, between: Callable[[], None]) -> dict[str, Any]:
        """Write this rank's files, and return their sizes and hashes as plain JSON values.

        Args:
            between: Called after every few megabytes; what it raises ends the writing.

        Raises:
            DiskFull: There is no room.
            CheckpointNotWritten: The system refuses.
            WeightsNotFinite: The weights are none to go on from.
        """
        share, directory = self._share, self._directory
        assert share is not None
        assert directory is not None

        def write() -> dict[str, FileEntry]:
            self._make_directory()
            return share.write(directory, between)

        try:
            written = self._saying(write)
        except WeightsNotFinite as error:
            raise WeightsNotFinite(
                f"{error} after step {self.position.step}, so the checkpoint at {self.position.samples_seen} samples is"
                " left out and those before it stay: look at the learning rate and at --clip-norm, and go on from the"
                " last one with `dure train --resume`"
            ) from error
        return {file: entry.model_dump() for file, entry in written.items()}

    def leave_word(self, word: Mapping[str, Any]) -> None:
        """Tell rank 0, by a file in the directory, how this rank's part has ended."""
        assert self._directory is not None
        new = self._directory / f"{_word_name(self.rank)}.writing"
        with suppress(OSError):  # rank 0 hears of it when all meet
            with open(new, "w", encoding="utf-8", opener=open_own) as file:
                file.write(json.dumps(word))
            new.rename(self._directory / _word_name(self.rank))

    def words(self) -> list[Any] | None:
        """Return what the other ranks left, in the order of ranks, or None as long as one is missing.

        A rank that failed is not waited for: with its word alone the others are none.
        """
        assert self._directory is not None
        found = []
        for rank in range(1, self.world_size):
            path = self._directory / _word_name(rank)
            if path.exists():
                with open(open_regular(path, at_most=MANIFEST_MAX_BYTES), "rb") as file:
                    found.append(parse_json(file.read(), may_repeat_keys=True, most_depth=None))
        is_settled = len(found) == self.world_size - 1 or any("error" in word for word in found)
        return found if is_settled else None

    def commit(self, files: Sequence[Mapping[str, Any]], metrics: Any, is_best: bool) -> str:
        """Write the manifest and make the checkpoint visible, on rank 0; return its name.

        The order is the whole protection: files and manifest are on the disk before the name is, and the name is
        before any rank is told of it.

        Args:
            files: What `write` returned, of every rank.
            metrics: For the manifest.
            is_best: For the manifest.
        """
        return str(self._saying(lambda: self._commit(files, metrics, is_best)))

    def _commit(self, files: Sequence[Mapping[str, Any]], metrics: Any, is_best: bool) -> str:
        directory = self._directory
        assert directory is not None
        for rank in range(1, self.world_size):
            (directory / _word_name(rank)).unlink(missing_ok=True)
        manifest = self._manifest(files, metrics, is_best)
        if fault := manifest.fault():
            raise RuntimeError(f"the checkpoint would contradict itself, so that nobody could read it: {fault}")
        write_new_file(directory / MANIFEST_NAME, [seal(manifest)])
        sync_directory(directory)
        self._fence()
        final = free_name(self.root, self.position)
        directory.rename(self.root / final)
        self._directory = None
        sync_directory(self.root)
        return final

    def _manifest(self, files: Sequence[Mapping[str, Any]], metrics: Any, is_best: bool) -> Manifest:
        assert self._share is not None
        entries = {part: self._share.entries(part, self._pieces) for part in PARTS}
        position = self.position
        return Manifest(
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            written_with={"torch": str(torch.__version__), "python": platform.python_version()},
            position=PositionEntry(samples_seen=position.samples_seen, step=position.step, epoch=position.epoch),
            world_size=self.world_size,
            is_best=is_best,
            metrics=encode(metrics, "metrics"),
            model=entries["model"],
            aliases=self._share.aliases,
            optimizer=entries["optimizer"],
            files={name: FileEntry(**entry) for answer in files for name, entry in answer.items()},
        )

    def is_still_written(self) -> bool:
        """Return whether rank 0 is still at it, as the others can tell from the directory."""
        if self._directory is None or not self._directory.exists():
            return False
        return time.monotonic() - self._begun_at < _LOCK_PATIENCE_SECONDS or is_being_written(self._directory)

    def abandon(self) -> None:
        """Leave nothing half-written behind; after a rename there is nothing to leave."""
        if self._directory is not None and self.rank == 0:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._directory = self._lock = self._share = None


def word_of(error: Exception) -> dict[str, Any]:
    """Return a failure as what the other ranks are told of it."""
    kind = type(error).__name__
    return {"error": f"{error}" or kind, **({"kind": kind} if kind in _TOLD else {})}


_TOLD: dict[str | None, type[DureError]] = {kind.__name__: kind for kind in (DiskFull, StateChanged, WeightsNotFinite)}
"""Errors that are the same failure on every rank, whichever rank found it; by class name."""


def _word_name(rank: int) -> str:
    return f".rank{rank:05d}.json"


def lock_writing_directory(directory: Path) -> int:
    """Lock the temporary directory of a save, as long as the returned descriptor is open.

    The lock ends with the process, whatever ends it: so a leftover is told from a save in progress without trusting
    process ids, which are used again and mean nothing in another container.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


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


def _words_of_others(root: Path) -> str:
    """Return the clause about the checkpoints of a folder, for one that could not be written."""
    if any(root.glob("samples-*")):
        return "the checkpoints before it are untouched"
    return "there is no checkpoint before it"


def free_name(root: Path, position: Position) -> str:
    """Return the first name for a position that is not taken."""
    base, revision = base_name(position), 1
    name = base
    while os.path.lexists(root / name):
        revision += 1
        name = f"{base}.{revision}"
    return name
