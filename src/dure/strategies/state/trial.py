"""Trial: runs code of the model or the task in order to observe it, and undoes all effects."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dure.data.randomness import GeneratorStates, kept_global_randomness, seed_draws
from dure.strategies.state.data_tensors import KeptDataSets, tensors_of
from dure.strategies.state.hooks import gradient_hooks
from dure.strategies.state.kept_modules import KeptModules
from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.objects.state_places import comparable
from dure.strategies.state.objects.surroundings import Surroundings
from dure.strategies.state.objects.tensor_places import restore_values
from dure.strategies.state.shared_storage import overlap
from dure.torchcompat.compilation import without_compilation
from dure.torchcompat.modes import EagerDispatchMode
from dure.torchcompat.optimizers import kept_global_hooks
from dure.torchcompat.tensors import give_data

_MOST_COPIED_BYTES = 2**20
"""Maximum bytes of tensors that are copied for a trial whose writes need not be recorded."""


class Trial:
    """Context that restores a model, the objects that a loss uses, all generators, files and the environment.

    Afterwards its fields contain the changes that the code inside it had made.
    """

    def __init__(
        self,
        model: nn.Module,
        objects: Mapping[str, object] | None = None,
        *,
        seed: int | None = None,
        watches_writes: bool | None = True,
        copies_parameters: bool = False,
        keeps_gradients: bool = True,
        keeps_caches: bool = False,
    ) -> None:
        """Prepare the trial.

        Args:
            model: Model whose parameters, buffers, modes, gradients and plain attributes are restored.
            objects: Further objects by name, such as the task.
            seed: Seed of the global generators inside; None leaves them unchanged.
            watches_writes: Whether writes to parameters are recorded operation by operation, which takes a
                callback into Python for each; otherwise copies of all parameters are kept. None for copies if they are
                small.
            copies_parameters: Whether copies of parameters are kept in any case, because the code may write to their
                memory by other means than torch's operations, as an optimiser in C++ or NumPy does.
            keeps_gradients: Whether copies of gradients are kept, because the code may call backward.
            keeps_caches: Whether caches of functions stay as the code has filled them.
        """
        self._model = model
        self._seed = seed
        self._watches_writes = watches_writes
        self._copies_parameters = copies_parameters
        self._keeps_gradients = keeps_gradients
        self._keeps_caches = keeps_caches
        self._objects = objects or {}
        self.has_drawn = False
        self.buffers: dict[str, Tensor] = {}
        """Changed buffers, with their values at the end of the trial."""
        self.parameters: dict[str, Tensor] = {}
        """Parameters that were written to, with their values at the end of the trial."""
        self.rebound: list[str] = []
        """Names of parameters to which other memory was assigned (`p.data = ...`)."""
        self.state: dict[str, Any] = {}
        """Changed plain state, by its path; the values serve only for comparison with those of another trial."""
        self.left: list[str] = []
        """Paths of changed state that could not be restored."""
        self.outer: list[str] = []
        """Files and environment variables that were written."""
        self.filled: list[str] = []
        """Paths of functions whose caches have grown."""
        self.hooked: list[str] = []
        """Names of parameters and modules on which hooks were registered that receive gradients."""

    def __enter__(self) -> "Trial":
        """Record the state."""
        with ExitStack() as stack:  # closes it if anything fails here
            self._begin(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Record the changes, and undo them."""
        try:
            with torch.no_grad():
                self._record_changes()
        finally:
            self._stack.close()
            with torch.no_grad():
                self._put_back()

    def _begin(self, stack: ExitStack) -> None:
        model = self._model
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        stack.enter_context(kept_global_randomness(self._device))
        stack.enter_context(kept_global_hooks())
        stack.enter_context(without_compilation())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        if self._seed is not None:
            seed_draws(self._device, self._seed, 0)
        self._generators = GeneratorStates.now(self._device)
        self._modules = KeptModules(model, self._objects)
        self._buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
        self._num_hooks = gradient_hooks(model)
        self._parameters = [(name, p, p.data, p.requires_grad, p.grad) for name, p in model.named_parameters()]
        # copies, because gradients are accumulated in place
        self._gradients = [
            grad.clone() if grad is not None and self._keeps_gradients else None for *_, grad in self._parameters
        ]
        self._training = [(module, module.training) for module in model.modules()]
        self._plain = state_of({**self._objects, "model": model}, sees_data=True)
        self._of_data_sets = self._of_data()
        self._large = {path: tensor.detach() for path, tensor in {**self._plain.large, **self._of_data_sets}.items()}
        self._data_sets = _data_sets_of(self._plain)
        self._surroundings = Surroundings()
        stack.enter_context(self._surroundings.watched())
        parameters = {name: data for name, _, data, _, _ in self._parameters}
        self._writes = Writes(self._large if self._copies_parameters else {**parameters, **self._large})
        if self._watches_writes is None:  # copies take less time than a callback for every operation
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._writes.tensors.values())
            self._watches_writes = num_bytes > _MOST_COPIED_BYTES
        if self._watches_writes:
            stack.enter_context(self._writes)
        else:
            self._writes.before = {name: data.clone() for name, data in self._writes.tensors.items()}
        if self._copies_parameters:
            self._writes.before |= {name: data.clone() for name, data in parameters.items()}

    def _record_changes(self) -> None:
        self.has_drawn = not GeneratorStates.now(self._device).is_same_as(self._generators) or bool(self._plain.drawn())
        self.state = {**self._plain.changed(), **self._changed_data()}
        self.outer, self.filled = self._surroundings.written(), self._plain.filled()
        hooks = gradient_hooks(self._model).items()
        self.hooked = [name for name, number in hooks if number > self._num_hooks.get(name, 0)]
        self.rebound = [name for name, p, data, *_ in self._parameters if p.data_ptr() != data.data_ptr()]
        self.parameters = {
            name: p.detach().clone()
            for name, p, data, *_ in self._parameters
            if name in self.rebound or self._was_written(name, data)
        }
        now = dict(self._model.named_buffers())
        self.buffers = {
            name: now[name].clone()
            for name, (buffer, before) in self._buffers.items()
            if name in now and (now[name] is not buffer or not is_equal(buffer, before))
        }

    def _of_data(self) -> dict[str, Tensor]:
        """Return the tensors of data sets that the objects hold, by path."""
        held = [(path, item) for path, item in self._plain.first.items() if isinstance(item, Dataset)]
        return dict(itertools.chain.from_iterable(tensors_of(path, data).items() for path, data in held))

    def _changed_data(self) -> dict[str, Any]:
        """Return what data sets that the objects hold have otherwise now, by path, for a comparison."""
        tensors = {
            path: comparable(self._large[path])
            for path, before in self._writes.before.items()
            if path in self._of_data_sets and not is_equal(self._large[path], before)
        }
        return {**tensors, **self._data_sets.changed()}

    def _was_written(self, name: str, data: Tensor) -> bool:
        before = self._writes.before.get(name)
        is_watched = self._watches_writes and not self._copies_parameters
        return before is not None and (is_watched or not is_equal(data, before))

    def _put_back(self) -> None:
        self._modules.put_back()
        self._data_sets.put_back()
        for buffer, before in self._buffers.values():
            if not is_equal(buffer, before):
                restore_values(buffer, before)
        for (name, parameter, data, requires_grad, grad), values in zip(self._parameters, self._gradients, strict=True):
            give_data(parameter, data)
            if name in self._writes.before:
                parameter.data.copy_(self._writes.before[name])
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad if grad is None or values is None else grad.copy_(values)
        for module, training in self._training:
            module.training = training
        restored = {path: before for path, before in self._writes.before.items() if path in self._large}
        for path, before in restored.items():
            # those not written to may be in read-only memory, or would count as changed by a write
            if not is_equal(self._large[path], before):
                restore_values(self._large[path], before)
        self.left = [path for path in self._plain.put_back(keeps_derived=self._keeps_caches) if path not in restored]
        self.left += self._surroundings.put_back()  # after the state, which may include open files


