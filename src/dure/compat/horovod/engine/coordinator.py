"""Matching of requests by name on rank 0: a collective starts when all ranks of its process set have asked for it."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from dure.compat.horovod.engine.requests import GLOBAL_SET, Request, Response
from dure.compat.horovod.engine.validation import fault_of

_FUSED = ("allreduce", "allgather", "broadcast")
"""Collectives of which several are executed as one."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Settings of the coordinator, from Horovod's variables."""

    fusion_bytes: int = 64 * 2**20
    """Maximum bytes of a fused collective; 0 to fuse none (`HOROVOD_FUSION_THRESHOLD`)."""
    stall_seconds: float = 60.0
    """Wait of a tensor after which a warning names the missing ranks; 0 for none."""
    shutdown_seconds: float = 0.0
    """Wait of a tensor after which all ranks end; 0 for never."""


@dataclass(slots=True)
class _Waiting:
    """Requests for one collective, so far."""

    requests: dict[int, Request] = field(default_factory=dict)
    since: float = 0.0
    is_reported: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """Step of a negotiation, for the timeline."""

    name: str
    kind: str
    rank: int
    """Rank whose request has arrived."""
    is_last: bool
    """True if no further request is needed."""


class Coordinator:
    """Table of the requests that have arrived, and of the process sets."""

    def __init__(self, hosts: Sequence[str], limits: Limits, on_event: Callable[[Event], None] | None = None) -> None:
        """Begin with the set of all ranks.

        Args:
            hosts: Host of each rank.
            limits: Settings.
            on_event: Receives the steps of negotiations.
        """
        self._hosts = list(hosts)
        self._limits = limits
        self.on_event = on_event
        self._sets: dict[int, tuple[int, ...]] = {GLOBAL_SET: tuple(range(len(hosts)))}
        self._next_set = 1
        self._table: dict[tuple[int, str], _Waiting] = {}
        self._joined: set[int] = set()
        self._last_joined = -1
        self._ready: list[tuple[Response, Request]] = []
        self._waits: dict[int, tuple[int, str]] = {}
        """Collective for which the main thread of a rank has waited for long."""

    @property
    def is_waiting(self) -> bool:
        """Return whether a request waits for other ranks."""
        return bool(self._table)

    def add(self, rank: int, request: Request) -> None:
        """Note a rank's request."""
        if request.kind == "join":
            self._joined.add(rank)
            self._last_joined = rank
            self._complete_after_join()
            return
        members = self._sets.get(request.process_set)
        if members is None:
            error = f"process set {request.process_set} does not exist, or was removed"
            self._fail(request, error)
            return
        key = request.process_set, request.name
        waiting = self._table.get(key)
        if waiting is None:
            waiting = self._table[key] = _Waiting(since=time.monotonic())
        waiting.requests[rank] = request
        is_last = self._is_complete(request.process_set, waiting)
        if self.on_event is not None:
            self.on_event(Event(request.name, request.kind, rank, is_last))
        if is_last:
            self._remove(key)
            self._ready.append(self._response(members, waiting.requests))

    def _is_complete(self, process_set: int, waiting: _Waiting) -> bool:
        members = self._sets[process_set]
        if len(waiting.requests) == len(members):
            return True
        return process_set == GLOBAL_SET and all(rank in waiting.requests or rank in self._joined for rank in members)

    def _complete_after_join(self) -> None:
        for key, waiting in [*self._table.items()]:
            if key[0] == GLOBAL_SET and self._is_complete(key[0], waiting):
                self._remove(key)
                self._ready.append(self._response(self._sets[GLOBAL_SET], waiting.requests))
        if len(self._joined) == len(self._hosts):
            self._joined.clear()
            join = Request(name="join", kind="join")
            self._ready.append((Response(kind="join", names=("join",), value=self._last_joined), join))

    def note_wait(self, rank: int, key: tuple[int, str]) -> None:
        """Note that a rank's main thread has waited for long for a collective."""
        if key in self._table:
            self._waits[rank] = key

    def fail_if_none_can_go_on(self) -> None:
        """Fail the collectives for which ranks wait if each rank waits for one that others have not asked for.

        This happens if ranks call different operations, or by different names: Horovod would wait for ever.
        """
        waiting = {rank: key for rank, key in self._waits.items() if rank in self._table[key].requests}
        keys = sorted(set(waiting.values()))
        if len(keys) < 2 or any(rank not in waiting and rank not in self._joined for rank in range(len(self._hosts))):
            return
        shown = ", ".join(f"rank {rank} waits for {waiting[rank][1]}" for rank in sorted(waiting))
        for key in keys:
            request = next(iter(self._table[key].requests.values()))
            self._remove(key)
            self._fail(request, f"Mismatched operations: {shown}, so that none can go on.")

    def _remove(self, key: tuple[int, str]) -> None:
        del self._table[key]
        if self._waits:
            self._waits = {rank: other for rank, other in self._waits.items() if other != key}

    def _fail(self, request: Request, error: str) -> None:
        response = Response(kind=request.kind, names=(request.name,), process_set=request.process_set, error=error)
        self._ready.append((response, request))

    def _response(self, members: tuple[int, ...], requests: dict[int, Request]) -> tuple[Response, Request]:
        first = requests[min(requests)]
        has_joined = len(requests) < len(members)
        error = fault_of(requests, has_joined=has_joined, fusion_bytes=self._limits.fusion_bytes or 2**62)
        response = Response(kind=first.kind, names=(first.name,), process_set=first.process_set, error=error)
        if error is not None:
            return response, first
        if first.kind == "allgather":
            sizes = tuple(tuple(shape[0] for shape in requests[rank].shapes) for rank in members)
            response = replace(response, sizes=sizes)
        elif first.kind == "alltoall":
            response = replace(response, sizes=tuple(requests[rank].splits for rank in members))
        elif first.kind in ("add_process_set", "remove_process_set"):
            response = self._change_sets(response, first)
        if has_joined and first.kind == "allreduce":
            response = replace(response, models=(first,))
        if not first.is_on_cpu:
            own = {(self._hosts[rank], request.device) for rank, request in requests.items()}
            response = replace(response, has_own_devices=len(own) == len(members))
        return response, first

    def _change_sets(self, response: Response, request: Request) -> Response:
        if request.kind == "remove_process_set":
            number = request.root
            if self._sets.pop(number, None) is None:
                return replace(response, value=-1)
            for key in [key for key in self._table if key[0] == number]:
                self._remove(key)
            return replace(response, value=number)
        if request.ranks in self._sets.values():
            return replace(response, value=-1)
        number, self._next_set = self._next_set, self._next_set + 1
        self._sets[number] = request.ranks
        return replace(response, value=number, members=request.ranks)

    def take(self) -> list[Response]:
        """Return the collectives that can start, in the order of all ranks; small ones of one kind are fused."""
        if len(self._ready) == 1:
            response, _ = self._ready.pop()
            return [response]
        ready, self._ready = self._ready, []
        return list(self._fused(ready)) if self._limits.fusion_bytes else [response for response, _ in ready]

    def _fused(self, ready: list[tuple[Response, Request]]) -> Iterator[Response]:
        """Return responses, with those fused that agree in everything that they need to.

        Process sets are added and removed, and ranks join, before or after all others: nothing moves across those.
        """
        groups: list[list[Response]] = []
        open_groups: dict[object, tuple[list[Response], int]] = {}
        for response, request in ready:
            if response.error is not None or response.kind not in _FUSED:
                groups.append([response])
                if response.kind in ("join", "add_process_set", "remove_process_set"):
                    open_groups.clear()
                continue
            dtypes = set(request.dtypes) if response.kind == "allreduce" else ()
            key = (
                response.kind,
                response.process_set,
                request.op,
                request.prescale,
                request.postscale,
                request.root,
                request.is_on_cpu,
                response.has_own_devices,
                bool(response.models),
                *sorted(dtypes),
            )
            size = request.num_bytes
            group, used = open_groups.get(key, ([], 0))
            if not group or used + size > self._limits.fusion_bytes:
                group, used = [], 0
                groups.append(group)
            group.append(response)
            open_groups[key] = group, used + size
        for group in groups:
            yield group[0] if len(group) == 1 else _merged(group)

    def stalled(self, now: float) -> tuple[list[str], str | None]:
        """Return warnings on tensors that wait for long, and the reason to end all ranks, or None."""
        lines, reason = [], None
        for (process_set, name), waiting in self._table.items():
            seconds = now - waiting.since
            missing = [
                rank
                for rank in self._sets[process_set]
                if rank not in waiting.requests and not (process_set == GLOBAL_SET and rank in self._joined)
            ]
            where = f"{name} (missing ranks: {', '.join(map(str, missing))})"
            if 0 < self._limits.stall_seconds <= seconds and not waiting.is_reported:
                waiting.is_reported = True
                lines.append(where)
            if 0 < self._limits.shutdown_seconds <= seconds:
                reason = f"{where} stalled for {seconds:.0f} s, more than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
        return lines, reason


def _merged(group: list[Response]) -> Response:
    first = group[0]
    return replace(
        first,
        names=tuple(name for response in group for name in response.names),
        sizes=tuple(
            tuple(size for response in group for size in response.sizes[index]) for index in range(len(first.sizes))
        ),
        models=tuple(model for response in group for model in response.models),
    )
