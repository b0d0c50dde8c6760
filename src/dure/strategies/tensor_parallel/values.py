"""Values that are divided over a tensor group between layers, and the operations on them.

A value between a `column` layer and the `row` layer that ends the region is a DTensor. The model's own code runs on it
with its usual shapes, and DTensor knows the part of each rank. DTensor has rules for most operations, and some are
wrong without an error. So it gets those that are known to be right, and all others are computed with the whole values.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dure.errors import TaskInvalid
from dure.strategies.contract.batches import map_tensors
from dure.strategies.state.tensor_shard import version_of
from dure.strategies.tensor_parallel.boundary import (
    check_is_gathered,
    from_local,
    gathered,
    has_copies,
    is_copy,
    is_shard,
    mark_as_copy,
    redistributed,
    storage_of,
    to_local,
)
from dure.strategies.tensor_parallel.fused import OF_GRADIENT, is_fused, may_be_asked, on_fused, whole_of_fused
from dure.strategies.tensor_parallel.plan import OPTION
from dure.strategies.tensor_parallel.rules import COMPUTED, MAY_VIEW, UNTOUCHED, changes_first, has_no_rule
from dure.torchcompat.gradients import Arguments
from dure.torchcompat.modes import is_below_autograd, is_operator, schemas_of
from dure.torchcompat.tensors import local_tensor


def undivided(values: Any) -> Any:
    """Return a nested structure with every DTensor as a whole plain tensor.

    Communication: an all_gather or all_reduce for each that is not whole.
    """
    return map_tensors(values, _undivided)


def _undivided(value: Tensor) -> Any:
    if not isinstance(value, DTensor) or is_shard(value):
        return value
    return mark_as_copy(whole_of_fused(value) if is_fused(value) else gathered(value), value)


def _check_is_own(value: Any, name: str) -> None:
    """Refuse an in-place change that on one device would also change a value from which, or of which, a view was taken.

    Raises:
        TaskInvalid: The ranks have copies.
    """
    if has_copies(value):
        raise TaskInvalid(
            f"the model changes a value that is divided over the ranks in place ({name}) and keeps a part of it from "
            "before, of which they have copies: take the part after the change, make a new value, or make the layers "
            f"before it gathered with {OPTION}"
        )
    if is_copy(value):
        raise TaskInvalid(
            f"the model changes part of a value that is divided over the ranks in place ({name}), of which they have "
            "copies: change the whole value or make a new one, or make the layers before it gathered "
            f"with {OPTION}"
        )


class DividedValues(TorchFunctionMode):
    """Mode that decides how each call of torch with a DTensor among its arguments is computed.

    Attention heads are independent, so ranks compute only their own. Random numbers are drawn for the whole value on
    every rank: the draws of a tensor group stay one stream, as on one device. A number that leaves torch is that of the
    whole. A plain parameter that is combined with a divided value gets its gradient from all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.have_own_draws = False
        """True once each rank drew random numbers for its own heads (dropout inside attention)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle one call."""
        kwargs = kwargs or {}
        if func is Tensor.backward:
            with self:  # torch has left the mode, and checkpoints and hooks would compute by other rules
                return _backward(*args, **kwargs)
        if func is torch.autograd.grad and has_origins(args[1]):
            with self:
                return _gradients(*args, **kwargs)
        divided = _first_divided((args, kwargs))
        name = getattr(func, "__name__", "")
        is_change = changes_first(func, kwargs)
        if is_change:
            changed = kwargs.get("out", args[0] if args else None)
            for each in changed if isinstance(changed, tuple | list) else (changed,):
                _check_is_own(each, name)
        if divided is None or (is_operator(func) and is_below_autograd()):
            return func(*args, **kwargs)
        if (shard := _first((args, kwargs), is_shard)) is not None:
            if _first((args, kwargs), _is_no_shard) is not None:
                check_is_gathered(shard, name)
            return func(*args, **kwargs)
        if is_operator(func):
            return _of_operator(func, *args, **kwargs)
        if is_fused(args[0] if args else None) and not may_be_asked(func):
            if is_change:
                raise TaskInvalid(
                    f"the model changes queries, keys and values of one layer in place ({name}), which is not done to "
                    f"their parts: change a copy of them, or make the layer gathered with {OPTION}"
                )
            if func in OF_GRADIENT:
                raise TaskInvalid(
                    f"the model asks for the gradient of queries, keys and values of one layer together ({name}), "
                    "whose parts are in another order: ask for that of each, or make the layer gathered "
                    f"with {OPTION}"
                )
            return on_fused(func, *args, **kwargs)
        if name == "__get__" and getattr(func, "__self__", None) is Tensor._version:
            return _version(func, *args)
        if func is Tensor.data_ptr:
            return func(local_tensor(args[0]))
        if name == "__set__" and not isinstance(args[0], DTensor):
            # a plain tensor that is given the memory of a DTensor, which has none, crashes the process
            return _on_whole(func, *args)
        if name in UNTOUCHED:
            return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None:
            if handler is _attention and _drops(*args, **kwargs):
                self.have_own_draws = True
            return handler(func, *args, **kwargs)
        if is_change:
            return _in_place(func, args, kwargs, divided.device_mesh)
        if name not in COMPUTED or (name == "__getitem__" and _has_tensor(args[1])):
            return _on_whole(func, *args, **kwargs)
        found = _as_divided(func, args, kwargs, divided.device_mesh)
        if name in MAY_VIEW:
            _mark_copies(found, func, args, kwargs)
        return found


