"""Diagnosis of a hang from the states of all ranks: who waits in which call and line, and where the others are."""

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from dure.checked import record_from_json
from dure.errors import DureError
from dure.failures.frames import OWN_ROOT, Frame, source_line, users_frame
from dure.launch.hangs.rank_state import RankState
from dure.launch.hangs.waits import (
    BUSY_FRACTION,
    Wait,
    agree,
    awaited_by,
    circles,
    differ_in_peer,
    reached,
    served_line,
    wait_of,
)
from dure.process.stop_signals import signal_name
from dure.records.run_dir import RunDir
from dure.terminal import few, one_line, print_status

_LOADER_FILE = f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}"
_DEBUGGER_FILES = tuple(os.path.join(os.path.dirname(os.__file__), name) for name in ("bdb.py", "code.py"))
_MOST_TEXT = 100
_USUAL_PHASES = ("starting", "training")
_MOST_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Where:
    """Position of one rank in the code, as text and for comparison."""

    state: RankState
    waits_in: Wait | None
    """Call in which it waits for other ranks; None if it does not wait."""
    what: str
    """Description such as `waits in all_reduce #10 of [3] float` or `computes`."""
    line: Frame | None
    """Line of the user's code, or the innermost line if there is none."""
    call: str = ""
    """Name of the call in which it waits."""

    @property
    def is_waiting(self) -> bool:
        """Return whether it waits for other ranks."""
        return self.waits_in is not None

    @property
    def will_not_go_on(self) -> bool:
        """Return whether it never continues by itself; one that computes, loads data or sleeps may only be slow."""
        return self.state.exit_code is not None or self.state.is_stopped


@dataclass(frozen=True, kw_only=True)
class HangVerdict:
    """Verdict on why no step finishes."""

    text: str
    """Verdict as text: the first line names the culprits and the waiting ranks, the rest the position of each rank."""
    culprits: tuple[int, ...]
    """Ranks for which the others wait; empty if none can be named."""
    is_certain: bool
    """True if the hang will not end by itself; a rank that computes, loads data or sleeps may only be slow."""
    states: tuple[RankState, ...]
    is_waited: bool = True
    """True if any rank waits for another."""

    def has_moved(self, later: Sequence[RankState]) -> bool:
        """Return whether a culprit has moved, has made other calls, or is missing in a later probe."""
        now = {state.rank: state.whereabouts for state in later}
        before = [state for state in self.states if state.rank in self.culprits]
        return any(now.get(state.rank) != state.whereabouts for state in before)

    def announcing(self, what_follows: str | None) -> "HangVerdict":
        """Return the verdict with a last line that announces the action."""
        return self if what_follows is None else replace(self, text=f"{self.text}\n  {what_follows}")

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "culprits": list(self.culprits),
            "is_certain": self.is_certain,
            "ranks": [state.to_json() for state in self.states],
        }


def verdict_from_json(data: Mapping[str, Any]) -> HangVerdict:
    """Rebuild a verdict from the result of `to_json`."""
    return HangVerdict(
        text=data["text"],
        culprits=tuple(data["culprits"]),
        is_certain=data["is_certain"],
        states=tuple(record_from_json(RankState, state) for state in data["ranks"]),
    )


def print_and_save_hang(run: RunDir | None, verdict: HangVerdict) -> None:
    """Print the verdict, and save it if this launcher writes the run's folder."""
    print_status(verdict.text)  # first: the disk may be what hangs
    with suppress(DureError):
        if run is not None:
            run.note_hang(verdict.to_json())


