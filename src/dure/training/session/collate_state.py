"""State of the task that `collate` changes, such as a vocabulary that grows with the samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from dure.strategies.state.trial import is_same_value, state_of
from dure.training.task.digests import digest


@dataclass(frozen=True)
class CollateChanges:
    """State that `collate` changes, and on which its batches depend, by path."""

    learned: tuple[str, ...] = ()
    """State that depends on the samples."""
    counted: tuple[str, ...] = ()
    """State that every call changes in the same way."""
    tables: tuple[str, ...] = ()
    """State that changes no batch, such as a table that is made when it is first needed."""


class CollateState:
    """Objects whose state `collate` may change."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self._objects = objects
        self.has_drawn = False
        """True once `collate` has drawn from generators of the task's own, in a context of `undone`."""
        self.left: tuple[str, ...] = ()
        """Iterators among the objects because of which changes by `collate` were not undone."""

    @contextmanager
    def undone(self) -> Iterator[Callable[[], dict[str, Any]]]:
        """Undo what `collate` changes within the context; the value returns the changes so far.

        With an iterator among the objects, whose position cannot be set back, nothing is undone: objects that it has
        numbered would get other numbers next time.
        """
        state = state_of(self._objects, sees_data=False)
        try:
            yield state.changed
        finally:
            self.has_drawn = self.has_drawn or bool(state.drawn())
            if not state.opaque:
                state.put_back()
            elif state.changed():
                self.left = tuple(state.opaque)

    def changes(self, collated: Callable[[Sequence[int]], Any], groups: Sequence[Sequence[int]]) -> CollateChanges:
        """Call `collate` on two groups of samples, and return what it changes.

        Errors are not raised, because training will raise them.

        Args:
            collated: Returns the batch of some samples.
            groups: Indices of the samples of each group.
        """
        with suppress(Exception):
            one, other = groups
            first, changed = self._batch(collated, [one])
            of_other = self._batch(collated, [other])[1]
            paths = dict.fromkeys((*changed, *of_other))
            if not paths or self._batch(collated, [one])[0] != first:
                return CollateChanges()  # what it draws from global generators, say, is declared as that
            if first == self._batch(collated, [other, one])[0]:
                return CollateChanges(tables=tuple(paths))
            same = [path for path in paths if path in changed and path in of_other]
            counted = tuple(path for path in same if is_same_value(changed[path], of_other[path]))
            return CollateChanges(tuple(path for path in paths if path not in counted), counted)
        return CollateChanges()

    def _batch(
        self, collated: Callable[[Sequence[int]], Any], groups: Sequence[Sequence[int]]
    ) -> tuple[str | None, dict[str, Any]]:
        """Return the digest of the last group's batch, after those of all groups, and what they change."""
        with self.undone() as changed:
            for indices in groups:
                batch = collated(indices)
            return digest(batch), changed()
