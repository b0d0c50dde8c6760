"""From what every rank was at to one answer: who waits in which call at which line, who is elsewhere, and where."""

import linecache
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dure.errors import DureError
from dure.frames import OWN_ROOT, Frame, users_frame
from dure.launch.examination import Collective, RankState, state_from_json
from dure.rundir import RunDir
from dure.telling import tell

_BUSY_FRACTION = 0.5
_SHARED_MEMORY_FILE = f"{OWN_ROOT}comm{os.sep}shm_tensors.py"
_WAITING_FOLDERS = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{OWN_ROOT}comm{os.sep}")
_LOADER_FILE = f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}"
_DEBUGGER_FILES = tuple(os.path.join(os.path.dirname(os.__file__), name) for name in ("bdb.py", "code.py"))
_MOST_TEXT = 100
_USUAL_PHASES = ("starting", "training")
_COMPUTES, _LOADS = "computes", "waits for data from its loader"


@dataclass(frozen=True, kw_only=True)
class Where:
    """What one rank is at, in words and for comparison."""

    state: RankState
    waits_in: Collective | None
    """The oldest call that has not returned everywhere."""
    is_waiting: bool
    """Whether it waits for other ranks, in a call of a process group that is recorded or not."""
    what: str
    """`waits in all_reduce #10 of [3] float`, `runs`, ..."""
    line: Frame | None
    """The user's line, or the innermost where none is the user's."""
    may_be_slow: bool = False
    """Whether it may only need longer than usual."""


@dataclass(frozen=True, kw_only=True)
class HangVerdict:
    """Why no step finishes."""

    text: str
    """For people: the first line names who is to blame and who waits, the rest where each rank is."""
    culprits: tuple[int, ...]
    """Ranks that the others wait for; empty where none can be named."""
    is_certain: bool
    """Whether it will not end by itself; a rank that computes or loads data may only be slow."""
    states: tuple[RankState, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "culprits": list(self.culprits),
            "is_certain": self.is_certain,
            "ranks": [state.to_json() for state in self.states],
        }


def verdict_from_json(data: Mapping[str, Any]) -> HangVerdict:
    """Rebuild a verdict from `to_json`'s answer."""
    return HangVerdict(
        text=data["text"],
        culprits=tuple(data["culprits"]),
        is_certain=data["is_certain"],
        states=tuple(state_from_json(state) for state in data["ranks"]),
    )


def tell_of_hang(run: RunDir | None, verdict: HangVerdict) -> None:
    """Keep all that was found out, where a run's folder is this launcher's to write, and say it in the terminal."""
    with suppress(DureError):
        if run is not None:
            run.note_hang(verdict.to_json())
    tell(verdict.text)


def explain(states: Sequence[RankState], silent_seconds: float) -> HangVerdict:
    """Say who is where.

    Args:
        states: Of all ranks, those that have ended too.
        silent_seconds: How long no step has finished.
    """
    places = [_where(state) for state in states]
    culprits, reason = _blame(places)
    lines = [f"no step has finished for {silent_seconds:.1f} s: {reason}"]
    is_one_mute = any(_is_mute(state) for state in states)
    for group in _alike(places):
        first = group[0]
        progress = _progress([place.state for place in group], with_sequence=is_one_mute)
        lines.append(f"  {_ranks(group)} {_said(group)}{_at(first.line)}{progress}")
        text = _source(first.line)
        if text:
            lines.append(f"    {text}")
    blamed = [place for place in places if place.state.rank in culprits] or places
    return HangVerdict(
        text="\n".join(lines),
        culprits=tuple(culprits),
        is_certain=not any(place.may_be_slow for place in blamed),
        states=tuple(states),
    )


def _where(state: RankState) -> Where:
    line = _users_line(state)
    if state.exit_code is not None:
        how = f"exit code {state.exit_code}" if state.exit_code >= 0 else f"{signal.Signals(-state.exit_code).name}"
        return Where(state=state, waits_in=None, is_waiting=False, what=f"has left with {how}", line=None)
    if state.is_stopped:
        return Where(
            state=state,
            waits_in=None,
            is_waiting=False,
            what=f"was stopped from outside (SIGSTOP, Ctrl-Z or a debugger); `kill -CONT {state.pid}` lets it go on",
            line=line,
        )
    pending = next((call for call in state.collectives or () if call.is_pending), None)
    if pending is not None:
        called = users_frame(pending.frames) or line
        return Where(state=state, waits_in=pending, is_waiting=True, what=f"waits in {pending}", line=called)
    unrecorded = _unrecorded_wait(state)
    if unrecorded is not None:
        return Where(state=state, waits_in=None, is_waiting=True, what=f"waits in {unrecorded}", line=line)
    what = _doing(state)
    return Where(
        state=state, waits_in=None, is_waiting=False, what=what, line=line, may_be_slow=what in (_COMPUTES, _LOADS)
    )


def _doing(state: RankState) -> str:
    busy = state.busy_fraction >= _BUSY_FRACTION
    inner = state.main[0] if state.main else None
    if state.phase == "leaving":
        return "has come to its end and is leaving"
    if state.collectives is None and busy:
        return "is in native code that lets no other thread run (it holds Python's lock)"
    if any(_LOADER_FILE in frame.file for frame in state.main):
        return _LOADS
    if inner is not None and inner.function == "_recv_bytes":
        return "waits for another process of its own"
    if not busy and any(frame.file in _DEBUGGER_FILES for frame in state.main):
        return "waits in a debugger"
    if busy:
        return _COMPUTES
    if state.collectives is None:
        return "waits in native code and holds Python's lock meanwhile"
    return "is idle"