def explain(states: Sequence[RankState], silent_seconds: float) -> HangVerdict:
    """Return the verdict on the states of all ranks.

    Args:
        states: States of all ranks, including those that have ended.
        silent_seconds: Seconds for which no step has finished.
    """
    ranks = [state.rank for state in states]
    places = [_where(state, ranks) for state in states]
    blame = _blame(places)
    has_steps = any(state.step > 0 for state in states) or all(state.calls <= 0 for state in states)
    kind = "step" if has_steps else "call of a process group"
    lines = [f"no {kind} has finished for {silent_seconds:.1f} s: {blame.reason}"]
    # where all handle the same, as in a program that runs in an `except`, it explains no difference
    own = {state.rank: state.handled for state in states} if len({state.handled for state in states}) > 1 else {}
    is_one_mute = any(_is_mute(state) for state in states)
    for group in _alike(places):
        first = group[0]
        progress = _progress([place.state for place in group], with_sequence=is_one_mute)
        lines.append(f"  {_ranks(group)} {_activity(group)}{_at(first.line)}{progress}")
        text = _source(first.line)
        if text:
            lines.append(f"    {text}")
        lines += [
            f"    rank {place.state.rank} is handling {error}"
            for place in group
            if (error := own.get(place.state.rank))
        ]
    return HangVerdict(
        text="\n".join(lines),
        culprits=tuple(blame.culprits),
        is_certain=blame.is_certain,
        states=tuple(states),
        is_waited=any(place.is_waiting for place in places),
    )


def _where(state: RankState, world: Sequence[int]) -> Where:
    line = _users_line(state)
    if state.exit_code is not None:
        how = f"exit code {state.exit_code}" if state.exit_code >= 0 else signal_name(-state.exit_code)
        return Where(state=state, waits_in=None, what=f"has left with {how}", line=None)
    if state.is_stopped:
        what = f"was stopped from outside (SIGSTOP, Ctrl-Z or a debugger); `kill -CONT {state.pid}` lets it go on"
        return Where(state=state, waits_in=None, what=what, line=line)
    wait = wait_of(state, users_frame(state.main))
    if wait is None and state.busy_fraction < BUSY_FRACTION and (served := served_line(state)) is not None:
        return Where(state=state, waits_in=None, what="runs a function that another rank called", line=served)
    if wait is None:
        return Where(state=state, waits_in=None, what=_doing(state), line=line)
    call = wait.describe(world)
    # the rank's own activity keeps the others, if they wait for it
    what = f"waits in {call}" if wait.is_main else f"{_doing(state)} while {call} has not finished"
    return Where(state=state, waits_in=wait, what=what, line=wait.line, call=call)


def line_of(state: RankState) -> str | None:
    """Return the line of the user's code at which a rank is; None if it is unknown."""
    line = _users_line(state)
    return None if line is None else one_line(line)


def _doing(state: RankState) -> str:
    busy = state.busy_fraction >= BUSY_FRACTION
    inner = state.main[0] if state.main else None
    if state.phase == "leaving":
        how = "is at its end" if state.failure is None else f"has failed ({state.failure})"
        return f"{how}, {'waiting for threads to end' if _waits_for_threads(state) else 'leaving'}"
    if state.blocked_fraction >= BUSY_FRACTION:
        return "waits in the kernel, mostly for a disk or a network file system"
    if state.has_closed_socket:
        return f"{'computes' if busy else 'waits'}, and has closed the socket on which it could be asked where"
    if state.collectives is None and busy:
        return "is in native code that lets no other thread run (it holds Python's lock)"
    if any(_LOADER_FILE in frame.file for frame in state.main):
        return "waits for data from its loader"
    if inner is not None and inner.function == "_recv_bytes":
        return "waits for another process of its own"
    if not busy and any(frame.file in _DEBUGGER_FILES for frame in state.main):
        return "waits in a debugger"
    if busy:
        return "computes"
    if state.collectives is None:
        return "waits in native code with Python's lock held"
    return "is idle"


def _waits_for_threads(state: RankState) -> bool:
    """Return whether a rank at its end waits for threads that are no daemons, as the interpreter does."""
    return state.phase == "leaving" and any(
        frame.function == "_shutdown" and frame.file == threading.__file__ for frame in state.main
    )


@dataclass(frozen=True, kw_only=True)
class _Blame:
    culprits: Sequence[int]
    reason: str
    is_certain: bool = False


