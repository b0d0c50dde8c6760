"""Trace of a model's forward pass on a few samples: the order of its blocks, and values that bypass them.

A section can be computed elsewhere if it needs nothing from before except the output of the previous block and the
batch itself. Therefore every value that the model's own code computes between its blocks is followed from its origin to
its uses.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dure.strategies.sections.costs import BlockCost
from dure.strategies.sections.cuts import Barrier, Chain, find_blocks, tied
from dure.strategies.state.objects.tensor_places import restore_values
from dure.torchcompat.compilation import without_compilation
from dure.torchcompat.modules import module_call, replace_module_call

_READS = frozenset(
    ["item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "is_nonzero", "equal"]
)
"""Operations that convert a tensor's values to Python's, on which the following code may depend."""

_END = 10**9
"""Number of a call after all others."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Trace of one forward pass."""

    chain: Chain
    homes: Mapping[str, int]
    """Parameters and buffers in no called block, each with the call before which it is first used."""
    unused: tuple[str, ...] = ()
    """Those of them that the model's own code does not use either, such as weights of the loss; at the last call."""
    apart: tuple[Barrier, ...] = ()
    """Additional barriers if the batch, and every buffer, is on one device only."""
    outputs: tuple[Any, ...] = ()
    """Return value of every call."""
    saved_bytes: tuple[int, ...] = ()
    """Bytes that every call keeps for backward, excluding parameters."""
    operations: tuple[float, ...] = ()
    """Number of operations of every call, forward and backward, as `BlockCost` counts them."""

    def with_batch_on_first_device(self) -> Chain:
        """Return the chain for sections on separate devices, of which only the first has the batch."""
        return replace(self.chain, barriers=(*self.chain.barriers, *self.apart))


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a nested structure, in order: in containers, and in attributes of objects."""
    found: list[Tensor] = []
    seen: set[int] = set()

    def collect(item: Any) -> None:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, tuple | list):
            for inner in item:
                collect(inner)
        elif isinstance(item, Mapping):
            for inner in item.values():
                collect(inner)
        elif hasattr(item, "__dict__") and not isinstance(item, type | nn.Module) and id(item) not in seen:
            seen.add(id(item))
            for inner in vars(item).values():
                collect(inner)

    collect(value)
    return found


@contextmanager
def switched(blocks: Mapping[str, nn.Module], switch: Callable[[str, Callable[..., Any]], Any]) -> Iterator[None]:
    """Replace calls of every block by `switch(name, call)`, where `call` is the original."""
    with ExitStack() as stack:
        for name, block in blocks.items():
            stack.callback(replace_module_call(block, switch(name, module_call(block))))
        yield


@contextmanager
def kept_buffers(model: nn.Module, is_kept: Callable[[str], bool] = lambda name: True) -> Iterator[None]:
    """Restore a model's buffers (BatchNorm's statistics) afterwards, or those selected by name.

    Buffers that were registered or replaced meanwhile are kept, because other counts of the model are kept too.
    """
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers() if is_kept(name)}
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before.values():
                restore_values(buffer, value)


def survey(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Survey:
    """Trace one forward pass of a model in training.

    The model's buffers are restored; random number generators are not.

    Args:
        model: Model on the device of the arguments.
        args: Positional arguments with which the task's loss calls the model.
        kwargs: Keyword arguments of the call.
    """
    blocks = find_blocks(model)
    watch = _Watch(model, blocks, tensors_of((args, dict(kwargs))))
    with ExitStack() as stack:
        stack.enter_context(kept_buffers(model))
        stack.enter_context(switched(blocks, watch.switch))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(without_compilation())
        stack.enter_context(watch)
        watch.returned(model(*args, **kwargs))
    return watch.survey(model, blocks)


@dataclass(slots=True)
class _Origin:
    """Origin of a value: `born` calls had been made by then; None if it depends on the batch alone."""

    born: int | None
    name: str


@dataclass
class _Seen:
    calls: list[str] = field(default_factory=list)
    barriers: dict[tuple[int, int], Barrier] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    saved_bytes: list[int] = field(default_factory=list)
    operations: list[float] = field(default_factory=list)
    apart: dict[int, Barrier] = field(default_factory=dict)


class _Watch(TorchFunctionMode):
    """Tracer of values through the code between blocks; operations inside a block are ignored."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], batch: list[Tensor]) -> None:
        super().__init__()
        self._seen = _Seen()
        self._is_inside = False
        self._origins: dict[int, _Origin] = {id(tensor): _Origin(None, "the batch") for tensor in batch}
        # ids in a dictionary are valid only as long as their objects live
        self._alive: list[Tensor] = list(batch)
        self._names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
        self._parameters = {id(p) for p in model.parameters()}
        self._storages = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
        self._uses: dict[int, list[int]] = defaultdict(list)

    @property
    def _position(self) -> int:
        return len(self._seen.calls)

    def switch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a block's call, traced from outside."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return call(*args, **kwargs)
            self._use(tensors_of((args, kwargs)), f"{name} takes it")
            self._is_inside = True
            try:
                with BlockCost(self._storages) as cost:
                    result = call(*args, **kwargs)
            finally:
                self._is_inside = False
            results = tensors_of(result)
            self._seen.saved_bytes.append(cost.saved_bytes)
            self._seen.operations.append(cost.operations(results))
            self._seen.calls.append(name)
            self._seen.outputs.append(result)
            self._mark(results, _Origin(self._position, name))
            return result

        return watched

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self._is_inside:
            self._note(getattr(function, "__name__", ""), tensors_of((args, dict(kwargs or {}))), result)
        return result

    def _note(self, function: str, inputs: list[Tensor], result: Any) -> None:
        results = tensors_of(result)
        if function == "__setitem__":
            results = inputs[:1]
        origins = [origin for origin in map(self._origin, inputs) if origin is not None]
        ours = [origin for origin in origins if origin.born is not None]
        if not results:
            if function in _READS and ours:
                why = f"the model's own code reads a value of what {ours[0].name} gives ({function})"
                self._bar(self._position, _END, why)
            return
        self._use(inputs, f"{function} uses it")
        if ours:
            if any(origin.born is None and tensor.dim() for origin, tensor in self._with_origin(inputs)):
                why = f"the model's own code uses the batch together with what {ours[-1].name} gives ({function})"
                self._seen.apart[self._position] = Barrier(first=0, last=self._position, why=why)
            self._mark(results, _Origin(self._position, ours[-1].name))
        elif origins:
            self._mark(results, origins[0])

    def _with_origin(self, tensors: list[Tensor]) -> Iterator[tuple[_Origin, Tensor]]:
        for tensor in tensors:
            origin = self._origin(tensor)
            if origin is not None:
                yield origin, tensor

    def _origin(self, tensor: Tensor) -> _Origin | None:
        if id(tensor) in self._parameters:
            return _Origin(self._position, self._names[id(tensor)])
        return self._origins.get(id(tensor))

    def _use(self, tensors: list[Tensor], where: str) -> None:
        """Record that values, and parameters and buffers outside the blocks, are used before the next call."""
        for tensor in tensors:
            if id(tensor) in self._names:
                self._uses[id(tensor)].append(self._position)
            origin = self._origins.get(id(tensor))
            if origin is not None and origin.born is not None and origin.born < self._position:
                why = f"what {origin.name} gives is needed again after {self._seen.calls[-1]}, where {where}"
                self._bar(origin.born, self._position, why)

    def _bar(self, first: int, last: int, why: str) -> None:
        self._seen.barriers.setdefault((first, last), Barrier(first=first, last=last, why=why))

    def _mark(self, tensors: list[Tensor], origin: _Origin) -> None:
        for tensor in tensors:
            self._origins[id(tensor)] = origin
            self._alive.append(tensor)

    def returned(self, result: Any) -> None:
        """Record the model's output."""
        self._use(tensors_of(result), "the model returns it")

    def survey(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> Survey:
        """Return the findings."""
        seen, end = self._seen, len(self._seen.calls)
        inside: dict[int, list[int]] = defaultdict(list)
        for position, call in enumerate(seen.calls):
            for tensor in [*blocks[call].parameters(), *blocks[call].buffers()]:
                inside[id(tensor)].append(position)
        homes: dict[str, int] = {}
        barriers = [*seen.barriers.values(), *tied(model, dict(blocks), seen.calls)]
        for key, name in self._names.items():
            uses = self._uses[key]
            if key not in inside:
                homes[name] = min([*uses, end - 1])
            reach = sorted([*uses, *inside[key]]) if uses else [0]
            if key in self._parameters and reach[0] < reach[-1]:
                barriers.append(Barrier(first=reach[0], last=reach[-1], why=f"{name} is used in several places"))
            elif key not in self._parameters:
                # every rank can have a buffer, but only one of a process's devices can
                why = f"{name} is used in several places"
                seen.apart.update({use: Barrier(first=reach[0], last=use, why=why) for use in uses if use != reach[0]})
        return Survey(
            chain=Chain(model=type(model).__name__, calls=tuple(seen.calls), barriers=tuple(barriers)),
            homes=homes,
            unused=tuple(name for key, name in self._names.items() if name in homes and not self._uses[key]),
            apart=tuple(seen.apart.values()),
            outputs=tuple(seen.outputs),
            saved_bytes=tuple(seen.saved_bytes),
            operations=tuple(seen.operations),
        )
