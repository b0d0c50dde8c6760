"""Times of a script's steps, measured from outside: the script is unchanged, and computes what it would without.

A step ends with the optimiser's step. Its parts are told apart by calls that every script makes: a fetch from a
`DataLoader`, a backward, a wait for a collective, the optimiser's step. What lies between a fetch and a backward is the
forward. A fetch without gradients belongs to an evaluation.
"""

import math
import os
import threading
import time
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dure.host.device_kinds import has_timed_events, is_capturing
from dure.measure.collective_calls import read_calls
from dure.measure.operations import BackwardOperations
from dure.measure.step_clock import Mark, StepClock
from dure.measure.step_profile import StepProfile
from dure.records.step_record import StepRecord
from dure.records.step_writer import RecordWriter
from dure.terminal import print_status, printable
from dure.torchcompat.script_calls import (
    ReplicaClock,
    num_workers_of,
    observe_backwards,
    observe_derivatives,
    observe_fetches,
    observe_group_ends,
    observe_replicas,
    observe_saves,
    observe_waits,
)

_FLUSH_SECONDS = 2.0
_LOOK_SECONDS = 60.0
_MOST_SPANS = 1000
"""Number of spans from which those of a step are read before its end: it may never come."""
_MOST_DEPTH = 4
"""Levels of a batch's containers at which its first tensor is looked for."""
TRAINING = ("data", "forward", "backward", "sync", "optimizer", "other")
AROUND = ("evaluation", "saving")
"""Spans that are no part of a step."""


@dataclass
class _Step:
    """Step under way, or one whose spans are not read yet."""

    begin: Mark
    begun_at: float
    """Seconds since the epoch at its begin."""
    spans: list[tuple[str, Mark]] = field(default_factory=list)
    """Label and end of each span."""
    inside: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of the host within spans: of a label that was waited for in a span of another, as `label in other`."""
    num_backwards: int = 0
    known: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of each label in spans that were read already, or after the last step."""
    stepped: set[int] = field(default_factory=set)
    """Identities of the optimisers that have stepped."""
    loss_sum: float = 0.0
    loss_count: int = 0
    num_samples: int = 0
    ended_at: float = 0.0
    """Seconds since the epoch at its end."""

    def end_span(self, label: str, mark: Mark) -> None:
        """End the span since the last mark."""
        if self.spans and self.spans[-1][0] == label:
            self.spans.pop()
        self.spans.append((label, mark))

    def give_to_evaluation(self) -> None:
        """Count the last fetch and forward as an evaluation."""
        mark = None
        while self.spans and self.spans[-1][0] in ("data", "forward"):
            last = self.spans.pop()[1]
            mark = last if mark is None else mark
        if mark is not None:
            self.end_span("evaluation", mark)


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """Facts about a script, known after its first step."""

    device: str
    """Type of the device on which its loss is."""
    backend: str
    """Backends of the group of all ranks; empty without one."""
    batch_size: int
    """Samples of its first step on this rank; 0 if it has no `DataLoader`."""
    num_workers: int
    """Loader processes of its data."""
    threads: int
    """Threads that torch computes with on this rank."""


