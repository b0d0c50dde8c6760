"""Agreement of the ranks' requests for one collective, as Horovod requires it."""

from collections.abc import Mapping, Sequence
from typing import Any

from dure.compat.horovod.engine.requests import Request, num_elements

_SAME_SHAPES = ("allreduce", "adasum", "broadcast", "reducescatter")
_REDUCTIONS = ("allreduce", "adasum", "reducescatter")
_ALONG_FIRST = ("allgather", "alltoall", "reducescatter")
_NOT_WITH_JOIN = {
    "allgather": "Allgather is not supported with Join: give DistributedOptimizer sparse_as_dense=True.",
    "alltoall": "Alltoall is not supported with Join.",
    "broadcast": "Broadcast is not supported with Join.",
    "reducescatter": "Reducescatter is not supported with Join.",
}


def fault_of(requests: Mapping[int, Request], *, has_joined: bool, fusion_bytes: int) -> str | None:
    """Return why ranks' requests do not fit together, or None.

    Args:
        requests: Request of each rank that has not joined.
        has_joined: Whether another rank has joined.
        fusion_bytes: Bytes of the fusion buffer.
    """
    ranks = sorted(requests)
    first = requests[ranks[0]]
    if has_joined and first.kind in _NOT_WITH_JOIN:
        return _NOT_WITH_JOIN[first.kind]
    if all(request is first or request == first for request in requests.values()):
        return _fault_alone(first, fusion_bytes)
    for rank in ranks[1:]:
        fault = _difference(first, requests[rank], (ranks[0], rank))
        if fault is not None:
            return fault
    return _fault_alone(first, fusion_bytes)


def _fault_alone(request: Request, fusion_bytes: int) -> str | None:
    if request.kind in _ALONG_FIRST and any(not shape for shape in request.shapes):
        return f"A rank asked for {request.kind} of a tensor without dimensions: give it one, with tensor.view(1)."
    if request.kind == "reducescatter" and request.prescale != 1.0 and request.num_bytes > fusion_bytes:
        return (
            f"Reducescatter with prescale_factor {request.prescale} needs a fusion buffer of {request.num_bytes} "
            "bytes: increase HOROVOD_FUSION_THRESHOLD."
        )
    return None


def _difference(one: Request, other: Request, ranks: tuple[int, int]) -> str | None:
    """Return what differs between two ranks and must not, or None."""
    kind = one.kind.upper()
    if one.kind != other.kind:
        return _differ("operations", ranks, one.kind, other.kind)
    if one.dtypes != other.dtypes:
        return _differ("data types", ranks, _shown(one.dtypes), _shown(other.dtypes))
    if one.kind in _SAME_SHAPES and one.shapes != other.shapes:
        return _differ(f"{kind} tensor shapes", ranks, _shown(one.shapes), _shown(other.shapes))
    if one.kind in _REDUCTIONS:
        factors = [(each.prescale, each.postscale) for each in (one, other)]
        if factors[0] != factors[1]:
            return _differ("prescale and/or postscale factors", ranks, *factors)
        if one.op != other.op:
            return _differ("reduction operation", ranks, one.op, other.op)
    if one.kind in ("allgather", "alltoall"):
        for mine, theirs in zip(one.shapes, other.shapes, strict=True):
            if len(mine) != len(theirs):
                return _differ(f"{kind} tensor shapes", ranks, f"{len(mine)} dimensions", f"{len(theirs)} dimensions")
            if mine[1:] != theirs[1:]:
                return _differ(f"{kind} tensor shapes after the first dimension", ranks, list(mine), list(theirs))
    if one.kind == "broadcast" and one.root != other.root:
        return _differ(f"{kind} root ranks", ranks, one.root, other.root)
    if one.is_on_cpu != other.is_on_cpu:
        devices = ["CPU" if each.is_on_cpu else "GPU" for each in (one, other)]
        return _differ(f"{kind} CPU/GPU device selection", ranks, *devices)
    if one.ranks != other.ranks:
        return _differ("process sets", ranks, list(one.ranks), list(other.ranks))
    return None


def _differ(what: str, ranks: tuple[int, int], one: Any, other: Any) -> str:
    return f"Mismatched {what}: rank {ranks[0]} has {one}, but rank {ranks[1]} has {other}."


def _shown(values: Sequence[Any]) -> str:
    texts = [str(list(value)) if isinstance(value, tuple) else str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def elements_of(request: Request) -> int:
    """Return the number of elements of all tensors of a request."""
    return sum(map(num_elements, request.shapes))