def _unrecorded_wait(state: RankState) -> str | None:
    """Name the call that a rank waits in where the flight recorder does not know it: by the frames of its threads."""
    for thread in (state.main, *state.others):
        for frame in thread:
            if frame.file == _SHARED_MEMORY_FILE and len(thread) > 1:
                return frame.function
    if state.busy_fraction >= _BUSY_FRACTION:
        return None
    if state.main and any(folder in state.main[0].file for folder in _WAITING_FOLDERS):
        inside = [frame for frame in state.main if any(folder in frame.file for folder in _WAITING_FOLDERS)]
        outermost = [frame for frame in inside if frame.function not in ("wrapper", "<module>")]
        return outermost[-1].function if outermost else None
    return None


def _blame(places: Sequence[Where]) -> tuple[list[int], str]:
    """Find who the others wait for, and say it in one sentence."""
    waiting = [place for place in places if place.is_waiting]
    elsewhere = [place for place in places if not place.is_waiting]
    stopped = [place for place in places if place.state.is_stopped]
    if stopped:
        return _ranks_of(stopped), f"{_ranks(stopped)} {_said(stopped)}{_waited_for(waiting)}"
    left = [place for place in elsewhere if place.state.exit_code is not None]
    if waiting and left and len(left) == len(elsewhere):
        return _ranks_of(left), f"{_ranks(left)} {_said(left)}{_waited_for(waiting)}"
    if waiting and elsewhere:
        there = [place for place in elsewhere if place not in left] or elsewhere
        return _ranks_of(there), f"{_ranks(there)} {_said(there)}{_at(there[0].line)}{_waited_for(waiting)}"
    if waiting:
        return _disagreement(waiting)
    here = [place for place in places if place not in left]
    alike = next(iter(_alike(here)), [])
    if len(here) > len(alike) > 0:
        return [], "no rank waits for another, and none gets on"
    return [], f"{_ranks(alike)} {_said(alike)}{_at(alike[0].line)}" if alike else "there is no rank"


def _disagreement(waiting: Sequence[Where]) -> tuple[list[int], str]:
    """Say of ranks that all wait whether they wait for the same."""
    calls = [place.waits_in for place in waiting if place.waits_in is not None]
    are_recorded = len(calls) == len(waiting)
    kinds = {(call.group, call.signature) for call in calls}
    numbers = {call.sequence for call in calls}
    # of one number and kind it is the same call, from whatever line; what is not recorded is known by its line alone
    is_same = len(kinds) <= 1 and len(numbers) <= 1 and (are_recorded or len({place.line for place in waiting}) == 1)
    if is_same:
        return [], f"all ranks wait in the same call{_at(waiting[0].line)}: a link between them is cut or very slow"
    few, *more = sorted(_alike(waiting), key=len)
    said = "; ".join(f"{_ranks(group)} {_said(group)}{_at(group[0].line)}" for group in (few, *more[-1:]))
    disagree = are_recorded and len(kinds) > 1
    why = "ranks do not agree on what comes next" if disagree else "ranks wait for each other in different calls"
    return _minority(waiting), f"{why}: {said}"


def _minority(places: Sequence[Where]) -> list[int]:
    """Return the ranks that are not where most are; all of them where there is no majority."""
    where = Counter((place.line, place.what) for place in places)
    (most, count), *rest = where.most_common()
    if rest and rest[0][1] == count:
        return _ranks_of(places)
    return _ranks_of([place for place in places if (place.line, place.what) != most])


def _waited_for(waiting: Sequence[Where]) -> str:
    if not waiting:
        return ""
    first = waiting[0]
    verb = "waits" if len(waiting) == 1 else "wait"
    what = first.what.removeprefix("waits ")
    return f", and {_ranks(waiting)} {verb} for it {what}{_at(first.line)}"


def _alike(places: Sequence[Where]) -> list[list[Where]]:
    """Group ranks that are at the same: in a run of hundreds most are."""
    groups: dict[tuple[str, Frame | None, int], list[Where]] = {}
    for place in places:
        groups.setdefault((place.what, place.line, place.state.step), []).append(place)
    return list(groups.values())


def _is_mute(state: RankState) -> bool:
    """Whether a rank is there and could not answer; its last heartbeat is all that it has told."""
    return state.collectives is None and state.exit_code is None


def _progress(states: Sequence[RankState], *, with_sequence: bool) -> str:
    """Say how far ranks in one place had come at their last heartbeats: of one that cannot answer it is all we know."""
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
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def _said(places: Sequence[Where]) -> str:
    """Say what ranks are at, in the singular or the plural."""
    verb, space, rest = places[0].what.partition(" ")
    if len(places) > 1:
        verb = {"is": "are", "was": "were", "has": "have"}.get(verb, verb.removesuffix("s"))
    return f"{verb}{space}{rest}"


def _ranks_of(places: Sequence[Where]) -> list[int]:
    return [place.state.rank for place in places]


def _users_line(state: RankState) -> Frame | None:
    """Return the user's line that the rank is in; where there is none, that of whose code it is, if not dure's."""
    inner = state.main[0] if state.main else None
    is_ours = any(frame.file.startswith(OWN_ROOT) for frame in state.main)
    return users_frame(state.main) or (None if is_ours else inner)


def _at(line: Frame | None) -> str:
    return "" if line is None else f" at {line}"


def _source(line: Frame | None) -> str:
    text = "" if line is None else linecache.getline(line.file, line.line).strip()
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"