_shared: dict[bool, ObjectState] | None = None
"""Last state in `sharing_state`, by whether it sees data; None outside of it."""
_shared_data: KeptDataSets | None = None
"""Last record of data sets in `sharing_state`."""


@contextmanager
def sharing_state() -> Iterator[None]:
    """Let trials and watches of the same objects share one record of their state as long as it is valid.

    Walking over all objects takes longer than checking that none has changed.
    """
    global _shared, _shared_data
    outer, _shared = _shared, {}
    try:
        yield
    finally:
        _shared, _shared_data = outer, None


def state_of(roots: Mapping[str, object], *, sees_data: bool) -> ObjectState:
    """Return the state of some objects, the last one in `sharing_state` if it is still valid."""
    if _shared and (last := _shared.get(sees_data)) is not None and last.is_state_of(roots):
        return last
    state = ObjectState(roots, sees_data=sees_data)
    if _shared is not None:
        _shared[sees_data] = state
    return state


def _data_sets_of(state: ObjectState) -> KeptDataSets:
    """Return a record of the data sets of a state, the last one in `sharing_state` if it is still true.

    Copying the contents takes longer than comparing them.
    """
    global _shared_data
    if _shared_data is not None and _shared_data.is_record_of(state.first):
        return _shared_data
    found = KeptDataSets(state.first)
    if _shared is not None:
        _shared_data = found
    return found


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same kind and values; NaN equals NaN."""
    if one.is_nested or other.is_nested:  # the ragged size of one is never equal to that of another
        if not (one.is_nested and other.is_nested):
            return False
        rows, others = one.unbind(), other.unbind()
        return len(rows) == len(others) and all(map(is_equal, rows, others))
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout != torch.strided:
        return is_equal(one.to_dense(), other.to_dense())
    return bool(((one == other) | ((one != one) & (other != other))).all())


def is_same_value(one: Any, other: Any) -> bool:
    """Return whether two values of buffers or plain state are the same; what cannot be compared is not."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return is_equal(one, other)
    with suppress(Exception):
        return bool(one == other)
    return False


