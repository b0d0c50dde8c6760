"""One look at the ranks of all nodes when those of one are not getting on: whom they wait for may be elsewhere."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dure.launch.examination import RankState, state_from_json
from dure.launch.hang import HangVerdict, explain
from dure.launch.nodes import Nodes

_PATIENCE_SECONDS = 5.0
"""A node that has not looked by then is left out."""
_PAUSE_SECONDS = 2.0
"""All nodes notice the same hang, and each asks for a look."""
_MOST_FRAMES, _MOST_THREADS, _MOST_CALLS = 30, 6, 4


class JointLook:
    """A look that any node asks for, that all take, and that node 0 explains to all."""

    def __init__(
        self,
        nodes: Nodes,
        examine: Callable[[], Sequence[RankState]],
        decide: Callable[[HangVerdict, float], tuple[HangVerdict, bool]],
    ) -> None:
        """Prepare to look; nothing is done yet.

        Args:
            nodes: All of them.
            examine: Looks at this node's ranks; takes about a second.
            decide: Says what follows from a verdict over so many seconds, and whether to end the ranks now.
        """
        self._nodes, self._examine, self._decide = nodes, examine, decide
        self._is_only_told_if_waited = False
        self._seconds = 0.0
        self._deadline: float | None = None
        self._not_before = 0.0
        self._states: list[RankState] = []
        self._looked: set[int] = set()

    def ask(self, seconds: float, *, only_if_waited: bool) -> None:
        """Ask for a look, for no step has finished for so long.

        Args:
            seconds: How long.
            only_if_waited: Whether it is no hang where no rank waits for another.
        """
        if not self._nodes.is_leader:
            self._nodes.send_to_first({"kind": "look", "seconds": seconds, "only_if_waited": only_if_waited})
        else:
            self._begin(seconds, only_if_waited=only_if_waited)

    def advance(self) -> tuple[HangVerdict, bool] | None:
        """Do what is to be done now; return the verdict over all nodes once it is there, and whether to act on it."""
        for rank, message in self._nodes.news.take_looks():
            kind = message["kind"]
            if kind == "look" and not self._nodes.is_leader:
                self._send_states()
            elif kind == "look":
                self._begin(float(message["seconds"]), only_if_waited=bool(message["only_if_waited"]))
            elif kind == "state":
                self._states.append(state_from_json(message["state"]))
            elif kind == "looked":
                self._looked.add(rank)
            else:
                return self._told(message)
        if self._deadline is None:
            return None
        if len(self._looked) + 1 < len(self._nodes.members) and time.monotonic() < self._deadline:
            return None
        return self._explained()

    def _begin(self, seconds: float, *, only_if_waited: bool) -> None:
        if self._deadline is not None or time.monotonic() < self._not_before:
            return
        self._seconds, self._looked, self._is_only_told_if_waited = seconds, set(), only_if_waited
        self._nodes.send_to_all({"kind": "look", "seconds": seconds})
        self._states = list(self._examine())
        self._deadline = time.monotonic() + _PATIENCE_SECONDS

    def _send_states(self) -> None:
        self._states = list(self._examine())
        for state in self._states:
            self._nodes.send_to_first({"kind": "state", "state": _shortened(state)})
        self._nodes.send_to_first({"kind": "looked"})

    def _explained(self) -> tuple[HangVerdict, bool] | None:
        self._deadline, self._not_before = None, time.monotonic() + _PAUSE_SECONDS
        verdict = explain(sorted(self._states, key=lambda state: state.rank), self._seconds)
        if self._is_only_told_if_waited and not verdict.is_waited:
            return None
        verdict = replace(verdict, text=f"{verdict.text}\n{self._where()}")
        verdict, acts = self._decide(verdict, self._seconds)
        told = {"text": verdict.text[:8000], "culprits": verdict.culprits, "is_certain": verdict.is_certain}
        self._nodes.send_to_all({"kind": "hang", "acts": acts, **told})
        return verdict, acts

    def _told(self, message: Any) -> tuple[HangVerdict, bool]:
        verdict = HangVerdict(
            text=str(message["text"]),
            culprits=tuple(int(rank) for rank in message["culprits"]),
            is_certain=bool(message["is_certain"]),
            states=tuple(self._states),
        )
        return verdict, bool(message["acts"])

    def _where(self) -> str:
        lines, first = [], 0
        for member in self._nodes.members:
            last = first + member.num_ranks - 1
            ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
            silent = "" if member.node_rank in (self._nodes.leader, *self._looked) else ", which did not answer"
            lines.append(f"  {ranks}: {member}{silent}")
            first = last + 1
        return "\n".join(lines)


def _shortened(state: RankState) -> dict[str, Any]:
    """Return what a verdict needs of a state: a message has a limit, and threads may be many."""
    calls = state.collectives
    if calls is not None:
        pending = [call for call in calls if call.is_pending]
        calls = tuple(
            replace(call, frames=call.frames[:_MOST_FRAMES]) for call in (*calls[-1:], *pending[:_MOST_CALLS])
        )
        calls = tuple({(call.group, call.sequence, call.op): call for call in calls}.values())
    used = {*itertools.islice(state.groups, 1), *(call.group for call in calls or ())}
    if state.call is not None:
        used.add(state.call.group)
    return replace(
        state,
        groups={name: ranks for name, ranks in state.groups.items() if name in used},
        main=state.main[:_MOST_FRAMES],
        others=tuple(thread[:_MOST_FRAMES] for thread in state.others[:_MOST_THREADS]),
        collectives=calls,
    ).to_json()
