"""A checkpoint on its way to the disk while the ranks train on.

Only `settle` exchanges anything, and it is called by all ranks between the same two steps: a collective of a second
thread would meet another rank's in another order. The threads themselves talk through the directory that they write
into: every rank leaves a word there when its files are on the disk, and rank 0's thread then writes the manifest.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dure.comm.groups import Group
from dure.errors import PeerLost, StateChanged
from dure.training.checkpoints.writer import CheckpointWriter, word_of
from dure.units import format_bytes

_SHORTEST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.001, 0.05
_PATIENCE_SECONDS = 10.0
"""Seconds that rank 0, when it fails, waits for the others' parts after its own."""
_LONGEST_PATIENCE_SECONDS = 300.0
"""Seconds that another rank that fails lets rank 0 write, as its end would end rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is on the disk."""

    path: Path
    num_bytes: int
    """Bytes of all files of all ranks, the manifest excluded."""
    stall_seconds: float
    """Seconds that training was held up for it."""
    write_seconds: float
    """Seconds from the first byte to the last."""
    beside_bytes: int = 0
    """Bytes that rank 0 left to be copied during the next forward and backward; any wait for them in the end counts as
    stall."""


class _Cancelled(Exception):
    """The checkpoint is not wanted any more."""


class PendingSave:
    """One rank's part in one checkpoint, from the moment when what it saves may change again."""

    def __init__(
        self,
        writer: CheckpointWriter,
        metrics: Any,
        is_best: bool,
        after_commit: Callable[[SavedCheckpoint], None],
        started: float,
    ) -> None:
        """Take over a writer that has begun.

        Args:
            writer: This rank's.
            metrics: For the manifest.
            is_best: For the manifest.
            after_commit: Called on rank 0 when the checkpoint is on the disk, in the thread if there is one.
            started: `perf_counter` when training was first held up for it.
        """
        self.position = writer.position
        self._writer = writer
        self._metrics = metrics
        self._is_best = is_best
        self._after_commit = after_commit
        self._thread: threading.Thread | None = None
        self._is_whole = threading.Event()
        """True once the copy is complete, so that it may be written."""
        self._is_written = threading.Event()
        """True once this rank's own part has ended, successfully or not."""
        self._is_cancelled = threading.Event()
        self._files: dict[str, Any] | None = None
        self._parts: list[dict[str, Any]] | None = None
        """Files of all ranks, once this rank knows them."""
        self._error: Exception | None = None
        """Error of this rank itself."""
        self._heard: Exception | None = None
        """Error of another rank, of which the thread on rank 0 knows."""
        self._saved: SavedCheckpoint | None = None
        """Checkpoint that was saved, on rank 0; None before it is."""
        self._held: tuple[float, float | None] = (0.0, started)
        """Seconds that training was held up, and since when it is now; one value, because two threads use it."""
        self._began_to_write = 0.0

    @property
    def is_copied(self) -> bool:
        """Return whether training may go on before it is written."""
        return self._writer.is_copied

    @property
    def is_whole(self) -> bool:
        """Return whether what is copied may change."""
        return self._is_whole.is_set()

    @property
    def memory_words(self) -> str:
        """Return the memory that the copies need and the memory that is free, in words."""
        return f"{format_bytes(self._writer.copied_bytes)} of the {format_bytes(self._writer.free_bytes)}"

    @property
    def is_busy(self) -> bool:
        """Return whether this rank's thread is still at work."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Return whether this rank knows of a failure, which all should hear of."""
        return self._error is not None or self._heard is not None

    def start(self) -> None:
        """Write in a thread, as soon as the copy is complete, and let training go on."""
        if self._writer.copies is None or self._writer.copies.is_complete:
            self._is_whole.set()
        name = f"dure-checkpoint-{self.position.samples_seen}"
        # an interpreter that ends must not wait for a rank that never left its word
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._let_go()

    def complete_copy(self) -> None:
        """Return when what is copied may change; to be called before it does, by the thread that began the save."""
        if self._thread is None or self._is_whole.is_set():
            return
        is_held_already = self._hold()
        assert self._writer.copies is not None
        if not self._writer.copies.complete():
            self._error = StateChanged(
                f"weights or the optimiser's state changed outside the optimiser's step while the checkpoint at "
                f"{self.position.samples_seen} samples was copied beside it, so it is left out"
            )
        self._is_whole.set()
        if not is_held_already:
            self._let_go()

    def _run(self) -> None:
        self._is_whole.wait()
        if self._error is None:
            self.write()
        self._is_written.set()
        if self._writer.rank:
            self._writer.leave_word({"files": self._files} if self._error is None else word_of(self._error))
        elif self._error is None:
            self._finish()

    def write(self) -> None:
        """Write this rank's files; a failure is kept for `settle`."""
        self._began_to_write = time.perf_counter()
        try:
            self._files = self._writer.write(self._check)
        except Exception as error:
            self._error = error
        finally:
            self._is_written.set()

    def _check(self) -> None:
        if self._is_cancelled.is_set():
            raise _Cancelled("nobody waits for this checkpoint any more")

    def _finish(self) -> None:
        """Make the checkpoint visible, on rank 0, when every rank's files are there."""
        try:
            parts = self._await_parts()
            name = self._writer.commit(parts, self._metrics, self._is_best)
            self._saved = SavedCheckpoint(
                path=self._writer.root / name,
                num_bytes=sum(entry["num_bytes"] for part in parts for entry in part.values()),
                stall_seconds=self._stall_seconds(),
                write_seconds=time.perf_counter() - self._began_to_write,
                beside_bytes=0 if self._writer.copies is None else self._writer.copies.beside_bytes,
            )
            self._after_commit(self._saved)
        except Exception as error:
            self._error = error

    def _await_parts(self) -> list[dict[str, Any]]:
        assert self._files is not None
        look = _SHORTEST_LOOK_SECONDS
        while self._parts is None:
            self._check()
            if (words := self._writer.words()) is not None:
                self._heard = next((PeerLost(word["error"]) for word in words if "error" in word), None)
                if self._heard is not None:
                    raise _Cancelled(str(self._heard))
                return [self._files, *(word["files"] for word in words)]
            time.sleep(look)
            look = min(2 * look, _LONGEST_LOOK_SECONDS)
        return self._parts

    def settle(self, group: Group) -> SavedCheckpoint | None:
        """Wait until it is done on all ranks, and return what came of it; None when a rank was lost with its part.

        To be called by all ranks at the same step. After a `GroupShrank`, again.

        Communication: one or two gathered JSON messages of about 200 bytes per file.

        Raises:
            DiskFull: On every rank, when one found no room.
            StateChanged: On every rank, when what one copied did not stay as it was meanwhile.
            WeightsNotFinite: On every rank, when the weights of one are not finite.
            CheckpointNotWritten: On the rank that could not write.
            PeerLost: Another rank could not write its part.
        """
        self._hold()
        self.complete_copy()
        self._is_written.wait()
        if self._thread is not None and self._writer.rank:
            self._thread.join()  # its word is left before rank 0 may take away where
        said = group.all_gather_json(self._word())
        if self._writer.rank == 0 and self._saved is None and self._error is None:
            if len(said) == self._writer.world_size and all("error" not in one for one in said):
                self._parts = [one["files"] for one in said]
            else:
                self._is_cancelled.set()
        self._end()
        if not any("error" in one or one["saved"] for one in said):
            said = group.all_gather_json(self._word())
        self._writer.abandon()
        self._let_go()
        if self._error is not None and not isinstance(self._error, _Cancelled):
            raise self._error
        self._writer.raise_what_others_said(said, "write")
        told = next((one["saved"] for one in said if one["saved"]), None)
        return None if told is None else SavedCheckpoint(**{**told, "path": self._writer.root / told["path"]})

    def _word(self) -> dict[str, Any]:
        if self._error is not None and not isinstance(self._error, _Cancelled):
            return {"saved": None, **word_of(self._error)}
        saved = None if self._saved is None else {**asdict(self._saved), "path": self._saved.path.name}
        return {"saved": saved, "files": self._files}

    def _end(self) -> None:
        if self._thread is not None:
            self._thread.join()
        elif self._writer.rank == 0 and self._saved is None and self._error is None:
            self._finish()

    def leave(self, *, is_hurried: bool) -> None:
        """End without the others: what is being written is completed, as far as that can be known to be possible.

        Args:
            is_hurried: Leave at once what is not complete.
        """
        if is_hurried:
            self._is_cancelled.set()
        self.complete_copy()
        if self._thread is not None:
            self._is_written.wait()
            self._thread.join(_PATIENCE_SECONDS)
            self._is_cancelled.set()
            self._thread.join()
        deadline = time.monotonic() + _LONGEST_PATIENCE_SECONDS
        is_waiting = self._writer.rank > 0 and not is_hurried and self._error is None
        while is_waiting and self._writer.is_still_written() and time.monotonic() < deadline:
            time.sleep(_LONGEST_LOOK_SECONDS)
        self._writer.abandon()

    def _hold(self) -> bool:
        """Count from now on as time that training was held up; return whether it was counted already."""
        seconds, since = self._held
        self._held = seconds, time.perf_counter() if since is None else since
        return since is not None

    def _let_go(self) -> None:
        self._held = self._stall_seconds(), None

    def _stall_seconds(self) -> float:
        seconds, since = self._held
        return seconds + (0.0 if since is None else time.perf_counter() - since)