class ScriptSteps:
    """Steps of a script in this process, from its first call of torch to the end of the process."""

    def __init__(
        self,
        writer: RecordWriter,
        world_size: int,
        tell: Callable[[ScriptFacts], None] = lambda facts: None,
        count: Callable[[int, float], None] = lambda operations, least_seconds: None,
        profile: StepProfile | None = None,
    ) -> None:
        """Prepare to measure; `install` begins.

        Args:
            writer: Receives the records.
            world_size: Number of ranks.
            tell: Called once, after the first step, with what is known of the script.
            count: Called once, after an early step, with its operations and the seconds of the smallest.
            profile: Profile of some steps; None for none.
        """
        self._writer = writer
        self._world_size = world_size
        self._tell: Callable[[ScriptFacts], None] | None = tell
        self._operations = BackwardOperations(count)
        self._profile = profile
        self._is_off = False
        self._pid, self._thread = os.getpid(), threading.main_thread().ident
        self._clock = StepClock(torch.device("cpu"))
        self._is_host = True
        self._held: list[_Step] = []
        self._step = self._begun()
        self._count = 0
        self._samples = 0
        self._depth = 0
        """Number of backwards within each other."""
        self._is_step_due = False
        """True if an optimiser stepped within a backward: the step ends with it."""
        self._last = "begin"
        """Last call: `begin`, `fetched`, `fetched without gradients`, `backward` or `step`."""
        self._loader: object = None
        self._num_fetched = 0
        """Samples of the last batch."""
        self._num_workers = 0
        self._nested = 0
        """Number of observed waits and saves within each other."""
        self._waits_begun = 0.0
        self._flush_at = time.monotonic() + _FLUSH_SECONDS
        self._replicas: list[ReplicaClock] = []
        self._reduction: dict[str, float] = {}
        """Measurements of the last reduction of gradients, for the step's record."""
        self._sent_bytes = 0
        """Bytes that this rank sends for a step, as far as was seen."""
        self._look_at = 0.0

    def install(self) -> None:
        """Observe the calls of this process from now on."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        safe = self._harmless
        observe_fetches(safe(self._begin_fetch), safe(self._end_fetch))
        observe_backwards(safe(self._begin_backward), safe(self._end_backward))
        observe_derivatives(safe(lambda _: self._begin_backward(None)), safe(self._end_backward))
        observe_waits(safe(self._begin_inside), safe(lambda: self._end_inside("sync")))
        observe_group_ends(safe(lambda _: self._flush(keep=1)))
        observe_replicas(safe(self._add_replica))
        observe_saves(safe(self._begin_inside), safe(lambda: self._end_inside("saving")))
        register_optimizer_step_pre_hook(safe(lambda *_: self._begin_optimizer()))
        register_optimizer_step_post_hook(safe(lambda optimizer, *_: self._end_optimizer(optimizer)))

    def _harmless(self, observer: Callable[..., None]) -> Callable[..., None]:
        """Return an observer that does nothing in children and helper threads, and whose first error ends recording."""

        def observe(*args: Any) -> None:
            if self._is_off or threading.get_ident() != self._thread or os.getpid() != self._pid:
                return
            if not self._is_host and is_capturing(self._clock.device.type):
                return  # a graph of the device's calls: marks would become part of it
            try:
                observer(*args)
            except Exception as error:
                self._is_off = True
                print_status(f"dure: the steps of this script are no longer recorded: {printable(str(error))}")

        return observe

    def stop(self) -> None:
        """Observe nothing more."""
        self._is_off = True

    def close(self) -> None:
        """Write what is known, at the end of the process."""
        self._harmless(self._finish)()

    def _finish(self) -> None:
        if self._held:  # what follows the last step may be an evaluation, or the weights being saved
            rest = self._seconds_by_label(self._step)
            for label in AROUND:
                self._held[-1].known[label] += rest[label]
        self._flush(keep=0)
        if self._profile is not None:
            self._profile.close()

    # calls, as they happen

    def _begin_fetch(self) -> None:
        if not self._depth:
            with_gradients = torch.is_grad_enabled()
            self._step.end_span(self._label_before_fetch(with_gradients), self._clock.mark())
            if len(self._step.spans) > _MOST_SPANS:
                self._read_spans(self._step)

    def _label_before_fetch(self, with_gradients: bool) -> str:
        if self._last == "fetched without gradients":
            return "evaluation"
        if self._last == "fetched" and with_gradients:
            return "forward"
        return "other"

    def _end_fetch(self, iterator: object, batch: object, is_there: bool) -> None:
        if self._depth:
            return
        if not torch.is_grad_enabled():
            self._step.end_span("evaluation", self._clock.mark())
            self._last = "fetched without gradients" if is_there else "evaluated"
            return
        if self._last == "fetched" and iterator is self._loader:
            # the batch before was not trained on: it was one of an evaluation, or was skipped
            self._step.give_to_evaluation()
            self._step.num_samples -= self._num_fetched
        self._step.end_span("data" if is_there else "other", self._clock.mark())
        self._last, self._loader = "fetched", iterator
        self._num_workers = num_workers_of(iterator)
        self._num_fetched = _num_samples(batch)
        self._step.num_samples += self._num_fetched

    def _begin_backward(self, tensors: object) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        if not self._count and self._is_host:
            self._look_for_device(tensors)
        label = "evaluation" if self._last == "fetched without gradients" else "forward"
        self._step.end_span(label, self._clock.mark())
        self._note_loss(tensors)
        self._step.num_backwards += 1
        self._operations.begin()

    def _end_backward(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._operations.end()
        self._step.end_span("backward", self._clock.mark())
        for clock in self._replicas:
            if (reduced := clock.last_reduction()) is not None:
                self._step.inside["sync in backward"] += reduced.waited_seconds
                self._reduction = reduced.measured()
        self._last = "backward"
        if self._is_step_due:
            self._is_step_due = False
            self._end_step("optimizer")

    def _begin_optimizer(self) -> None:
        if not self._depth and self._step.num_backwards:
            # what follows a backward prepares the step: clipping, unscaling
            self._step.end_span("optimizer", self._clock.mark())

    def _end_optimizer(self, optimizer: object) -> None:
        if self._depth:
            self._is_step_due = True
        elif self._last != "begin" or not self._held or id(optimizer) in self._held[-1].stepped:
            self._step.stepped.add(id(optimizer))
            self._end_step("optimizer")
        else:
            # another optimiser of the same step
            last, mark = self._held[-1], self._clock.mark()
            last.spans += [*self._step.spans, ("optimizer", mark)]
            last.stepped.add(id(optimizer))
            last.ended_at = time.time()
            for label, seconds in self._step.inside.items():
                last.inside[label] += seconds
            self._step = self._begun(mark)
            self._last = "begin"

    def _begin_inside(self, _: object) -> None:
        self._nested += 1
        if self._nested == 1:
            self._waits_begun = time.perf_counter()

    def _end_inside(self, label: str) -> None:
        self._nested -= 1
        if self._nested:
            return
        self._step.inside[f"{label} in {self._label_now()}"] += time.perf_counter() - self._waits_begun

    def _label_now(self) -> str:
        """Return the label that the current span most likely gets."""
        if self._depth:
            return "backward"
        return {
            "fetched": "forward",
            "fetched without gradients": "evaluation",
            "backward": "optimizer",
        }.get(self._last, "other")

    def _add_replica(self, replica: Any) -> None:
        if all(parameter.device.type == "cpu" for parameter in replica.parameters()):
            self._replicas.append(ReplicaClock(replica))

    # steps

    def _begun(self, mark: Mark | None = None) -> _Step:
        return _Step(begin=self._clock.mark() if mark is None else mark, begun_at=time.time())

    def _end_step(self, label: str) -> None:
        mark = self._clock.mark()
        self._step.end_span(label, mark)
        self._step.ended_at = time.time()
        self._held.append(self._step)
        if self._tell is not None:
            tell, self._tell = self._tell, None
            tell(self._facts())
        self._last = "begin"
        if self._profile is not None:
            self._profile.begin_step(self._count + len(self._held) + 1)
        self._step = self._begun(mark)
        if time.monotonic() >= self._flush_at:
            self._flush(keep=1)

    def _facts(self) -> ScriptFacts:
        has_group = dist.is_available() and dist.is_initialized()
        return ScriptFacts(
            device=self._clock.device.type,
            backend=str(dist.get_backend_config()) if has_group else "",
            batch_size=self._step.num_samples,
            num_workers=self._num_workers,
            threads=torch.get_num_threads(),
        )

    def _look_for_device(self, tensors: object) -> None:
        """Measure by the events of the device on which the loss is, if they measure time."""
        root = tensors if isinstance(tensors, Tensor) else next(iter(_tensors(tensors)), None)
        if root is None or not has_timed_events(root.device.type) or is_capturing(root.device.type):
            return
        self._clock, self._is_host = StepClock(root.device), False
        self._step = _Step(begin=self._clock.mark(), begun_at=self._step.begun_at, num_samples=self._step.num_samples)

    def _note_loss(self, tensors: object) -> None:
        # reading it from an accelerator would wait for all work that is queued there
        if isinstance(tensors, Tensor) and tensors.numel() == 1 and tensors.device.type == "cpu":
            value = float(tensors.detach())
            if math.isfinite(value):
                self._step.loss_sum += value
                self._step.loss_count += 1

    def _flush(self, *, keep: int) -> None:
        """Write the records of the steps held, except the newest `keep`, which another optimiser may belong to."""
        steps, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if self._world_size > 1 and steps and time.monotonic() >= self._look_at:
            self._look_at_calls(steps[-1])
        for step in steps:
            self._count += 1
            self._samples += step.num_samples * self._world_size
            self._writer.write(self._record(step))
        self._writer.flush()
        self._flush_at = time.monotonic() + _FLUSH_SECONDS

    def _look_at_calls(self, step: _Step) -> None:
        """Read what a step sends, at most once a minute: reading the recorder takes as long as two steps."""
        calls = read_calls()
        self._sent_bytes = calls.sent_bytes(step.begun_at, step.ended_at)
        self._look_at = time.monotonic() + _LOOK_SECONDS

    def _record(self, step: _Step) -> StepRecord:
        seconds = self._seconds_by_label(step)
        wall = sum(seconds[label] for label in TRAINING)
        measured = {"samples": step.num_samples, "backwards": step.num_backwards, **self._reduction}
        measured |= {f"{label}_seconds": seconds[label] for label in AROUND if seconds[label]}
        return StepRecord(
            time=step.ended_at,
            step=self._count,
            epoch=0,
            samples_seen=self._samples,
            loss_sum=step.loss_sum,
            loss_count=step.loss_count,
            data_seconds=seconds["data"],
            forward_backward_seconds=seconds["forward"] + seconds["backward"],
            sync_seconds=seconds["sync"],
            optimizer_seconds=seconds["optimizer"],
            wall_seconds=wall,
            sent_bytes=self._sent_bytes,
            measured=measured,
            backward_seconds=seconds["backward"],
        )

    def _seconds_by_label(self, step: _Step) -> defaultdict[str, float]:
        """Return the seconds of each label; waits for collectives and saves count for themselves."""
        self._read_spans(step)
        seconds = step.known
        for names, inside in step.inside.items():
            label, _, around = names.partition(" in ")
            if label == "sync" and around == "evaluation":
                continue
            taken = min(inside, seconds[around]) if self._is_host or label == "saving" else 0.0
            seconds[around] -= taken
            seconds[label] += taken
        return seconds

    def _read_spans(self, step: _Step) -> None:
        """Add the spans of a step to what is known of it."""
        marks: list[Any] = [step.begin, *(mark for _, mark in step.spans)]
        for (label, _), span in zip(step.spans, self._clock.spans(marks), strict=True):
            step.known[label] += span
        step.begin, step.spans = marks[-1], []


def _tensors(found: object, depth: int = 0) -> list[Tensor]:
    """Return the first tensor within containers, as a list; empty if there is none."""
    if isinstance(found, Tensor):
        return [found]
    if depth == _MOST_DEPTH:
        return []
    for each in _items(found):
        if tensors := _tensors(each, depth + 1):
            return tensors
    return []


def _items(found: object) -> Iterable[object]:
    """Return what a container holds, without a call of the script's own code, which might draw or compute it."""
    if isinstance(found, UserDict):  # as transformers' batches are
        found = vars(found).get("data")
    if isinstance(found, dict):
        return dict.values(found)
    if isinstance(found, list):
        return list.__iter__(found)
    return tuple.__iter__(found) if isinstance(found, tuple) else ()


def _num_samples(batch: object) -> int:
    """Return the samples of a batch: the first dimension of its first tensor; 0 if that is unknown."""
    first = _tensors(batch)
    return first[0].shape[0] if first and first[0].dim() else 0
