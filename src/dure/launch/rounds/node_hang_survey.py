"""Survey of the ranks of all nodes when those of one node hang: they may wait for ranks elsewhere."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dure.launch.hangs.diagnosis import HangVerdict, explain
from dure.launch.hangs.rank_state import RankState
from dure.launch.nodes.messages import Hang, NoHang, State, Survey, Surveyed, SurveyRequest
from dure.launch.nodes.peers import Nodes

_PATIENCE_SECONDS = 5.0
"""Seconds after which a node without a reply is left out."""
_PAUSE_SECONDS = 2.0
"""Seconds between probes: all nodes notice the same hang, and each requests one."""
_MOST_FRAMES, _MOST_THREADS, _MOST_CALLS = 30, 6, 4


class HangSurvey:
    """Probe of all ranks: any node may request it, every node makes it, and the leader sends the verdict to all.

    A certain verdict needs a second probe in which no culprit has moved: ranks are probed one after the other, and
    states of ranks that make progress may be inconsistent.
    """

    def __init__(
        self,
        nodes: Nodes,
        examine: Callable[[], Sequence[RankState]],
        decide: Callable[[HangVerdict, float], tuple[HangVerdict, bool]],
        on_nothing: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Prepare to probe; nothing is done yet.

        Args:
            nodes: All nodes.
            examine: Probes this node's ranks; takes about a second.
            decide: Returns the verdict with its announcement, from a verdict and the seconds of silence, and whether to
                end the ranks now.
            on_nothing: Called with the seconds of silence if they were no hang.
        """
        self._nodes, self._examine, self._decide, self._on_nothing = nodes, examine, decide, on_nothing
        self._only_if_waited = False
        self._is_confirmed = True
        self._seconds = 0.0
        self._deadline: float | None = None
        self._not_before = 0.0
        self._number = 0
        """Number of the current probe: a reply to an earlier one is too late."""
        self._states: list[RankState] = []
        self._replied: set[int] = set()
        self._suspicion: HangVerdict | None = None
        """A certain verdict, until the second probe; None if there is none."""

    def ask(self, seconds: float, *, only_if_waited: bool = False, is_confirmed: bool = True) -> None:
        """Request a probe, because no step has finished for long.

        Args:
            seconds: Seconds without a finished step.
            only_if_waited: Whether it is no hang unless a rank waits for another.
            is_confirmed: Whether a second probe must confirm a certain verdict; unnecessary if nothing follows from it.
        """
        wish = SurveyRequest(seconds=seconds, only_if_waited=only_if_waited, is_confirmed=is_confirmed)
        if not self._nodes.is_leader:
            self._nodes.send_to_first(wish)
        else:
            self._begin(wish)

    def advance(self) -> tuple[HangVerdict, bool] | None:
        """Do what is due; return the verdict over all nodes once it is there, and whether to act on it."""
        for rank, message in self._nodes.news.take_survey_messages():
            match message:
                case Survey():
                    self._send_states(message.number)
                case SurveyRequest():
                    self._begin(message)
                case State() if message.number == self._number:
                    self._states.append(message.state)
                case Surveyed() if message.number == self._number:
                    self._replied.add(rank)
                case NoHang():
                    self._on_nothing(message.seconds)
                case Hang():
                    return self._received_verdict(message)
        if self._deadline is None:
            return None
        if len(self._replied) + 1 < len(self._nodes.members) and time.monotonic() < self._deadline:
            return None
        return self._explained()

    def _begin(self, wish: SurveyRequest) -> None:
        if self._deadline is not None or time.monotonic() < self._not_before:
            return
        self._seconds = wish.seconds
        self._only_if_waited, self._is_confirmed = wish.only_if_waited, wish.is_confirmed
        self._suspicion = None
        self._probe()

    def _probe(self) -> None:
        self._number, self._replied = time.monotonic_ns(), set()
        self._nodes.send_to_all(Survey(number=self._number))
        self._states = list(self._examine())
        self._deadline = time.monotonic() + _PATIENCE_SECONDS

    def _send_states(self, number: int) -> None:
        self._states = list(self._examine())
        for state in self._states:
            self._nodes.send_to_first(State(number=number, state=_shortened(state)))
        self._nodes.send_to_first(Surveyed(number=number))

    def _explained(self) -> tuple[HangVerdict, bool] | None:
        self._deadline, self._not_before = None, time.monotonic() + _PAUSE_SECONDS
        verdict, self._suspicion = self._suspicion, None
        if verdict is None:
            verdict = explain(sorted(self._states, key=lambda state: state.rank), self._seconds)
            if self._only_if_waited and not verdict.is_waited:
                self._nothing()
                return None
            if verdict.is_certain and self._is_confirmed:
                self._suspicion = verdict
                self._probe()
                return None
        elif verdict.has_moved(self._states):
            self._nothing()
            return None
        verdict = replace(verdict, text=f"{verdict.text}\n{self._where()}")
        verdict, acts = self._decide(verdict, self._seconds)
        message = Hang(text=verdict.text[:8000], culprits=verdict.culprits, is_certain=verdict.is_certain, acts=acts)
        self._nodes.send_to_all(message)
        return verdict, acts

    def _nothing(self) -> None:
        """Tell all nodes that it was no hang, so that they compare again soon."""
        self._nodes.send_to_all(NoHang(seconds=self._seconds))
        self._on_nothing(self._seconds)

    def _received_verdict(self, message: Hang) -> tuple[HangVerdict, bool]:
        verdict = HangVerdict(
            text=message.text,
            culprits=message.culprits,
            is_certain=message.is_certain,
            states=tuple(self._states),
        )
        return verdict, message.acts

    def _where(self) -> str:
        lines, first = [], 0
        for member in self._nodes.members:
            last = first + member.num_ranks - 1
            ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
            silent = "" if member.node_rank in (self._nodes.leader, *self._replied) else ", which did not answer"
            lines.append(f"  {ranks}: {member}{silent}")
            first = last + 1
        return "\n".join(lines)


def _shortened(state: RankState) -> RankState:
    """Return the part of a state that a verdict needs: messages have a limit, and threads may be many."""
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
    )
