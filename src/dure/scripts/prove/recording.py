"""Recordings of observed ranks, and the orders that they get."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from dure.documents import parse_json
from dure.strategies.state.tensor_shard import TensorShard
from dure.training.checkpoints.state_tree import NamedTensors, decode, encode

ORDER = "order.json"


class CannotJoin(Exception):
    """Batches of the ranks that cannot be one batch."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Order for the ranks of one observed run."""

    num_steps: int
    """Steps whose weights are compared."""
    num_sample_steps: int
    """Steps for which the samples are followed, at least `num_steps`."""
    is_float64: bool
    """True if model and floating batches are converted."""
    has_dropout: bool = True
    """False if dropout is left out."""
    has_statistics: bool = True
    """False if BatchNorm's statistics of a batch are left out."""
    follows_samples: bool = False
    """True if random numbers follow the samples."""
    in_turns: bool = False
    """True if one process gets the batches of the ranks in turns, and not joined."""
    most_seconds: float = 600.0
    """Seconds after which a rank ends, from its start."""
    fed_from: str | None = None
    """Folder of the observed run whose batches this one gets, joined over the ranks; None for its own."""

    def write(self, folder: Path) -> None:
        """Write the order into the folder of an observed run."""
        (folder / ORDER).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Order":
        """Read the order from the folder of an observed run."""
        return cls(**parse_json((folder / ORDER).read_text()))


@dataclass(kw_only=True)
class Fetch:
    """Fetch of a batch, or the end of the data."""

    loader: int
    """Number of the `DataLoader`, by its first pass."""
    epoch: int
    """Number of the pass over its data."""
    position: int
    """Number of the fetch within the pass."""
    has_gradients: bool
    """True if gradients were enabled, as they are in training."""
    is_trained: bool = False
    """True if a backward may come from it."""
    samples: list[Any] | None = None
    """Indices of its samples, or digests where a data set has none; None at the end of the data."""
    digests: list[str] | None = None
    """Digests of its samples, where `samples` are indices; None if they were not read."""
    size: int = 0
    """First dimension of its first tensor."""
    batch: Any = None
    """Batch itself, for the steps that are compared."""
    step: int = 0
    """Number of steps taken before it."""


@dataclass(kw_only=True)
class Loader:
    """A `DataLoader`."""

    key: str
    """Place where it was made, and the number of its data set, by which runs are compared."""
    line: str
    """Place in the script where it was made."""
    num_samples: int | None
    """Samples of its data set; None if that has no length."""
    is_part: bool = False
    """True if its data set is a part of another (`Subset`), in which the samples are counted."""
    sampler: str
    """Class of its sampler."""
    is_shuffled: bool | None
    """True if its sampler shuffles; None if that is unknown."""
    probes: list[str] | None = None
    """Number of samples of its data set, and digests of what a few of them have each time, read with the same random
    numbers on all ranks; None if they cannot be read."""
    has_replacement: bool = False
    """True if its sampler draws with replacement."""
    is_stream: bool = False
    """True if its data set is an `IterableDataset`."""
    own_samples: list[Any] | None = None
    """Indices or digests of the samples that one process would be given in a pass; None if unknown, or on a rank."""
    is_own_whole: bool = False
    """True if the ranks have read that pass to its end."""


@dataclass(kw_only=True)
class Step:
    """Step of one optimiser."""

    optimizer: int
    """Number of the optimiser, by its first step."""
    line: str
    """Place in the script where it was taken."""
    rates: list[float]
    """Learning rate of each group."""
    losses: list[float]
    """Values from which backward started since the last step."""
    loss_lines: list[str]
    """Places of these backwards."""
    gradients: dict[str, Any] = field(default_factory=dict)
    """Gradients before the step, by name; a parameter without one is left out."""
    weights: dict[str, Any] = field(default_factory=dict)
    """Weights after the step."""
    buffers: dict[str, Any] = field(default_factory=dict)
    """Buffers of the called models after the step."""
    starts: dict[str, Any] = field(default_factory=dict)
    """Sketches of the weights when the models are called for the next step; empty if they are not."""
    is_sketch: bool = False
    """True if gradients and weights are sketches."""


@dataclass(kw_only=True)
class Clip:
    """Call that clips gradients by their norm."""

    step: int
    """Number of steps taken before it."""
    line: str
    norm: float
    """Norm before it."""


@dataclass(kw_only=True)
class Metric:
    """Metric that `ReduceLROnPlateau` gets, and that decides on the learning rate."""

    step: int
    """Number of steps taken before it."""
    line: str
    value: float


