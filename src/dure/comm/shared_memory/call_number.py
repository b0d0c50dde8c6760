"""Encoding of a collective call as one number, so that ranks can compare their calls by a single comparison."""

import torch

KINDS = (
    "barrier", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce", "gather", "scatter", "all_to_all",
    "sparse all_reduce",
)  # fmt: skip
REDUCTIONS = ("sum", "mean", "max", "min", "product", "band", "bor", "bxor")
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip

_NUM_BYTES_BITS, _DTYPE_BITS, _DETAIL_BITS = 40, 8, 12
_DETAILS = 1 << _DETAIL_BITS

_kinds = {kind: number for number, kind in enumerate(KINDS)}
_reductions = {op: number for number, op in enumerate(REDUCTIONS)}
_dtypes = {dtype: number for number, dtype in enumerate(DTYPES)}


def call_number(
    kind: str, num_bytes: int = 0, *, op: str = "sum", root: int = 0, dtype: torch.dtype | None = None
) -> int:
    """Return a number below 2**64 that differs between calls that do not belong together.

    Args:
        kind: One of `KINDS`.
        num_bytes: Bytes that a rank contributes; 0 if ranks may contribute different amounts.
        op: Operation of a reduction, one of `REDUCTIONS`.
        root: Rank that the others receive from or send to.
        dtype: Dtype if it matters; None if only bytes are moved.
    """
    detail = (root * len(REDUCTIONS) + _reductions[op]) % _DETAILS
    number = _kinds[kind] << _DETAIL_BITS | detail
    number = number << _DTYPE_BITS | (0 if dtype is None else _dtypes[dtype] + 1)
    return number << _NUM_BYTES_BITS | num_bytes % (1 << _NUM_BYTES_BITS)


def describe(number: int) -> str:
    """Return the call of a `call_number` as text: `all_reduce(max) of 400 bytes float32`."""
    num_bytes = number & (1 << _NUM_BYTES_BITS) - 1
    number >>= _NUM_BYTES_BITS
    dtype = number & (1 << _DTYPE_BITS) - 1
    number >>= _DTYPE_BITS
    detail, kind = number % _DETAILS, KINDS[number >> _DETAIL_BITS]
    if kind in ("barrier", "all_to_all"):
        return kind
    root, op = divmod(detail, len(REDUCTIONS))
    if "reduce" in kind:
        kind = f"{kind}({REDUCTIONS[op]})"
    if kind.startswith(("reduce(", "gather")):
        kind = f"{kind} to rank {root}"
    elif kind in ("broadcast", "scatter"):
        kind = f"{kind} from rank {root}"
    what = f" {str(DTYPES[dtype - 1]).removeprefix('torch.')}" if dtype else ""
    return f"{kind} of {num_bytes} bytes{what}"
