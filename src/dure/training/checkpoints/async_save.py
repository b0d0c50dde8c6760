"""One save, from the ranks' agreement on it until it is on disk, while they continue to train.

Only `begin` and `settle` communicate, and all ranks call them between the same two steps: collectives of a second
thread would run in different orders on different ranks. The threads communicate through the directory that they write
to. Every rank leaves a status file there when its files are on disk, and rank 0's thread then writes the manifest.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from dure.comm.groups import Group
from dure.errors import DiskFull, DureError, PeerLost, StateChanged, WeightsNotFinite
from dure.training.checkpoints.rank_shard import PieceTable, RankShard, merged_state, shard_of, without_copies
from dure.training.checkpoints.staging import StagingBuffer
from dure.training.checkpoints.state import Position, Snapshot
from dure.training.checkpoints.store import CheckpointStore
from dure.training.checkpoints.writer import CheckpointWriter, Target
from dure.units import format_bytes

MOST_OF_MEMORY = 0.5
"""Maximum fraction of the host's free memory for the copies of all ranks."""
_MARGIN_BYTES = 2**20
"""Bytes reserved for the directory and a few lines of records, in addition to the files."""
_MANIFEST_BYTES_PER_TENSOR = 512
_SHORTEST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.001, 0.05
_PATIENCE_SECONDS = 10.0
"""Seconds that a failing rank 0 waits for the parts of the others after its own."""
_LONGEST_PATIENCE_SECONDS = 300.0
"""Seconds that another failing rank gives rank 0 to write, because its exit would end rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCheckpoint:
    """A checkpoint on disk."""

    path: Path
    position: Position
    is_best: bool
    num_bytes: int
    """Bytes of all files of all ranks, without the manifest."""
    stall_seconds: float
    """Seconds for which the save blocked training."""
    write_seconds: float
    """Seconds from the first byte written to the last."""
    beside_bytes: int = 0
    """Bytes of rank 0 that were left to be copied during the next forward and backward; a final wait for them counts as
    stall."""


class _Cancelled(Exception):
    """The checkpoint is no longer wanted."""


class AsyncSave:
    """One rank's part in the save of a checkpoint."""

    def __init__(
        self,
        store: CheckpointStore,
        position: Position,
        group: Group,
        *,
        metrics: Any = None,
        is_best: bool = False,
        on_saved: Callable[[SavedCheckpoint], None] | None = None,
        started: float | None = None,
    ) -> None:
        """Prepare the save; nothing is done before `begin`.

        Args:
            store: Store that receives the checkpoint.
            position: Position of the run; the same on every rank.
            group: Process group of the ranks that save. They share a file system.
            metrics: Plain values for the manifest: the evaluation at this position.
            is_best: Whether this is the best checkpoint so far; it is then kept until a better one is saved.
            on_saved: Called on rank 0 when the checkpoint is on disk, in the thread if there is one.
            started: `perf_counter` when the save began to block training; None for now.
        """
        self.position = position
        self.is_copied = False
        """True if a copy is written, so that training may continue; the tensors may change once the copy is
        complete."""
        self._store = store
        self._rank, self._world_size = group.rank, group.world_size
        self._target = Target(root=store.root, position=position, fence=store.fence)
        self.writer: CheckpointWriter
        """Writer of this rank's files, set by `begin`."""
        self._copies: StagingBuffer | None = None
        """Staging buffer that makes the copy; None if there is none."""
        self._copied_bytes = self._free_bytes = 0
        """Bytes that the copies of all ranks need beyond their present buffers, and bytes of free memory."""
        self._metrics = metrics
        self._is_best = is_best
        self._on_saved = on_saved
        self._thread: threading.Thread | None = None
        self._is_whole = threading.Event()
        """True once the copy is complete, so that it may be written."""
        self._is_written = threading.Event()
        """True once this rank's own part has ended, successfully or not."""
        self._is_cancelled = threading.Event()
        self._files: dict[str, Any] | None = None
        self._parts: list[dict[str, Any]] | None = None
        """Files of all ranks, once this rank knows them; None before."""
        self._error: Exception | None = None
        """Error of this rank itself; None if there is none."""
        self._peer_failure: Exception | None = None
        """Error of another rank, known to the thread of rank 0."""
        self._saved: SavedCheckpoint | None = None
        """Saved checkpoint, on rank 0; None before it is saved."""
        self._held: tuple[float, float | None] = (0.0, time.perf_counter() if started is None else started)
        """Seconds for which training was blocked, and since when it is blocked now; one value, because two threads use
        it."""
        self._began_to_write = 0.0

    def begin(self, snapshot: Snapshot, group: Group, copies: StagingBuffer | None = None) -> Self:
        """Agree on who writes what, find space for it, and copy the tensors if requested; the caller starts writing.

        All ranks succeed, or all raise with nothing left behind.

        Args:
            snapshot: State to save, with the tensors that each rank contributes.
            group: Process group of the ranks that save.
            copies: Buffer for a copy, with which training may continue at once; not used if memory is short (see
                `is_copied`).

        Communication: two gathered JSON messages, about 200 bytes per rank and, with sharded tensors, 100 per piece.

        Raises:
            DiskFull: There is not enough space; raised on every rank.
            CheckpointNotWritten: This rank could not do its part.
            TaskInvalid: Model or optimiser hold something that cannot be saved without pickle.
            PeerLost: Another rank could not do its part.
        """
        shares: list[RankShard] = []

        def describe() -> dict[str, Any]:
            shares.append(shard_of(snapshot, self._rank))
            return _described(shares[0], copies, is_spread=snapshot.is_spread)

        described = self._agree(group, "prepare", describe)
        share = shares[0]
        pieces = self._adopt(share, described, is_spread=snapshot.is_spread)
        name = self._agree(group, "begin", lambda: None if self._rank else self._target.writing_name())[0]
        if copies is not None and self._copied_bytes <= MOST_OF_MEMORY * self._free_bytes:
            share, self.is_copied, self._copies = copies.of(share), True, copies
        self.writer = CheckpointWriter(self._target, name, share, pieces, self._world_size)
        return self

    def _agree(self, group: Group, phase: str, action: Callable[[], Any]) -> list[Any]:
        """Do this rank's part of a phase and exchange the results; a failure on any rank is raised on all."""
        mine: Exception | None = None
        try:
            answer = {"answer": self._target.attempt(action)}
        except Exception as error:
            mine = error
            answer = failure_status(error)
        answers = group.all_gather_json(answer)
        if mine is not None:
            raise mine
        self._raise_failure_of_others(answers, phase)
        return [other["answer"] for other in answers]

    def _raise_failure_of_others(self, answers: Sequence[Mapping[str, Any]], phase: str) -> None:
        """Raise the failure of another rank, if there is one.

        Raises:
            DiskFull: It found no space.
            StateChanged: A tensor changed while it was copied.
            WeightsNotFinite: The weights to be written are not finite.
            PeerLost: It failed for any other reason.
        """
        for rank, other in enumerate(answers):
            if (kind := _COMMON_ERRORS.get(other.get("kind"))) is not None:
                raise kind(other["error"])
            if "error" in other:
                raise PeerLost(
                    f"rank {rank} could not {phase} its part of the checkpoint"
                    f" at {self.position.samples_seen} samples: {other['error']}"
                )

    def _adopt(self, share: RankShard, described: Sequence[Mapping[str, Any]], *, is_spread: bool) -> list[PieceTable]:
        """Apply what the ranks agreed on to this rank's share, and return the pieces that each rank writes."""
        pieces = without_copies([each["pieces"] for each in described])
        share.keep_only(pieces[self._rank])
        if is_spread and self._rank == 0:
            share.state = merged_state([each["state"].encode() for each in described])
            for each in described:
                share.aliases = {**each["aliases"], **share.aliases}
        self._target.needed_bytes = sum(each["num_bytes"] for each in described) + _MARGIN_BYTES
        self._copied_bytes = sum(each.get("copied", 0) for each in described)
        self._free_bytes = min((each["free"] for each in described if each.get("free") is not None), default=0)
        return pieces

    @property
    def is_whole(self) -> bool:
        """Return whether the copied tensors may change."""
        return self._is_whole.is_set()

    @property
    def memory_text(self) -> str:
        """Text of the memory that the copies need and the memory that is free."""
        return f"{format_bytes(self._copied_bytes)} of the {format_bytes(self._free_bytes)}"

    @property
    def is_busy(self) -> bool:
        """Return whether this rank's thread is still running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Return whether this rank knows of a failure, which all ranks should learn of."""
        return self._error is not None or self._peer_failure is not None

    def start(self) -> None:
        """Write in a thread as soon as the copy is complete, and let training continue."""
        if self._copies is None or self._copies.is_complete:
            self._is_whole.set()
        name = f"dure-checkpoint-{self.position.samples_seen}"
        # an exiting interpreter must not wait for a rank that never leaves its status
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._let_go()

    def complete_copy(self) -> None:
        """Complete the copy; the copied tensors may change afterwards. Called by the thread that began the save."""
        if self._thread is None or self._is_whole.is_set():
            return
        is_held_already = self._hold()
        assert self._copies is not None
        if not self._copies.complete():
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
        if self._rank:
            self.writer.write_status({"files": self._files} if self._error is None else failure_status(self._error))
        elif self._error is None:
            self._finish()

    def write(self) -> None:
        """Write this rank's files; an error is kept for `settle`."""
        self._began_to_write = time.perf_counter()
        try:
            self._files = self.writer.write(self._check)
        except Exception as error:
            self._error = error
        finally:
            self._is_written.set()

    def _check(self) -> None:
        if self._is_cancelled.is_set():
            raise _Cancelled("nobody waits for this checkpoint any more")

    def _finish(self) -> None:
        """Make the checkpoint visible, on rank 0, when the files of every rank are there."""
        try:
            parts = self._await_parts()
            name = self.writer.commit(parts, self._metrics, self._is_best)
            self._saved = SavedCheckpoint(
                path=self._store.root / name,
                position=self.position,
                is_best=self._is_best,
                num_bytes=sum(entry["num_bytes"] for part in parts for entry in part.values()),
                stall_seconds=self._stall_seconds(),
                write_seconds=time.perf_counter() - self._began_to_write,
                beside_bytes=0 if self._copies is None else self._copies.beside_bytes,
            )
            self._store.take_in(self._saved.path, is_best=self._is_best)
            if self._on_saved is not None:
                self._on_saved(self._saved)
        except Exception as error:
            self._error = error

    def _await_parts(self) -> list[dict[str, Any]]:
        assert self._files is not None
        look = _SHORTEST_LOOK_SECONDS
        while self._parts is None:
            self._check()
            if (statuses := self.writer.read_statuses()) is not None:
                self._peer_failure = next((PeerLost(status["error"]) for status in statuses if "error" in status), None)
                if self._peer_failure is not None:
                    raise _Cancelled(str(self._peer_failure))
                return [self._files, *(status["files"] for status in statuses)]
            time.sleep(look)
            look = min(2 * look, _LONGEST_LOOK_SECONDS)
        return self._parts

    def settle(self, group: Group) -> SavedCheckpoint | None:
        """Wait until all ranks are done, and return the result; None if a rank was lost with its part.

        Called by all ranks at the same step, and again after a `GroupShrank`.

        Communication: one or two gathered JSON messages of about 200 bytes per file.

        Raises:
            DiskFull: A rank found no space; raised on every rank.
            StateChanged: A tensor changed while a rank copied it; raised on every rank.
            WeightsNotFinite: The weights of a rank are not finite; raised on every rank.
            CheckpointNotWritten: This rank could not write.
            PeerLost: Another rank could not write its part.
        """
        self._hold()
        self.complete_copy()
        self._is_written.wait()
        if self._thread is not None and self._rank:
            self._thread.join()  # its status must be written before rank 0 may remove the directory
        statuses = group.all_gather_json(self._status())
        if self._rank == 0 and self._saved is None and self._error is None:
            if len(statuses) == self._world_size and all("error" not in one for one in statuses):
                self._parts = [one["files"] for one in statuses]
            else:
                self._is_cancelled.set()
        self._end()
        if not any("error" in one or one["saved"] for one in statuses):
            statuses = group.all_gather_json(self._status())
        self.writer.abandon()
        self._let_go()
        if self._error is not None and not isinstance(self._error, _Cancelled):
            raise self._error
        self._raise_failure_of_others(statuses, "write")
        saved = next((one["saved"] for one in statuses if one["saved"]), None)
        return (
            None
            if saved is None
            else SavedCheckpoint(**{**saved, "path": self._store.root / saved["path"], "position": self.position})
        )

    def _status(self) -> dict[str, Any]:
        if self._error is not None and not isinstance(self._error, _Cancelled):
            return {"saved": None, **failure_status(self._error)}
        saved = None if self._saved is None else {**asdict(self._saved), "path": self._saved.path.name}
        return {"saved": saved, "files": self._files}

    def _end(self) -> None:
        if self._thread is not None:
            self._thread.join()
        elif self._rank == 0 and self._saved is None and self._error is None:
            self._finish()

    def leave(self, *, is_hurried: bool) -> None:
        """End without the other ranks; first complete what is being written, if that can be known to be possible.

        Args:
            is_hurried: Whether to abandon at once what is not complete.
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
        is_waiting = self._rank > 0 and not is_hurried and self._error is None
        while is_waiting and self.writer.is_still_written() and time.monotonic() < deadline:
            time.sleep(_LONGEST_LOOK_SECONDS)
        self.writer.abandon()

    def _hold(self) -> bool:
        """Start to count time for which training is blocked; return whether it was counted already."""
        seconds, since = self._held
        self._held = seconds, time.perf_counter() if since is None else since
        return since is not None

    def _let_go(self) -> None:
        self._held = self._stall_seconds(), None

    def _stall_seconds(self) -> float:
        seconds, since = self._held
        return seconds + (0.0 if since is None else time.perf_counter() - since)


def _described(share: RankShard, copies: StagingBuffer | None, *, is_spread: bool) -> dict[str, Any]:
    """Return what the other ranks need to know of a share, as plain JSON values."""
    tensors = sum(len(part) for part in share.parts.values())
    needed = share.most_bytes() + tensors * _MANIFEST_BYTES_PER_TENSOR
    described = {"pieces": share.pieces(), "num_bytes": needed, "aliases": share.aliases}
    if copies is not None:
        missing = copies.missing_bytes(share)
        described |= {"copied": missing, "free": psutil.virtual_memory().available if missing else None}
    return {**described, "state": share.state.decode()} if is_spread else described


def failure_status(error: Exception) -> dict[str, Any]:
    """Return a failure as it is reported to the other ranks."""
    kind = type(error).__name__
    return {"error": f"{error}" or kind, **({"kind": kind} if kind in _COMMON_ERRORS else {})}


_COMMON_ERRORS: dict[str | None, type[DureError]] = {
    kind.__name__: kind for kind in (DiskFull, StateChanged, WeightsNotFinite)
}
"""Errors that are raised as the same class on every rank, by class name."""