@dataclass(kw_only=True)
class Recording:
    """Recording of one rank."""

    rank: int
    world_size: int
    seed: int = 0
    """Seed of all generators at the begin of the script."""
    loaders: list[Loader] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    num_steps: int = 0
    """Steps taken in all."""
    end: str = ""
    """Reason of its end: `script`, `steps` if it had seen enough, `time` or `failed`; empty if it was killed."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Last length of a loader that the script asked for, by twice the number of its data set; of a sampler, 1 more."""
    initial: dict[str, Any] = field(default_factory=dict)
    """Weights and buffers of each model at its first call, by the number of the model and name."""
    optimizer_lines: list[str] = field(default_factory=list)
    """Places where the optimisers were made."""
    wrappers: list[str] = field(default_factory=list)
    """Classes of the models that were called first, such as `DistributedDataParallel`."""
    norms: list[str] = field(default_factory=list)
    """Names of modules that compute statistics of a batch in training, such as BatchNorm."""
    dropouts: list[str] = field(default_factory=list)
    """Places in the script where dropout drops something."""
    clips: list[Clip] = field(default_factory=list)
    """Calls that clip gradients by their norm, in the compared steps."""
    metrics: list[Metric] = field(default_factory=list)
    """Metrics of every followed step that decide on learning rates."""
    draw_states: list[str] = field(default_factory=list)
    """Digests of the generators' states at each backward of the compared steps, if draws follow the samples."""
    has_drawn: bool = False
    """True if random numbers were drawn between a fetch and the backward."""
    is_repeatable: bool | None = None
    """True if the data set gave a sample twice alike; None if it was not asked."""
    problems: list[str] = field(default_factory=list)
    """Reasons for which something could not be observed."""


def recording_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's recording; its tensors are in another of that name."""
    return folder / f"rank{rank}.json"


def partial_path(folder: Path, rank: int) -> Path:
    """Return the file of what a rank has recorded that is still going on, or was ended by force."""
    return folder / f"rank{rank}.partial.json"


def save(recording: Recording, path: Path) -> None:
    """Write a recording; the file is there once all of it is."""
    tensors, layouts = NamedTensors(), _Layouts()
    encoded = encode(_as_plain(recording, layouts), "recording", tensors)
    save_file({name: _contiguous(tensor) for name, tensor in tensors.items()}, path.with_suffix(".safetensors"))
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps([encoded, layouts.known]))
    temporary.rename(path)


def load(path: Path) -> Recording:
    """Read a recording."""
    tensors = load_file(path.with_suffix(".safetensors"))
    encoded, layouts = parse_json(path.read_text(), may_repeat_keys=True, most_depth=None)
    found = decode(encoded, tensors.__getitem__)
    kinds: dict[str, Any] = {"loaders": Loader, "fetches": Fetch, "steps": Step, "clips": Clip, "metrics": Metric}
    values: dict[str, Any] = {
        name: [kinds[name](**each) for each in value] if name in kinds else value for name, value in found.items()
    }
    recording = Recording(**values)
    for step in recording.steps:
        for name in _SKETCHED:
            packed = getattr(step, name)
            if isinstance(packed, list):
                number, values_of_all = packed
                names, sizes = layouts[number]
                setattr(step, name, dict(zip(names, values_of_all.split(sizes), strict=True)))
    return recording


_SKETCHED = ("gradients", "weights", "starts")
"""Fields of a step that may have sketches, which are written as one tensor of all."""


class _Layouts:
    """Names and sizes of the sketches that are written as one tensor."""

    def __init__(self) -> None:
        self.known: list[tuple[list[str], list[int]]] = []
        self._numbers: dict[str, int] = {}

    def packed(self, sketches: dict[str, Tensor]) -> list[Any]:
        """Return the number of a layout, and all sketches as one tensor."""
        layout = [*sketches], [len(each) for each in sketches.values()]
        number = self._numbers.setdefault(repr(layout), len(self.known))
        if number == len(self.known):
            self.known.append(layout)
        return [number, torch.cat([*sketches.values()])]


def _contiguous(tensor: Any) -> Tensor:
    found: Tensor = tensor.tensor if isinstance(tensor, TensorShard) else tensor
    return found.contiguous().clone()  # several may share memory, as views of one batch


def _as_plain(value: Any, layouts: _Layouts) -> Any:
    if isinstance(value, Step):
        packed = {
            name: layouts.packed(getattr(value, name))
            for name in (_SKETCHED if value.is_sketch else _SKETCHED[2:])
            if getattr(value, name)
        }
        return {each.name: packed.get(each.name, getattr(value, each.name)) for each in fields(value)}
    if is_dataclass(value):
        return {each.name: _as_plain(getattr(value, each.name), layouts) for each in fields(value)}
    return [_as_plain(each, layouts) for each in value] if type(value) is list else value


def plain_batch(value: Any) -> Any:
    """Return a copy of a batch in plain containers.

    Raises:
        CannotJoin: It holds other objects.
    """
    if isinstance(value, Tensor):
        return whole(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value.copy())
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain_batch(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain_batch(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        parts = [plain_batch(each) for each in value]
        return parts if isinstance(value, list) else tuple(parts)
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise CannotJoin(f"batches with objects of {type(value).__name__}")


def whole(tensor: Any) -> Tensor:
    """Return a copy of a tensor on the CPU, the whole one if it is divided over the ranks."""
    found = tensor.detach()
    if isinstance(found, DTensor):
        found = found.full_tensor()
    if found.layout != torch.strided:
        found = found.to_dense()
    copied: Tensor = found.to("cpu", copy=True)
    return copied
