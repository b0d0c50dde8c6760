"""Changes of plain state during training, by their causes, and the declarations that follow from them.

The loss, the schedule, hooks on the optimiser's step and evaluations may all change state of task and modules. Only
changes by the loss that no trial before training showed, and state that no checkpoint holds, are declared.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.shared_storage import recomputed_weights
from dure.strategies.state.trial import KeptBuffers
from dure.terminal import few
from dure.torchcompat.optimizers import step_hook_registries
from dure.training.objects.optimizer_watch import OptimizerWatch
from dure.training.rehearsal import is_divided_in_evaluation, kept_by_evaluation
from dure.training.session.session import Session

_WATCHED_STEPS = 2
"""Number of first steps in which the changes by hooks on the optimiser's step are observed."""


class StateChanges:
    """Changes of a session's plain state so far."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._optimizer = OptimizerWatch(session.strategy.built_optimizer)
        self._step_hooks = step_hook_registries(session.strategy.built_optimizer)
        self._follow_weights = session.aliases | recomputed_weights(session.strategy.model)
        """Paths of state that changes with the weights."""
        self._by_schedule: set[str] = set()
        """Paths of state that the schedule sets, equal on all ranks."""
        self._by_step: set[str] = set()
        """Paths of state that hooks on the optimiser's step change, equal on all ranks."""
        self._by_evaluation: set[str] = set()
        self._between_evaluations: set[str] = set()
        self._before_step: ObjectState | None = None
        """State before the step that is observed; None if none is."""
        self._num_watched = 0
        self._evaluated: ObjectState | None = None
        """State of the objects after the last evaluation."""
        self._declared: set[str] = set()
        """Paths of state in earlier declarations."""

    @property
    def has_step_hooks(self) -> bool:
        """True if the optimiser's step has hooks."""
        return any(self._step_hooks)

    def set_by_schedule(self, paths: Iterable[str]) -> None:
        """Record state that the schedule sets."""
        self._by_schedule.update(paths)

    def before_step(self) -> None:
        """Compare the optimiser's attributes, and record the state that hooks on its step may change."""
        self._optimizer.compare()
        if self._num_watched < _WATCHED_STEPS and self.has_step_hooks:
            self._num_watched += 1
            self._before_step = self._session.kept.state_now()

    def after_step(self) -> None:
        """Record what hooks on the optimiser's step changed."""
        if self._before_step is not None:
            self._by_step |= self._before_step.changed().keys()
            self._before_step = None

    def note_optimizer(self) -> None:
        """Record the optimiser's attributes after a step and all that follows it."""
        self._optimizer.note()

    @contextmanager
    def evaluation(self, *, is_undone: bool) -> Iterator[None]:
        """Record what an evaluation in the context changes.

        Args:
            is_undone: Whether to restore all state afterwards; otherwise only generators are restored.
        """
        self._note_between_evaluations()
        model = self._session.strategy.model
        before = self._objects()
        buffers = KeptBuffers(model) if is_undone else None
        yield
        self._by_evaluation |= before.changed().keys()
        if buffers is not None:
            before.put_back()
            buffers.put_back()
        self._evaluated = self._objects()
        before.put_back_generators()  # the position of evaluations must not change the training data

    def _objects(self) -> ObjectState:
        strategy = self._session.strategy
        return ObjectState({**strategy.objects, "model": strategy.model})

    def _note_between_evaluations(self) -> None:
        if self._evaluated is not None:
            self._between_evaluations |= self._evaluated.changed().keys()

    def declared_of_evaluations(self) -> list[str]:
        """Return the declaration of state that evaluations change, and the rehearsed one did not."""
        self._note_between_evaluations()
        session, traits = self._session, self._session.strategy.traits
        by_loss = {*traits.learned_state, *traits.counted_state}
        known = {*session.set_by_evaluation, *self._follow_weights, *by_loss, *traits.collate_tables}
        late = sorted(self._by_evaluation - known)
        return [kept_by_evaluation(late)] if late and is_divided_in_evaluation(session.strategy) else []

    def new_declarations(self) -> tuple[list[str], list[str]]:
        """Return declarations of state that no checkpoint holds, and of state that began to change late, once each."""
        of_data = self._changed_data()
        new = {path: why for path, why in self._session.kept.lost.items() if path not in self._declared}
        of_data_now = [path for path in of_data if path not in self._declared]
        reasons = [*new.values(), *([f"{few(of_data_now)} changed on the way"] if of_data_now else [])]
        not_kept = [f"state that no checkpoint holds: {why}; a resume begins without it" for why in reasons]
        late = [path for path in self._changed_late(of_data) if path not in self._declared]
        self._declared |= {*new, *of_data_now, *late}
        began = f"state that began to change later ({few(late)}): if by the loss, by each part of a batch"
        return not_kept, [began] if late else []

    def _changed_data(self) -> list[str]:
        """Return the paths of what has changed in the data, without those of a list that the task itself keeps."""
        if self._session.data_state is None:
            return []
        changed, data = self._session.data_state.changed(), self._session.train_loader.data
        is_kept = isinstance(data, list | dict) and self._session.kept.holds(data)
        return [path for path in changed if not (is_kept and path.startswith("data."))]

    def _changed_late(self, of_data: Sequence[str]) -> list[str]:
        """Return the state whose change no trial before training showed, if batches are computed in parts.

        Args:
            of_data: Paths of state of data sets that has changed.
        """
        strategy, traits, kept = self._session.strategy, self._session.strategy.traits, self._session.kept
        if len(strategy.parts.of(self._session.spec.global_batch_size)) == 1 or traits.reason_unknown is not None:
            return []
        by_evaluation = self._by_evaluation - self._between_evaluations  # the loss may have begun to change it too
        changed_elsewhere = (*self._follow_weights, *self._by_schedule, *self._by_step, *by_evaluation)
        has_draws = strategy.draws or traits.collate_draws
        drawn = kept.generators if has_draws else ()  # changed by draws, which are declared
        of_collate = (*traits.collate_state, *traits.collate_count, *traits.collate_tables)
        known = (*traits.learned_state, *traits.counted_state, *of_collate, *changed_elsewhere, *drawn)
        paths = kept.changed_since(known)
        # a trial found it by another path, such as that of the task's attribute that holds the optimiser
        owned = {f"optimizer.{name}": name for name in self._optimizer.changed}
        owned |= {path: path.partition(".")[2] for path in of_data}
        paths += [path for path, name in owned.items() if not any(other.endswith(f".{name}") for other in known)]
        return [path for path in paths if path.startswith("model.")] if strategy.is_loss_whole else paths
