"""Phases that a task's schedule begins: inspections of the loss in the states that it sets at positions of the run.

A schedule may set plain state that the loss reads, at some number of samples: a weight of a term, an observer, a phase
of the training. The behaviour of the loss from there on is found before training, as far as that state determines it.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from dure.strategies.contract.loss_traits import LossTraits
from dure.strategies.state.hooks import gradient_hooks, without_new_hooks
from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.tensor_shard import version_of
from dure.strategies.state.trial import Trial, is_equal
from dure.training.inspection.collectives import CollectiveCalled, no_collectives
from dure.training.inspection.loss_calls import aside
from dure.training.inspection.loss_inspection import LossInspection

_NUM_POSITIONS = 33
"""Number of positions at which a schedule is called, evenly spaced over the run."""
_SCHEDULE_SECONDS = 1.0
"""Seconds after which the schedule is called at no further position."""
_SECONDS = 3.0
"""Seconds within which inspections of states must begin; no more calls of the loss are planned than fit into them."""
_MOST_INSPECTED = 3
"""Maximum number of states in which all traits are inspected because the loss has another value there."""

_IN_PART = LossTraits(learns_statistics=False, has_dropout=False)
"""Traits in a state in which not all were inspected, which add nothing to those known."""


class Phases:
    """States that a schedule sets during the run, and traits of the loss in them."""

    def __init__(
        self,
        model: nn.Module,
        objects: Mapping[str, object],
        build: Callable[[], Any],
        positions: Sequence[int],
    ) -> None:
        """Prepare.

        Args:
            model: Whole model.
            objects: Objects in which task and schedule may keep state, by name.
            build: Builds the optimiser and returns its schedule.
            positions: Numbers of samples seen with which the schedule is called, in ascending order.
        """
        self._model = model
        self._objects = objects
        self._build = build
        self._positions = positions

    def traits(self, inspection: LossInspection, num_samples: int, known: LossTraits) -> LossTraits:
        """Return the known traits of the loss merged with those in states that the schedule sets.

        Args:
            inspection: Inspection of the loss.
            num_samples: Number of available samples, at least 1.
            known: Traits in the state before training.
        """
        positions = self._new_states(watches_writes=inspection.calls.watches_writes)
        if not positions:
            return known
        started = time.monotonic()
        try:
            summaries = [inspection.call_summary(num_samples)]
        except (Exception, CollectiveCalled):
            return known  # it fails irregularly
        seconds_each = time.monotonic() - started
        deadline = time.monotonic() + _SECONDS
        chosen = {positions[i] for i in _spread(len(positions), max(1, int(_SECONDS / max(seconds_each, 1e-9))))}
        num_inspected = 0
        with contextlib.closing(self._states(chosen, watches_writes=inspection.calls.watches_writes)) as states:
            for seen in states:
                if time.monotonic() > deadline:
                    break
                try:
                    summary = inspection.call_summary(num_samples)
                except CollectiveCalled as called:
                    known = known.joined(replace(_IN_PART, collective=called.name), _with(seen))
                    continue
                except Exception as error:
                    why = f"the loss failed with {type(error).__name__} when it was tried"
                    known = known.joined(replace(_IN_PART, reason_unknown=why), _with(seen))
                    continue
                if summary in summaries:
                    continue
                is_other_kind = summary.kind not in [each.kind for each in summaries]
                summaries.append(summary)
                if is_other_kind or num_inspected < _MOST_INSPECTED:
                    num_inspected += 1
                    found = replace(inspection.traits_now(num_samples), phases=(seen,))
                else:
                    found = replace(_IN_PART, not_additive=inspection.not_additive_now(num_samples))
                known = known.joined(found, _with(seen))
        return known

    def entered(self, positions: Collection[int]) -> Generator[str]:
        """Yield descriptions of states that the schedule sets at some positions, with the task in each of them."""
        with contextlib.closing(self._states(positions, watches_writes=False)) as states:
            for seen in states:
                yield _with(seen)

    def _new_states(self, *, watches_writes: bool) -> list[int]:
        """Return the positions at which the schedule has set a state that was not there before."""
        new = []
        states: list[dict[str, Any]] = [{}]
        now = _Changes(self._model, self._objects)
        deadline = time.monotonic() + _SCHEDULE_SECONDS
        with contextlib.closing(self._states(self._positions, watches_writes=watches_writes)) as positions:
            for seen in positions:
                if (state := now.found()) not in states:
                    states.append(state)
                    new.append(seen)
                if time.monotonic() > deadline:
                    break
        return new

    def _states(self, chosen: Collection[int], *, watches_writes: bool) -> Generator[int]:
        """Yield the chosen positions, with the task in the state that the schedule sets there; restore all afterwards.

        The schedule is called at the positions between too, because it may count its calls.
        """
        trial = Trial(self._model, self._objects, watches_writes=watches_writes)
        with trial, without_new_hooks(self._model):
            try:
                with aside(), no_collectives():  # other ranks build no optimiser now
                    schedule = self._build()
            except (Exception, CollectiveCalled):
                return
            if not callable(schedule):
                return
            for seen in self._positions:
                with (
                    aside(),
                    contextlib.suppress(Exception, CollectiveCalled),
                    no_collectives(),
                ):  # the step will raise it
                    schedule(seen)
                if seen in chosen:
                    yield seen


def _with(seen: int) -> str:
    return f"with the state that the schedule sets at {seen} samples"


def positions_of(total_samples: int, epoch_samples: int, batch_size: int) -> list[int]:
    """Return the numbers of samples seen before some steps of a run, evenly spaced.

    Args:
        total_samples: Number of samples of the run.
        epoch_samples: Number of samples of an epoch.
        batch_size: Number of samples of a step.
    """
    found = set()
    for number in range(_NUM_POSITIONS):
        epoch, within = divmod((total_samples - 1) * number // (_NUM_POSITIONS - 1), epoch_samples)
        found.add(epoch * epoch_samples + within - within % batch_size)
    return sorted(found)


def _spread(length: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced positions of a sequence, including its first and its last."""
    if length <= most:
        return list(range(length))
    return [0] if most == 1 else sorted({(length - 1) * number // (most - 1) for number in range(most)})


class _Changes:
    """Differences between the current state on which a loss may depend, and that at the time of construction."""

    def __init__(self, model: nn.Module, objects: Mapping[str, object]) -> None:
        self._model = model
        self._plain = ObjectState({**objects, "model": model}, sees_data=True)
        self._buffers = {name: (_write_mark(buffer), buffer.clone()) for name, buffer in model.named_buffers()}
        self._first = self._registered()

    def found(self) -> dict[str, Any]:
        """Return the differences by path; equal for equal states."""
        found = self._plain.changed()
        for name, buffer in self._model.named_buffers():
            mark, before = self._buffers.get(name, (None, None))
            # most buffers are never written to, which is quick to see
            if before is None or (mark != _write_mark(buffer) and not is_equal(buffer, before)):
                found[f"model.{name}"] = _listed(buffer)
        if (registered := self._registered()) != self._first:
            found["modules"] = registered
        return found

    def _registered(self) -> list[Any]:
        model = self._model
        modules = [
            (name, id(module), module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
            for name, module in model.named_modules()
        ]
        return [modules, gradient_hooks(model), [(name, p.requires_grad) for name, p in model.named_parameters()]]


def _write_mark(buffer: Tensor) -> tuple[int, int]:
    return id(buffer), version_of(buffer)


def _listed(buffer: Tensor) -> Any:
    return [str(buffer.dtype), buffer.tolist()] if buffer.numel() <= 64 else float(buffer.double().sum())