def _blame(places: Sequence[Where]) -> _Blame:
    """Find the ranks for which the others wait, and describe them in one sentence."""
    by_rank = {place.state.rank: place for place in places}
    states = {rank: place.state for rank, place in by_rank.items()}
    waits = {rank: place.waits_in for rank, place in by_rank.items() if place.waits_in is not None}
    edges = {rank: awaited_by(rank, waits, states) for rank in waits}
    stopped = [place for place in places if place.state.is_stopped]
    if stopped:
        return _blamed(stopped, places, edges)
    in_vain = {rank for rank, wait in waits.items() if wait.is_main} or set(waits)
    # a rank that waits for one with other work may only have to wait for long; the rest wait for each other
    stuck = [by_rank[rank] for rank in sorted(in_vain) if reached(rank, edges) <= in_vain]
    found = circles(_ranks_of(stuck), edges)
    if found:
        return _disagreement([by_rank[rank] for rank in found[0]])
    awaited = {one for rank in in_vain for one in reached(rank, edges)} - in_vain
    left = [place for place in places if place.state.rank in awaited and place.state.exit_code is not None]
    busy = [place for place in places if place.state.rank in awaited and place not in left]
    if left or busy:
        # a rank that waits for another in the background is not the end of the chain if there is another end
        ends = [place for place in busy if not place.is_waiting]
        return _blamed(left or ends or busy, places, edges)
    if stuck:
        return _same_call(stuck, len(places))
    here = [place for place in places if place.state.exit_code is None]
    alike = next(iter(_alike(here)), [])
    if len(here) > len(alike) > 0:
        return _Blame(culprits=[], reason="no rank waits for another, and none gets on")
    described = f"{_ranks(alike)} {_activity(alike)}{_at(alike[0].line)}" if alike else "there is no rank"
    return _Blame(culprits=[], reason=described)


def _blamed(culprits: Sequence[Where], places: Sequence[Where], edges: Mapping[int, set[int]]) -> _Blame:
    """Describe the ranks for which the others wait."""
    ranks = _ranks_of(culprits)
    others = [place for place in places if place not in culprits]
    waiting = [place for place in others if edges.get(place.state.rank, set()) & set(ranks)]
    described = "; ".join(f"{_ranks(group)} {_activity(group)}{_at(group[0].line)}" for group in _shown(culprits))
    return _Blame(
        culprits=ranks,
        reason=f"{described}{_waited_for(waiting)}",
        is_certain=all(place.will_not_go_on for place in culprits),
    )


def _disagreement(circle: Sequence[Where]) -> _Blame:
    """Describe the disagreement of ranks that wait for each other."""
    described = "; ".join(f"{_ranks(group)} {_activity(group)}{_at(group[0].line)}" for group in _shown(circle))
    waits = [place.waits_in for place in circle if place.waits_in is not None]
    return _Blame(
        culprits=_minority(circle),
        reason=f"{_why(waits)}: {described}",
        # another thread of a rank may still make the awaited call
        is_certain=all(wait.is_followed and wait.is_main for wait in waits)
        and not any(_has_other_threads(place) for place in circle),
    )


def _why(waits: Sequence[Wait]) -> str:
    pairs = [(one, other) for one in waits for other in waits if one is not other]
    role = next((one.role for one, other in pairs if one.is_same_as(other) and differ_in_peer(one, other)), None)
    if all(wait.is_transfer for wait in waits):
        kinds = {wait.op.removeprefix("i").removesuffix("_object_list") for wait in waits}
        if len(kinds) == 1:
            return f"ranks wait for each other in {kinds.pop()}, and none does the other part"
        return "sends and receives do not fit each other"
    if role is not None:
        return f"ranks do not agree on {role}"
    same_number = (
        (one.recorded, other.recorded)
        for one, other in pairs
        if (one.group, one.sequence) == (other.group, other.sequence)
    )
    if any(one is not None and other is not None and not agree(one, other) for one, other in same_number):
        return "ranks do not agree on what comes next"
    return "ranks wait for each other in different calls"


def _same_call(stuck: Sequence[Where], num_ranks: int) -> _Blame:
    """Describe ranks that wait in calls which, as far as known, all have made."""
    waits = [place.waits_in for place in stuck if place.waits_in is not None]
    described = "; ".join(f"{_ranks(group)} {_activity(group)}{_at(group[0].line)}" for group in _shown(stuck))
    if any(not wait.is_followed for wait in waits):
        return _Blame(culprits=[], reason=described)
    if all(wait.is_same_as(waits[0]) for wait in waits):
        if len(waits) == len(waits[0].members or range(num_ranks)):
            who = "all ranks wait" if len(waits) == num_ranks else f"{_ranks(stuck)} wait"
            reason = f"{who} in the same call{_at(stuck[0].line)}: a link between them is cut or very slow"
            return _Blame(culprits=[], reason=reason)
        return _Blame(culprits=[], reason=f"{described}, which the others have called too, and have finished")
    sizes = {wait.sizes for wait in waits}
    if all(wait.is_transfer for wait in waits):
        why = "the sizes of send and recv differ" if len(sizes) > 1 else "a link between them is cut or very slow"
        return _Blame(culprits=_ranks_of(stuck) if len(sizes) > 1 else [], reason=f"{described}: {why}")
    return _Blame(culprits=_minority(stuck), reason=f"ranks wait in different calls: {described}")


