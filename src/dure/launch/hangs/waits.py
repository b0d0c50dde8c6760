"""Waits between ranks, derived by comparing every rank's calls and stacks."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dure.failures.frames import Frame, own_file, own_folder, users_frame
from dure.launch.hangs.rank_state import Call, Collective, RankState
from dure.terminal import few

BUSY_FRACTION = 0.5
_SHARED_MEMORY_FILE = own_file("dure.comm.dure_shm.tensors")
_TORCH = f"{os.sep}torch{os.sep}"
_WAITING_FOLDERS = (f"{_TORCH}distributed{os.sep}", own_folder("dure.comm"))
_LOADER_FILE = f"{_TORCH}utils{os.sep}data{os.sep}"
_RPC_FOLDER = f"{_TORCH}distributed{os.sep}rpc{os.sep}"
_TRANSFERS = {
    "send": "recv", "isend": "recv", "send_object_list": "recv",
    "recv": "send", "irecv": "send", "recv_object_list": "send",
}  # fmt: skip
"""Operation that the peer must perform, by operation between two ranks."""
_LIKE = {"isend": "send", "irecv": "recv", "send_object_list": "send", "recv_object_list": "recv"}
_SIZES_MAY_DIFFER = ("scatter", "gather", "all_to_all", "alltoall", "alltoall_base", "reduce_scatter")
"""Operations for which ranks may pass unequal sizes."""
_NCCL_TRANSFER = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")
"""Names of transfers between two ranks in NCCL's record, with their ranks in the group."""
_WAITS_BY_NAME = ("wait", "item", "synchronize", "backward", "tolist", "cpu", "numpy", "result")
"""Names of functions that wait for a collective that was launched before."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Call in which one rank waits for others."""

    op: str
    group: str
    sequence: int | None = None
    """Number of the call in its group; None if torch does not count it."""
    recorded: Collective | None = None
    role: str | None = None
    peer: int | None = None
    """Rank that is `src` or `dst`; None if it is any, or unknown."""
    tag: int = 0
    sizes: tuple[tuple[int, ...], ...] = ()
    members: frozenset[int] | None = None
    is_of_default: bool = True
    """True if its group is torch's default group of all ranks."""
    is_main: bool = True
    """True if the rank does nothing else meanwhile."""
    line: Frame | None = None

    @property
    def is_transfer(self) -> bool:
        """Return whether it is between two ranks."""
        return self.op in _TRANSFERS

    @property
    def is_followed(self) -> bool:
        """Return whether the awaited ranks are known."""
        return self.recorded is not None or (self.is_transfer and self.role is not None)

    def describe(self, world: Iterable[int]) -> str:
        """Return the usual notation: `all_reduce #10 of [3] float`, `recv from rank 1`."""
        named = str(self.recorded) if self.recorded is not None else self.op
        if self.recorded is not None and "object" in self.op:
            named = f"{self.op} (its {self.recorded})"
        if self.is_transfer:
            way = "to" if _TRANSFERS[self.op] == "recv" else "from"
            other = f" {way} rank {self.peer}" if self.peer is not None else f" {way} any rank" if self.role else ""
            tag = f" with tag {self.tag}" if self.tag else ""
            sizes = " of " + ", ".join(str(list(size)) for size in self.sizes) if self.sizes else ""
            return f"{named}{sizes}{other}{tag}"
        root = f" with {self.role}={self.peer}" if self.peer is not None else ""
        return f"{named}{root}{self._where(world)}"

    def _where(self, world: Iterable[int]) -> str:
        if self.is_of_default or self.members is None:
            return ""
        members = "all ranks" if self.members >= set(world) else f"ranks {few(sorted(self.members), 8)}"
        return f" in group {self.group} ({members})"

    def is_same_as(self, other: "Wait") -> bool:
        """Return whether two ranks are in the same call, as far as known."""
        return (self.group, self.sequence, _LIKE.get(self.op, self.op)) == (
            other.group, other.sequence, _LIKE.get(other.op, other.op),
        )  # fmt: skip


def wait_of(state: RankState, line: Frame | None) -> Wait | None:
    """Return the call in which a rank waits for others, or None."""
    is_busy = state.busy_fraction >= BUSY_FRACTION
    call = state.call
    pending = [one for one in state.collectives or () if one.is_pending]
    if call is not None and call.is_main and (not is_busy or pending):
        # torch records a blocking call as the last one of its group
        mine = [one for one in pending if one.group == call.group]
        recorded = None if call.op in _TRANSFERS or not mine else mine[-1]
        return _wait(state, recorded, call, is_main=not is_busy, line=line)
    if pending:
        # a rank that waits for a GPU may be busy polling
        is_main = state.called in _WAITS_BY_NAME or (not is_busy and _may_wait_for_collective(state))
        called = users_frame(pending[0].frames) if is_main or line is None else None
        return _wait(state, pending[0], None, is_main=is_main, line=called or line)
    if call is not None and not is_busy and not call.is_main:
        return _wait(state, None, call, is_main=False, line=line)
    name = _by_frames(state)
    return None if name is None else Wait(op=name, group="", line=line)


def _wait(
    state: RankState, recorded: Collective | None, call: Call | None, *, is_main: bool, line: Frame | None
) -> Wait:
    transfer = None if recorded is None else _NCCL_TRANSFER.fullmatch(recorded.op)
    if recorded is not None and transfer is not None:
        return _recorded_transfer(state, recorded, transfer, is_main=is_main, line=line)
    group = recorded.group if recorded is not None else call.group if call is not None else ""
    members = state.groups.get(group)
    return Wait(
        op=call.op if call is not None else recorded.op if recorded is not None else "",
        group=group,
        sequence=None if recorded is None else recorded.sequence,
        recorded=recorded,
        role=None if call is None else call.role,
        peer=None if call is None else call.peer,
        tag=0 if call is None else call.tag,
        sizes=() if call is None else tuple(tuple(size) for size in call.sizes),
        members=None if members is None else frozenset(members),
        is_of_default=group in ("", next(iter(state.groups), group)),
        is_main=is_main,
        line=line,
    )


