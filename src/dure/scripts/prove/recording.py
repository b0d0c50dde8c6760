"""What an observed rank leaves behind, and what it is told."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ORDER = "order.json"


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the ranks of one observed run are told."""

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
        return cls(**json.loads((folder / ORDER).read_text()))


@dataclass(kw_only=True)
class Fetch:
    """Fetch of a batch, or the end of the data."""

    loader: int
    """Number of the `DataLoader`, by creation."""
    epoch: int
    """Number of the pass over its data."""
    position: int
    """Number of the fetch within the pass."""
    has_gradients: bool
    """True if gradients were enabled, as they are in training."""
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

    line: str
    """Place in the script where it was made."""
    num_samples: int | None
    """Samples of its data set; None if that has no length."""
    is_part: bool = False
    """Whether its data set is a part of another (`Subset`), in which the samples are counted."""
    sampler: str
    """Class of its sampler."""
    is_shuffled: bool | None
    """Whether its sampler shuffles; None if that is unknown."""
    probes: list[str] | None = None
    """Digests of a few samples, read with the same random numbers on all ranks; None if they cannot be read."""
    lengths: list[int] = field(default_factory=list)
    """Answers that the script got to `len`."""


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
    """What one rank did."""

    rank: int
    world_size: int
    loaders: list[Loader] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    num_steps: int = 0
    """Steps taken in all, of which the first are in `steps`."""
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
    """Whether random numbers were drawn between a fetch and the backward."""
    is_repeatable: bool | None = None
    """Whether the data set gave a sample twice alike; None if it was not asked."""
    problems: list[str] = field(default_factory=list)
    """What could not be observed."""


def recording_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's recording."""
    return folder / f"rank{rank}.pt"
