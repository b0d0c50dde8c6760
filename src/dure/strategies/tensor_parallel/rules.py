"""Functions of torch that DTensor may compute with divided values.

DTensor has rules for many more. Some of these ignore part of the value (`histc`, and every conversion to a number),
draw different random numbers on each rank, or fail in backward. Functions that are not listed get the whole values.
"""

from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ELEMENTWISE = _names("""
    abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan
    sinh cosh tanh sigmoid relu gelu silu elu celu selu leaky_relu mish softplus softsign logsigmoid tanhshrink erf erfc
    clamp clamp_min clamp_max clip sign floor ceil round trunc isnan isinf isfinite logical_not add sub subtract mul
    multiply div divide true_divide pow maximum minimum where lerp addcmul addcdiv masked_fill eq ne lt le gt ge
    logical_and logical_or logical_xor rsub fill zero copy
""")

_BINARY = ("add", "sub", "mul", "truediv", "div", "pow", "and", "or", "xor")

_OPERATORS = frozenset(
    f"__{name}__" for operator in _BINARY for name in (operator, f"r{operator}", f"i{operator}")
) | _names("__neg__ __abs__ __invert__ __pos__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__")

_OTHERS = _names("""
    to type float double half bfloat16 type_as clone detach contiguous view reshape view_as reshape_as transpose
    swapaxes swapdims permute t flatten unflatten unsqueeze squeeze expand expand_as broadcast_to movedim moveaxis
    narrow chunk split unbind __getitem__ cat concat concatenate stack matmul mm bmm linear __matmul__
    sum mean softmax log_softmax layer_norm rms_norm zeros_like ones_like full_like empty_like new_zeros
    new_ones new_full new_empty
""")

COMPUTED = _ELEMENTWISE | {f"{name}_" for name in _ELEMENTWISE} | _OPERATORS | _OTHERS
"""Names of functions whose results with divided values equal those with the whole ones."""

UNTOUCHED = _names("""
    __get__ __set__ __delete__ __hash__ __len__ __repr__ __dir__ __deepcopy__ __reduce_ex__ size dim ndimension numel
    nelement stride storage_offset element_size is_contiguous is_floating_point is_complex is_signed is_shared is_pinned
    is_same_size get_device data_ptr untyped_storage record_stream requires_grad_ register_hook retain_grad backward
    register_post_accumulate_grad_hook grad has_names is_inference is_tensor is_storage result_type can_cast
""")
"""Names of functions that read properties that a part has in common with the whole, or that compute nothing."""

MAY_VIEW = _names("""
    to type float double half bfloat16 type_as detach contiguous view reshape view_as reshape_as transpose swapaxes
    swapdims permute t flatten unflatten unsqueeze squeeze expand expand_as broadcast_to movedim moveaxis narrow
    chunk split unbind __getitem__
""")
"""Names of those among them that may return the memory of their argument."""

_IN_PLACE = {"__setitem__"} | {f"__i{operator}__" for operator in _BINARY}

_NO_RULE = (
    *("sharding propagation", "sharding strategy", "mixed torch.tensor and dtensor", "unevenly sharded"),
    *("redistribution, which is disallowed", "placement changes are not supported"),
)
"""Phrases in DTensor's errors for operations that it does not support with divided values."""


def changes_first(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a function changes one of its arguments: the first, or `out`."""
    name = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return (
        (is_in_place and name not in UNTOUCHED)
        or name in _IN_PLACE
        or kwargs.get("out") is not None
        or kwargs.get("inplace") is True
    )


def has_no_rule(error: Exception) -> bool:
    """Return whether an error is DTensor's, for an operation that it does not support."""
    if not isinstance(error, RuntimeError | NotImplementedError):
        return False
    return any(words in str(error).lower() for words in _NO_RULE)
