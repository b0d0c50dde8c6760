"""Quick test whether a session's state still has the same tensors in the same memory, and the same plain values.

Building the state of a checkpoint takes microseconds for each tensor and each module. Comparing the objects that it is
built from takes a tenth of that. A snapshot is therefore built again only after one of them has changed.
"""

from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dure.torchcompat.modules import MODULE_CONTENTS, has_plain_state
from dure.torchcompat.optimizers import has_plain_optimizer_state
from dure.torchcompat.tensors import local_tensor

_IMMUTABLE = {int, float, bool, str, type(None)}
"""Types for which the same object always has the same value."""
_VALUES = dict.values
_PARAMETERS = itemgetter("params")
_NON_PERSISTENT = attrgetter("_non_persistent_buffers_set")
_KIND = attrgetter("shape", "dtype")


class StateWatch:
    """Objects from which a state was built, for comparison with the current ones."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        """Record a state that is being built.

        Args:
            model: Model whose `state_dict` is taken.
            optimizer: Optimiser whose `state` is taken.
            groups: Parameter groups that are taken. Their plain values are not compared, nor are those in the
                optimiser's state.
        """
        self._modules = list(model.modules())
        self._optimizer = optimizer
        self._non_persistent = [set(names) for names in map(_NON_PERSISTENT, self._modules)]
        self.is_plain = (
            has_plain_optimizer_state(optimizer)
            and all(map(has_plain_state, self._modules))
            and all(isinstance(key, Tensor) for key in optimizer.state)
            and not {*map(type, optimizer.state.values())} - {dict}
            and all(isinstance(v, Tensor) or type(v) in _IMMUTABLE for v in _leaves(optimizer))
        )
        """True if every change replaces an object. If not, no state counts as the same."""
        if self.is_plain:
            self._names, self._objects = self._look(groups)
            leaves = _leaves(optimizer)
            begin = len(self._objects) - len(optimizer.state) - sum(map(len, map(_PARAMETERS, groups))) - len(leaves)
            self._plain = {n for n, leaf in enumerate(leaves, begin) if not isinstance(leaf, Tensor)}
            """Positions of plain values in the optimiser's state."""
            tensors = {id(value): value for value in self._objects if isinstance(value, Tensor)}
            self._divided = [tensor for tensor in tensors.values() if local_tensor(tensor) is not tensor]
            self._locals = [*map(local_tensor, self._divided)]
            self._tensors = [*map(local_tensor, tensors.values())]
            self._memory = self._look_at_memory()

    def is_same(self, groups: list[dict[str, Any]]) -> bool:
        """Return whether the state would be built from the same tensors, and plain values of the same names."""
        if not self.is_plain or {*map(type, self._optimizer.state.values())} - {dict}:
            return False
        names, objects = self._look(groups)
        return (
            names == self._names
            and len(objects) == len(self._objects)
            and (all(map(is_, objects, self._objects)) or self._is_same_but_for_plain(objects))
            and all(map(is_, map(local_tensor, self._divided), self._locals))
            and [*map(_NON_PERSISTENT, self._modules)] == self._non_persistent
            and self._look_at_memory() == self._memory
        )

    def _is_same_but_for_plain(self, objects: list[Any]) -> bool:
        others = [n for n, (now, before) in enumerate(zip(objects, self._objects, strict=True)) if now is not before]
        if not self._plain.issuperset(others) or any(type(objects[number]) not in _IMMUTABLE for number in others):
            return False
        self._objects = objects
        return True

    def _look(self, groups: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        state = self._optimizer.state
        dicts = [*chain.from_iterable(map(MODULE_CONTENTS, self._modules)), *state.values()]
        names = [*chain.from_iterable(dicts), *map(tuple, groups)]
        values = chain.from_iterable(map(_VALUES, dicts))
        return names, [*values, *state, *chain.from_iterable(map(_PARAMETERS, groups))]

    def _look_at_memory(self) -> list[Any]:
        tensors = self._tensors
        return [*map(Tensor.data_ptr, tensors), *map(_KIND, tensors), *map(Tensor.stride, tensors)]


def _leaves(optimizer: Optimizer) -> list[Any]:
    return [*chain.from_iterable(map(_VALUES, optimizer.state.values()))]
