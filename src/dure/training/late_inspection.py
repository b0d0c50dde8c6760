"""Inspections during the run, for traits of the loss that no call before training showed.

A loss may change its behaviour after some steps, when a phase begins or the weights reach a threshold. The generators
are checked before every checkpoint. Before some checkpoints a few losses are also compared with those of their parts.
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace

from dure.data.randomness import GeneratorStates
from dure.errors import DataInvalid
from dure.strategies.state.batchnorm import FrozenStatistics
from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.trial import KeptBuffers
from dure.training.inspection.additivity import tolerance_of
from dure.training.inspection.loss_calls import NUM_SAMPLES
from dure.training.inspection.loss_inspection import LossInspection
from dure.training.objects.counted_state import CountedState, differing
from dure.training.rehearsal import few_losses
from dure.training.session.session import Session
from dure.training.session.task_inspection import TaskInspection

_ALWAYS = 3
"""Number of first checkpoints before which losses are compared; later, only before those whose number is a power of
two."""
_PAUSE_SECONDS = 30.0
"""Seconds after which losses are compared before any checkpoint, if rank 0 does so alone."""
_TIME_FRACTION = 0.01
"""Fraction of the time since the last comparison that the next one may take, however slow a loss is."""


class LateInspection:
    """Inspections of a session during training."""

    def __init__(self, session: Session) -> None:
        """Start with the current state of the generators, before training."""
        strategy = session.strategy
        self._session = session
        self._generators = None if strategy.draws else GeneratorStates.now(*strategy.devices)
        is_whole = (
            not strategy.rules.undoes_writes or strategy.info.extra_processes
        )  # workers of servers have all weights
        self._needs_all = strategy.share.is_joint or not is_whole
        self._frozen = None if strategy.traits.learns_statistics else FrozenStatistics(strategy.model)
        """Statistics of BatchNorm layers, if they were seen to stay as they are."""
        self._declared = set(strategy.not_preserved())
        """Declarations of this run so far."""
        self._counted = CountedState(strategy)
        self._num_calls = 0
        self._looked_at = time.monotonic()
        self._place = 0
        """Place, in the order of training, of the first sample for the next comparison."""
        self._gradients_at = 0
        """The same for the next comparison of gradients, which is of few samples each time."""

    @property
    def declared(self) -> list[str]:
        """Declarations of this run so far."""
        return sorted({*self._declared, *self._session.notes})

    def note_step(self) -> None:
        """Record, after the calls of a step, what ranks compare before the next checkpoint."""
        self._counted.note_step()

    def note_evaluation(self) -> None:
        """Leave out, of what ranks compare, the changes by an evaluation that has just ended."""
        self._counted.leave_out_changes()

    def declare(self, texts: Sequence[str]) -> None:
        """Take declarations as known, so that they are not new when other ranks have them too."""
        self._declared.update(texts)

    def new_declarations(self, step: int, *, found: Sequence[str] = (), is_last: bool) -> list[str]:
        """Inspect the loss, and return new declarations of what the run does not preserve.

        Communication: one gathered JSON message, and that of three small evaluations if ranks evaluate together.

        Args:
            step: Number of completed steps.
            found: Declarations that this rank has found elsewhere.
            is_last: Whether this is the last call.
        """
        strategy = self._session.strategy
        traits, texts = strategy.traits, [*found]
        if (
            self._generators is not None
            and not strategy.first_steps.has_drawn
            and strategy.drawing.has_drawn_since(self._generators)
        ):
            self._generators = None
            traits = replace(traits, draws=True, model_draws=True)
            texts += [self._session.reseeding_note] if self._session.reseeding_note else []
        if self._frozen is not None and self._frozen.have_changed():
            self._frozen = None
            traits = replace(traits, learns_statistics=True)
        self._num_calls += 1
        is_due = self._is_due(is_last=is_last)
        if is_due and self._is_comparable() and (figures := self._difference()):
            traits = replace(traits, not_additive=f"{figures} (after {step} steps)")
        elif is_due and (figures := self._difference_of_model()):
            traits = replace(traits, not_additive=f"{figures} (after {step} steps)", model_not_additive=True)
        if traits.not_additive is None and (difference := strategy.rows.difference):
            traits = replace(traits, not_additive=difference)
        strategy.traits = traits
        texts += strategy.not_preserved()
        # another rank may have another part of the model, or have used other samples
        own = [text for text in dict.fromkeys(texts) if text not in self._declared]
        by_rank = strategy.group.all_gather_json([own, traits.not_additive, self._counted.digests()])
        # ranks that evaluate together must agree on whether there is anything left to compare
        figures_of_any = next((figures for _, figures, _ in by_rank if figures is not None), None)
        strategy.traits = replace(traits, not_additive=figures_of_any)
        texts_of_all = dict.fromkeys(itertools.chain(*(texts for texts, _, _ in by_rank)))
        if paths := differing([digests for _, _, digests in by_rank]):
            strategy.traits = strategy.traits.learning(paths)
            texts_of_all |= dict.fromkeys(strategy.not_preserved())
        new = [text for text in texts_of_all if text not in self._declared]
        self._declared.update(new)
        return new

    def _is_due(self, *, is_last: bool) -> bool:
        if is_last or self._num_calls <= _ALWAYS or not self._num_calls & (self._num_calls - 1):
            return True
        # by the clock only if no other rank takes part
        return not self._needs_all and time.monotonic() - self._looked_at > _PAUSE_SECONDS

    def _is_comparable(self) -> bool:
        strategy = self._session.strategy
        is_divided = len(strategy.parts.of_loss(self._session.spec.global_batch_size)) > 1
        is_known = strategy.traits.not_additive is not None
        return is_divided and strategy.is_synchronous and not is_known and self._can_be_called()

    def _can_be_called(self) -> bool:
        """Return whether the loss may be called during training, and gives the same each time."""
        traits = self._session.strategy.traits
        # batches that draw random numbers differ each time
        varies = traits.data_changes or traits.collate_draws or traits.collate_state or traits.collate_count
        has_traces = varies or bool(traits.changed_parameters or traits.left_state)
        # not tried before training either, because of time or of state that cannot be put back; a loss that failed then
        # may have lacked what the schedule sets
        is_untried = traits.reason_unknown is not None and not traits.has_failed
        return not (has_traces or is_untried)

    def _difference(self) -> str | None:
        """Return the figures of a loss whose parts do not add up, or None."""
        session, strategy = self._session, self._session.strategy
        if self._needs_all:
            return self._difference_in_evaluation()
        if strategy.group.rank:
            return None
        now = time.monotonic()
        most_seconds, self._looked_at = _TIME_FRACTION * (now - self._looked_at), now
        inspection = self._inspection()
        num_samples = session.order.num_samples
        # other samples each time, to find rare cases
        at = self._gradients_at if self._gradients_at + 1 < num_samples else 0
        figures, self._place = inspection.late_difference(self._place, num_samples, most_seconds, at)
        self._gradients_at = at + NUM_SAMPLES
        if self._place >= num_samples - 1:
            self._place = 0
        return figures

    def _difference_of_model(self) -> str | None:
        """Return a description of a difference in the model's own calls, if a strategy of one process divides these."""
        session, strategy = self._session, self._session.strategy
        is_divided = len(strategy.parts.of_model(session.spec.global_batch_size)) > 1
        if not is_divided or strategy.traits.model_not_additive or not self._can_be_called():
            return None
        inspection = self._inspection()
        num_samples = session.order.num_samples
        figures, self._place = inspection.late_difference_of_model(self._place, num_samples)
        if self._place + session.spec.global_batch_size > num_samples:
            self._place = 0
        return figures

    def _inspection(self) -> LossInspection:
        session, strategy = self._session, self._session.strategy
        return TaskInspection(
            strategy=strategy,
            task=session.task,
            model=strategy.model,
            loader=session.train_loader,
            order=session.order,
        ).of_loss()

    def _difference_in_evaluation(self) -> str | None:
        session, strategy = self._session, self._session.strategy
        if session.eval_loader is None and strategy.rules.divides_model:
            return None  # whether every rank can compute the loss by itself was not tried before training
        # training data, if the loss accepts them in an evaluation, because it may treat the two differently
        loader, num_samples = session.eval_loader, session.eval_samples
        if strategy.traits.is_evaluable:
            loader, num_samples = session.train_loader, session.order.num_samples
        if loader is None:
            return None
        before = ObjectState({**strategy.objects, "model": strategy.model})
        buffers = KeptBuffers(strategy.model)
        is_exact = strategy.precision.is_exact and not strategy.traits.autocasts
        tolerance = max(tolerance_of(strategy.model, is_exact=is_exact), strategy.traits.loss_rounding)
        try:
            losses = few_losses(session, loader, num_samples, tolerance)
        except DataInvalid:  # raised on all ranks: none of these samples counts
            return None
        finally:
            before.put_back()
            buffers.put_back()
        if losses is None:
            return None
        one, other = losses.at_once, losses.in_parts
        if math.isclose(one, other, rel_tol=tolerance) or not math.isfinite(one + other):
            return None
        return (
            f"it is {one:.6g} for {losses.num_samples} samples at once, and {other:.6g} for the same samples in "
            f"{losses.num_parts} parts"
        )
