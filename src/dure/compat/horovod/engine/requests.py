"""Requests of ranks for collectives, and the responses that start them on all ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = 0, 1, 2, 3, 4, 5
"""Reductions, by Horovod's numbers."""
GLOBAL_SET = 0
"""Number of the process set of all ranks."""

BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of an element of each type that is sent."""


@dataclass(frozen=True, slots=True)
class Request:
    """Collective that a rank asks for. Ranks are matched by `process_set` and `name`."""

    name: str
    kind: str
    """`allreduce`, `allgather`, `broadcast`, `alltoall`, `reducescatter`, `barrier`, `join`, `add_process_set` or
    `remove_process_set`."""
    process_set: int = GLOBAL_SET
    dtypes: tuple[str, ...] = ()
    """Type of each tensor; a grouped operation has several."""
    shapes: tuple[tuple[int, ...], ...] = ()
    device: str = "cpu"
    """`cpu`, or a CUDA device with its number."""
    op: int = SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    """Global rank of a broadcast's source."""
    splits: tuple[int, ...] = ()
    """First dimensions that an alltoall sends to each rank."""
    ranks: tuple[int, ...] = ()
    """Ranks of a process set that is added or removed."""

    def to_json(self) -> list[Any]:
        """Return the request as JSON values."""
        return [
            self.name,
            self.kind,
            self.process_set,
            self.dtypes,
            self.shapes,
            self.device,
            self.op,
            self.prescale,
            self.postscale,
            self.root,
            self.splits,
            self.ranks,
        ]

    @classmethod
    def from_json(cls, values: list[Any]) -> "Request":
        """Return the request of another rank."""
        name, kind, process_set, dtypes, shapes, device, op, prescale, postscale, root, splits, ranks = values
        return cls(
            name=str(name),
            kind=str(kind),
            process_set=int(process_set),
            dtypes=tuple(map(str, dtypes)),
            shapes=tuple(tuple(map(int, shape)) for shape in shapes),
            device=str(device),
            op=int(op),
            prescale=float(prescale),
            postscale=float(postscale),
            root=int(root),
            splits=tuple(map(int, splits)),
            ranks=tuple(map(int, ranks)),
        )

    @property
    def is_on_cpu(self) -> bool:
        """Return whether the tensors are in host memory."""
        return self.device == "cpu"

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(BYTES[dtype] * num_elements(shape) for dtype, shape in zip(self.dtypes, self.shapes, strict=True))


def num_elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape."""
    number = 1
    for size in shape:
        number *= size
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """Start of one collective, for one or several requests, on all ranks of a process set."""

    kind: str
    names: tuple[str, ...]
    process_set: int = GLOBAL_SET
    error: str | None = None
    """Reason why the requests fail on all ranks; None if they are executed."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """First dimensions of each rank's tensors (allgather), or its splits (alltoall), in the order of the set."""
    value: int = -1
    """Rank that joined last, or number of a process set."""
    members: tuple[int, ...] = ()
    """Ranks of a process set that is added."""
    models: tuple[Request, ...] = ()
    """Requests of other ranks, for ranks that have joined and contribute zeros; empty if none has."""
    has_own_devices: bool = False
    """True if each rank has a device of its own, so that NCCL can be used."""

    def to_json(self) -> dict[str, Any]:
        """Return the response as JSON values; defaults are left out."""
        optional: dict[str, tuple[Any, Any]] = {
            "process_set": (self.process_set, GLOBAL_SET),
            "error": (self.error, None),
            "sizes": (self.sizes, ()),
            "value": (self.value, -1),
            "members": (self.members, ()),
            "models": ([request.to_json() for request in self.models], []),
            "has_own_devices": (self.has_own_devices, False),
        }
        given = {key: value for key, (value, default) in optional.items() if value != default}
        return {"kind": self.kind, "names": self.names, **given}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Response":
        """Return the response of rank 0."""
        error = values.get("error")
        return cls(
            kind=str(values["kind"]),
            names=tuple(map(str, values["names"])),
            process_set=int(values.get("process_set", GLOBAL_SET)),
            error=None if error is None else str(error),
            sizes=tuple(tuple(map(int, sizes)) for sizes in values.get("sizes", ())),
            value=int(values.get("value", -1)),
            members=tuple(map(int, values.get("members", ()))),
            models=tuple(map(Request.from_json, values.get("models", ()))),
            has_own_devices=bool(values.get("has_own_devices", False)),
        )