def _has_other_threads(place: Where) -> bool:
    return any(users_frame(frames) is not None for frames in place.state.others)


def _shown(places: Sequence[Where]) -> list[list[Where]]:
    """Return ranks grouped by position, the smallest groups first; only some of many."""
    groups = sorted(_alike(places), key=len)
    return groups if len(groups) <= _MOST_SHOWN else [*groups[: _MOST_SHOWN - 1], groups[-1]]


def _minority(places: Sequence[Where]) -> list[int]:
    """Return the ranks that are not where most are; all of them if there is no majority."""
    where = Counter((place.line, place.what) for place in places)
    (most, count), *rest = where.most_common()
    if not rest or rest[0][1] == count:
        return _ranks_of(places)
    return _ranks_of([place for place in places if (place.line, place.what) != most])


def _waited_for(waiting: Sequence[Where]) -> str:
    waits = [
        f"{_ranks(group)} {'wait' if len(group) > 1 else 'waits'} for it in {group[0].call}{_at(group[0].line)}"
        for group in _shown(waiting)
    ]
    return f", and {'; '.join(waits)}" if waits else ""


def _alike(places: Sequence[Where]) -> list[list[Where]]:
    """Group ranks in equal states: in a run of hundreds most are."""
    groups: dict[tuple[str, Frame | None, int], list[Where]] = {}
    for place in places:
        groups.setdefault((place.what, place.line, place.state.step), []).append(place)
    return list(groups.values())


def _is_mute(state: RankState) -> bool:
    """Return whether a rank runs but could not reply; its last heartbeat is then the only information."""
    return state.collectives is None and state.exit_code is None


def _progress(states: Sequence[RankState], *, with_sequence: bool) -> str:
    """Return the progress of ranks at one position at their last heartbeats, the only information about mute ranks."""
    state = states[0]
    if state.exit_code is not None:
        return ""
    step = f", in step {state.step}" if state.step > 0 else ", with no step done" if _is_mute(state) else ""
    phase = f" ({state.phase})" if state.step > 0 and state.phase not in _USUAL_PHASES else ""
    numbers = {state.sequence for state in states}
    has_number = with_sequence and len(numbers) == 1 and state.sequence >= 0
    number = f", after collective #{state.sequence}" if has_number else ""
    return f"{step}{phase}{number}"


def _ranks(places: Sequence[Where]) -> str:
    numbers = _ranks_of(places)
    return f"rank{'s' if len(numbers) > 1 else ''} {few(numbers, 8)}"


def _activity(places: Sequence[Where]) -> str:
    """Return the activity of ranks as text, in the singular or the plural."""
    verb, space, rest = places[0].what.partition(" ")
    if len(places) > 1:
        verb = {"is": "are", "was": "were", "has": "have"}.get(verb, verb.removesuffix("s"))
        rest = rest.replace("at its end", "at their end", 1)
    return f"{verb}{space}{rest}"


def _ranks_of(places: Sequence[Where]) -> list[int]:
    return [place.state.rank for place in places]


def _users_line(state: RankState) -> Frame | None:
    """Return the rank's current line of the user's code; if there is none, the innermost that is not dure's own."""
    if _waits_for_threads(state):
        lines = [line for thread in state.others if (line := users_frame(thread)) is not None]
        if lines:
            return lines[0]
    foreign = [frame for frame in state.main if not frame.file.startswith((OWN_ROOT, "<frozen"))]
    return users_frame(state.main) or next(iter(foreign), None)


def _at(line: Frame | None) -> str:
    return "" if line is None else f" at {one_line(line)}"


def _source(line: Frame | None) -> str:
    text = "" if line is None else source_line(line.file, line.line).strip()
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"
