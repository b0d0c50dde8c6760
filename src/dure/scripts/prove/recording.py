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
    """Digests of a few samples, read with the same random numbers on all ranks; None if they cannot be read."""


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
    """Steps taken in all, of which the first are in `steps`."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Last length of a loader that the script asked for, by the number of its data set."""
    rates: list[list[float]] = field(default_factory=list)
    """Learning rates of every followed step."""
    weight_sums: list[float] = field(default_factory=list)
    """Sum of the weights after every followed step; those that are divided over the ranks are left out."""
    initial: dict[str, Any] = field(default_factory=dict)
    """Weights and buffers of each model at its first call, by the number of the model and name."""
    optimizer_lines: list[str] = field(default_factory=list)
    """Places where the optimisers were made."""
    wrappers: list[str] = field(default_factory=list)
    """Classes of the models that were called first, such as `DistributedDataParallel`."""
    norms: list[str] = field(default_factory=list)
    """Names of modules that compute statistics of a batch in training, such as BatchNorm."""
    dropouts: list[str] = field(default_factory=list)
    """Names of modules with dropout in training."""
    has_drawn: bool = False
    """True if random numbers were drawn between a fetch and the backward."""
    is_repeatable: bool | None = None
    """True if the data set gave a sample twice alike; None if it was not asked."""
    problems: list[str] = field(default_factory=list)
    """Reasons for which something could not be observed."""


def recording_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's recording; its tensors are in another of that name."""
    return folder / f"rank{rank}.json"


def save(recording: Recording, path: Path) -> None:
    """Write a recording; the file is there once all of it is."""
    tensors = NamedTensors()
    encoded = encode(_as_plain(recording), "recording", tensors)
    save_file({name: _contiguous(tensor) for name, tensor in tensors.items()}, path.with_suffix(".safetensors"))
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(encoded))
    temporary.rename(path)


def load(path: Path) -> Recording:
    """Read a recording."""
    tensors = load_file(path.with_suffix(".safetensors"))
    found = decode(parse_json(path.read_text(), may_repeat_keys=True, most_depth=None), tensors.__getitem__)
    kinds: dict[str, Any] = {"loaders": Loader, "fetches": Fetch, "steps": Step}
    values: dict[str, Any] = {
        name: [kinds[name](**each) for each in value] if name in kinds else value for name, value in found.items()
    }
    return Recording(**values)


def _contiguous(tensor: Any) -> Tensor:
    found: Tensor = tensor.tensor if isinstance(tensor, TensorShard) else tensor
    return found.contiguous().clone()  # several may share memory, as views of one batch


def _as_plain(value: Any) -> Any:
    if is_dataclass(value):
        return {each.name: _as_plain(getattr(value, each.name)) for each in fields(value)}
    return [_as_plain(each) for each in value] if type(value) is list else value


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