def _recorded_transfer(
    state: RankState, recorded: Collective, transfer: re.Match[str], *, is_main: bool, line: Frame | None
) -> Wait:
    ranks = state.groups.get(recorded.group)
    place = int(transfer[2])
    return Wait(
        op=transfer[1],
        group=recorded.group,
        role="dst" if transfer[1] == "send" else "src",
        peer=place if ranks is None or place >= len(ranks) else ranks[place],
        sizes=tuple(tuple(size) for size in recorded.sizes),
        is_main=is_main,
        line=line,
    )


def _may_wait_for_collective(state: RankState) -> bool:
    """Return whether the main thread may wait for a collective that it launched (`work.wait()`, a backward)."""
    inner = state.main[0] if state.main else None
    if inner is None or state.called is None:
        return True
    if _TORCH in inner.file:
        return _LOADER_FILE not in inner.file
    return state.called in _WAITS_BY_NAME


def _by_frames(state: RankState) -> str | None:
    """Return the call in which a rank waits, by the frames of its threads, if torch has no record of it."""
    for thread in (state.main, *state.others):
        for frame in thread:
            if frame.file == _SHARED_MEMORY_FILE and len(thread) > 1:
                return frame.function
    if state.busy_fraction >= BUSY_FRACTION:
        return None
    if state.main and any(folder in state.main[0].file for folder in _WAITING_FOLDERS):
        inside = [frame for frame in state.main if any(folder in frame.file for folder in _WAITING_FOLDERS)]
        outermost = [frame for frame in inside if frame.function not in ("wrapper", "<module>")]
        return outermost[-1].function if outermost else None
    return None


def served_line(state: RankState) -> Frame | None:
    """Return the line of a function that another rank has called by RPC and that runs here in a thread; else None."""
    for thread in state.others:
        if any(_RPC_FOLDER in frame.file for frame in thread) and (line := users_frame(thread)) is not None:
            return line
    return None


def awaited_by(rank: int, waits: Mapping[int, Wait], states: Mapping[int, RankState]) -> set[int]:
    """Return the ranks that have not reached the call in which a rank waits.

    Args:
        rank: The waiting rank.
        waits: Waits by rank, of all ranks that wait.
        states: States of all ranks.
    """
    wait = waits[rank]
    others = set(states) - {rank}
    if wait.is_transfer:
        if wait.role is None:  # nothing is known except that it waits for one
            return others - set(waits)
        asked = others if wait.peer is None else {wait.peer} & others
        return asked if not any(_answers(wait, rank, waits.get(one)) for one in asked) else set()
    if wait.recorded is None and any(_RPC_FOLDER in frame.file for frame in states[rank].main):
        # torch does not show whom it has called: those that run such a call now
        serving = {other for other in others if served_line(states[other]) is not None}
        if serving:
            return serving
    if wait.members is not None:
        others &= wait.members
    return {other for other in others if not _has_come(wait, waits.get(other), states[other])}


def _answers(wait: Wait, rank: int, other: Wait | None) -> bool:
    """Return whether another rank does its part of an operation between two."""
    return (
        other is not None
        and _LIKE.get(other.op, other.op) == _TRANSFERS[wait.op]
        and other.tag == wait.tag
        and (other.peer == rank or (other.peer is None and _LIKE.get(other.op, other.op) == "recv"))
    )


def _has_come(wait: Wait, others_wait: Wait | None, state: RankState) -> bool:
    """Return whether a rank has made the call too, and with the same arguments as far as known."""
    if wait.recorded is None:
        return others_wait is not None and wait.is_same_as(others_wait) and not differ_in_peer(wait, others_wait)
    calls = [
        call
        for call in state.collectives or ()
        if call.group == wait.group and not _NCCL_TRANSFER.fullmatch(call.op)  # transfers are counted separately
    ]
    same = next((call for call in calls if call.sequence == wait.sequence), None)
    if same is None:
        return any(call.sequence > wait.recorded.sequence for call in calls)
    is_there_now = others_wait is not None and others_wait.recorded is same
    return agree(wait.recorded, same) and not (
        is_there_now and others_wait is not None and differ_in_peer(wait, others_wait)
    )


def agree(one: Collective, other: Collective) -> bool:
    """Return whether two ranks made the same call."""
    if one.op != other.op:
        return False
    return one.op.lstrip("_") in _SIZES_MAY_DIFFER or one.signature == other.signature


def differ_in_peer(one: Wait, other: Wait) -> bool:
    """Return whether two ranks differ in `src` or `dst`."""
    return None not in (one.peer, other.peer) and (one.role, one.peer) != (other.role, other.peer)


def reached(begin: int, edges: Mapping[int, set[int]]) -> set[int]:
    """Return the ranks for which one waits, directly or through others."""
    found: set[int] = set()
    new = set(edges.get(begin, ()))
    while new:
        found |= new
        new = {further for one in new for further in edges.get(one, ())} - found
    return found


def circles(ranks: Sequence[int], edges: Mapping[int, set[int]]) -> list[list[int]]:
    """Return the sets of ranks that wait for each other, directly or through others, the smallest first."""
    reach = {rank: reached(rank, edges) for rank in ranks}
    found: list[list[int]] = []
    for rank in ranks:
        circle = [other for other in ranks if rank in reach[other] and other in reach[rank]]
        if circle and circle not in found:
            found.append(circle)
    return sorted(found, key=len)