def _backward(
    value: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    torch.autograd.backward(value, gradient, retain_graph, create_graph, inputs=inputs)


_ORIGIN = "divided_parameter"
"""Attribute of a whole parameter that an autograd function got: the parameter."""


def has_origins(tensors: Iterable[Any]) -> bool:
    """Return whether there are whole parameters among tensors that an autograd function got."""
    return any(hasattr(each, _ORIGIN) for each in tensors)


def _whole_for_function(value: Tensor) -> Any:
    whole = _undivided(value)
    if whole is not value and value.is_leaf:
        setattr(whole, _ORIGIN, value)
    return whole


def _gradients(
    outputs: Any,
    inputs: Sequence[Tensor],
    *,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of tensors; to those of whole parameters are added those of the divided ones.

    The backward of a checkpoint of one's own, or of an adjoint method, runs layers again, which use the divided ones,
    and asks for the gradients of the parameters that the function got.

    Communication: an all_gather for each such gradient.
    """
    origins = [vars(each).pop(_ORIGIN, None) for each in inputs]  # the call below is none to handle
    try:
        divided = [origin for origin in origins if origin is not None]
        found = torch.autograd.grad(outputs, [*inputs, *divided], allow_unused=True, **options)
    finally:
        for each, origin in zip(inputs, origins, strict=True):
            if origin is not None:
                setattr(each, _ORIGIN, origin)
    of_divided = iter(found[len(inputs) :])
    gradients = []
    for own, origin in zip(found, origins, strict=False):
        other = None if origin is None else next(of_divided)
        if other is not None:
            other = gathered(other)
        gradients.append(own if other is None else other if own is None else own + other)
    if materialize_grads:
        return tuple(torch.zeros_like(i) if g is None else g for i, g in zip(inputs, gradients, strict=True))
    if not allow_unused and any(gradient is None for gradient in gradients):
        raise RuntimeError("a tensor of which the gradient is asked has not been used: set allow_unused=True")
    return tuple(gradients)


def whole_arguments(function: type, arguments: Arguments) -> Arguments:
    """Return the arguments of an autograd function with whole values.

    With a divided value, the gradient that one computes of a plain parameter would be a DTensor.
    """
    if _first_divided(arguments) is None:
        return arguments
    found: Arguments = map_tensors(arguments, _whole_for_function)
    return found


def _mark_copies(found: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Mark results that are copies made by DTensor, but views on one device."""
    given = args[0] if args else kwargs["input"]
    for one in found if isinstance(found, tuple | list) else (found,):
        if one.dtype == given.dtype and storage_of(one) is not storage_of(given):
            if func.__name__ in _VIEWS_IF_POSSIBLE and not _is_view(func, given, args[1:], kwargs):
                return
            mark_as_copy(one, given)


_VIEWS_IF_POSSIBLE = frozenset(("contiguous", "flatten", "reshape"))


def _is_view(func: Any, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function returns a view on one device, where the value has the strides that DTensor reports."""
    like = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
    named = {name: value for name, value in kwargs.items() if name != "input"}
    return func(like, *args, **named).untyped_storage() is like.untyped_storage()


def _version(get: Any, value: Any, *owner: Any) -> int:
    """Return the number of in-place changes: of the whole, and of the part by itself, as by the optimiser."""
    own: int = get(value, *owner)
    return own + version_of(local_tensor(value))


def _first_divided(values: Any) -> Any:
    return _first(values, lambda value: isinstance(value, DTensor))


def _first(values: Any, is_wanted: Callable[[Any], bool]) -> Any:
    """Return the first wanted one among arguments, including those in lists and tuples; None if there is none."""
    for value in values.values() if isinstance(values, dict) else values:
        if is_wanted(value):
            return value
        if isinstance(value, tuple | list | dict) and (found := _first(value, is_wanted)) is not None:
            return found
    return None


def _is_no_shard(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_shard(value)


def _has_tensor(index: Any) -> bool:
    return any(isinstance(one, Tensor | list) for one in (index if isinstance(index, tuple) else (index,)))


def _as_divided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh) -> Any:
    """Call a function with divided values or, if DTensor has no rule for it, with the whole ones."""
    given, named = _with_gradients((args, kwargs), mesh)
    try:
        return func(*given, **named)
    except Exception as error:
        if not has_no_rule(error):
            raise
    return _on_whole(func, *args, **kwargs)


def _with_gradients(values: Any, mesh: DeviceMesh) -> Any:
    """Return arguments converted for DTensor, each with a gradient that flows back to its origin."""
    if not _has_others(values):
        return values

    def one(value: Tensor) -> Any:
        if isinstance(value, DTensor):
            return whole_of_fused(value) if is_fused(value) else value
        return from_local(value, mesh, Replicate()) if _is_followed(value) else value

    return map_tensors(values, one)


def _has_others(values: Any) -> bool:
    """Return whether there are tensors among arguments that DTensor would misinterpret."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, DTensor):
            if is_fused(value):
                return True
        elif isinstance(value, Tensor):
            if _is_followed(value):
                return True
        elif isinstance(value, tuple | list | dict) and _has_others(value):
            return True
    return False


def _is_followed(value: Tensor) -> bool:
    # DTensor takes a plain tensor for a replicated one, and loses its gradient
    return value.requires_grad and torch.is_grad_enabled()


def _on_whole(func: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = undivided((args, kwargs))
    return func(*args, **kwargs)


def _of_operator(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call one of `torch.ops`, which is below the rules for functions, with whole values.

    Raises:
        TaskInvalid: It changes an argument, of which the ranks would have copies.
    """
    if kwargs.get("out") is not None or all(schema.is_mutable for schema in schemas_of(func)):
        raise TaskInvalid(
            f"the model calls {func}, which changes an argument in place, with a value that is divided over the ranks: "
            f"use the function of torch that does the same, or make the layers before it gathered with {OPTION}"
        )
    return _on_whole(func, *args, **kwargs)


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh) -> Any:
    """Change the first argument or `out`: a plain one by whole values, a divided one by its parts or a changed copy."""
    first = args[0] if args else None
    if (out := kwargs.get("out")) is not None:
        with _changed_copies(out if isinstance(out, tuple | list) else [out]) as changed:
            given = changed if isinstance(out, tuple | list) else changed[0]
            _on_whole(func, *args, **{**kwargs, "out": given})
        return out
    if isinstance(first, tuple | list):
        with _changed_copies(first) as changed:
            return _on_whole(func, changed, *args[1:], **kwargs)
    if not isinstance(first, DTensor):
        return _on_whole(func, *args, **kwargs)
    # what is not linear would change every summand, as if each were the sum
    if func.__name__ in COMPUTED and not isinstance(first.placements[0], Partial):
        given, named = _with_gradients((args, kwargs), mesh)
        try:
            return func(*given, **named)
        except Exception as error:
            if not has_no_rule(error):
                raise
    whole, *others = undivided(args)
    changed = whole.clone()
    func(changed, *others, **undivided(kwargs))
    return _set_to(first, changed)


@contextmanager
def _changed_copies(tensors: Sequence[Any]) -> Iterator[list[Tensor]]:
    """Yield tensors to change, whole copies of the divided ones, which are set to these afterwards."""
    changed = [undivided(each).clone() if isinstance(each, DTensor) else each for each in tensors]
    yield changed
    for each, whole in zip(tensors, changed, strict=True):
        if isinstance(each, DTensor):
            _set_to(each, whole)


def _set_to(divided: Any, whole: Tensor) -> Any:
    """Change a divided value to a whole one."""
    return divided.copy_(redistributed(from_local(whole, divided.device_mesh, Replicate()), divided.placements[0]))


def _cat(func: Any, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    # torch ignores empty vectors, with which caches begin; DTensor does not
    kept = [tensor for tensor in tensors if tensor.shape != (0,)]
    return _as_divided(func, (kept, *args), kwargs, _first_divided(kept).device_mesh)


def _draw_in_place(func: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Fill a divided value with the random numbers that one device would draw."""
    whole = func(torch.empty(value.shape, dtype=value.dtype, device=value.device), *args, **kwargs)
    return _set_to(value, whole)


def _dropout(func: Any, value: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or p == 0:
        return value
    if isinstance(value.placements[0], Partial):
        if inplace:
            return _in_place(func, (value, p, training, True), {}, value.device_mesh)
        value = redistributed(value, Replicate())
    factors = functional.dropout(torch.ones(value.shape, dtype=value.dtype, device=value.device), p)
    divided = distribute_tensor(factors, value.device_mesh, value.placements, src_data_rank=None)
    return value.mul_(divided) if inplace else value * divided


def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    if input.dim() == 1:
        return _on_whole(func, input, weight, bias)  # as in a product with a vector on the left
    return _as_divided(func, (input, weight, bias), {}, _first_divided((input, weight, bias)).device_mesh)


def _matmul(func: Any, input: Any, other: Any) -> Any:
    if input.dim() == 1:  # torch makes it a row, and removes that in place, which DTensor's shape does not follow
        return _on_whole(func, input, other)
    if not _are_divided_alike([input, other]):
        return _as_divided(func, (input, other), {}, _first_divided((input, other)).device_mesh)
    return _like(func(to_local(input), to_local(other)), input)


def _attention(func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not _are_divided_alike([query, key, value]):
        # as on one device; DTensor has no rule for it on the CPU
        return func(*undivided((query, key, value, attn_mask)), *args, **kwargs)
    (placement,) = query.placements
    mask = _part_of_mask(attn_mask, query, query.dim() - placement.dim)
    return _like(func(*map(to_local, (query, key, value)), mask, *args, **kwargs), query)


def _drops(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any) -> bool:
    """Return whether attention over divided heads would draw random numbers."""
    return dropout_p > 0 and _are_divided_alike([query, key, value])


def _are_divided_alike(values: Sequence[Any]) -> bool:
    """Return whether all are divided evenly in the same dimension, and it is not one of the last two."""
    first = values[0]
    if not all(isinstance(value, DTensor) and not is_fused(value) for value in values):
        return False
    (placement,) = first.placements
    return (
        isinstance(placement, Shard)
        and all(value.placements == first.placements for value in values)
        and all(value.dim() == first.dim() and placement.dim < value.dim() - 2 for value in values)
        and all(value.size(placement.dim) % value.device_mesh.size() == 0 for value in values)
    )


def _part_of_mask(mask: Any, query: Any, from_end: int) -> Any:
    """Return a mask's part for this rank's heads; each rank adds to the gradient of a mask common to all heads."""
    if mask is None:
        return None
    whole = mask if isinstance(mask, DTensor) else from_local(mask, query.device_mesh, Replicate())
    if mask.dim() < from_end or mask.size(mask.dim() - from_end) == 1:
        return to_local(redistributed(whole, Replicate()), gradient=Partial())
    return to_local(redistributed(whole, Shard(mask.dim() - from_end)))


def _like(local: Tensor, value: Any) -> Tensor:
    divided: Tensor = from_local(local, value.device_mesh, value.placements[0])
    return divided


_DRAWING_IN_PLACE = (
    *(Tensor.bernoulli_, Tensor.cauchy_, Tensor.exponential_, Tensor.geometric_, Tensor.log_normal_),
    *(Tensor.normal_, Tensor.random_, Tensor.uniform_),
)

_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_DRAWING_IN_PLACE, _draw_in_place),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _cat),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    functional.dropout: _dropout,
    functional.linear: _linear,
    functional.scaled_dot_product_attention: _attention,
}