class KeptBuffers:
    """Current buffers of a model, and their values: code may write to a buffer, or put another one in its place."""

    def __init__(self, model: nn.Module, is_kept: Callable[[str], bool] = lambda name: True) -> None:
        """Record the buffers, or those selected by name."""
        self._model = model
        self._is_kept = is_kept
        self._registers = [(path, module, module._buffers.copy()) for path, module in model.named_modules()]
        self._values = {name: (buffer, buffer.clone()) for name, buffer in self.now().items()}

    def now(self) -> dict[str, Tensor]:
        """Return the buffers that the model has now."""
        return {name: buffer for name, buffer in self._model.named_buffers() if self._is_kept(name)}

    def changed(self) -> list[str]:
        """Return the names of the buffers that have other values now, are new or are gone."""
        now = self.now()
        other = [name for name, (_, value) in self._values.items() if name not in now or not is_equal(now[name], value)]
        return [*other, *(name for name in now if name not in self._values)]

    def put_back(self) -> None:
        """Restore the same buffers with their values."""
        for path, module, before in self._registers:
            for leaf in [*module._buffers, *before]:
                if not self._is_kept(f"{path}.{leaf}" if path else leaf):
                    continue
                if leaf in before:
                    module._buffers[leaf] = before[leaf]
                else:
                    module._buffers.pop(leaf, None)
        with torch.no_grad():
            for buffer, value in self._values.values():
                # writing to a buffer that a graph has saved would be an error in backward
                if not is_equal(buffer, value):
                    restore_values(buffer, value)


class Writes(EagerDispatchMode):
    """Values of tensors before an operation first wrote to them, even through `.data`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: dict[int, list[str]] = {}
        """Names of the tensors in each storage, by its address: several may share one, as in a flat buffer."""
        for name, tensor in tensors.items():
            if tensor.numel():
                self._names.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
        self.tensors = tensors
        self.before: dict[str, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            for written in _written(func, args, kwargs or {}):
                self._keep(written)
        return func(*args, **(kwargs or {}))

    def _keep(self, tensor: Tensor) -> None:
        for name in self._names.get(tensor.untyped_storage().data_ptr(), ()):
            if name not in self.before and overlap(tensor, self.tensors[name]):
                self.before[name] = self.tensors[name].detach().clone()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to, by its schema."""
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, list | tuple) else [value]
    return [value for value in found if isinstance(value, Tensor) and not value.is_sparse]
