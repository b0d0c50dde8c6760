"""Training task: the one small class that a user writes."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

from dure.records.sums import Sum

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

Schedule = Callable[[int], float]
"""Function from samples seen to the factor on the initial learning rate of every parameter group."""


@dataclass_transform(kw_only_default=True)
class Task(ABC):
    """Definition of a training task; everything else about a run is an execution detail.

    The annotated fields of a subclass are its options: keyword arguments in Python, `--task.<name>` on the command
    line. A class with its own `__init__` has the keywords of that one instead. The model that `build_model` returns
    knows nothing of dure.

        class Digits(dure.Task):
            hidden: int = 64

            def build_model(self): return nn.Linear(64, 10)
            ...
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Settings that this task prefers, such as `{"epochs": 10}`; TOML, environment and flags override them."""

    _has_own_init: ClassVar[bool] = False
    """True if `__init__` was written by hand, here or in a base, and not generated from the fields."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # a generated `__init__`, of this class or of a mix-in before it, would hide the one that a base defines, and
        # omit its attributes
        written = next((vars(base)["__init__"] for base in cls.__mro__ if _has_written_init(base)), None)
        cls._has_own_init = written is not None
        dataclasses.dataclass(kw_only=True, eq=False, init=written is None)(cls)
        if written is not None and "__init__" not in vars(cls) and cls.__init__ is not written:
            cls.__init__ = written  # type: ignore[method-assign]

    @abstractmethod
    def build_model(self) -> "nn.Module":
        """Build the model on the CPU. Called under the run's seed, so that every rank builds the same one."""

    @abstractmethod
    def train_data(self) -> "Dataset[Any]":
        """Return the map-style training data (`__len__` and `__getitem__`).

        If it has `__getitems__(indices)`, whole microbatches are fetched by one call. A returned list is collated;
        anything else is used as the batch itself.
        """

    def eval_data(self) -> "Dataset[Any] | None":
        """Return the evaluation data, or None if there is none."""
        return None

    @abstractmethod
    def build_optimizer(self, model: "nn.Module") -> "Optimizer":
        """Build the optimiser over the (placed) model's parameters."""

    def build_schedule(self, optimizer: "Optimizer", total_samples: int) -> Schedule | None:
        """Return the factor on the learning rates as a function of samples seen, or None to keep them constant."""
        return None

    @abstractmethod
    def loss(self, model: "nn.Module", batch: Any) -> "Tensor | Sum":
        """Return the mean loss over the batch's samples, or `Sum(total, count)` if it is a mean over something else."""

    def metrics(self, model: "nn.Module", batch: Any) -> dict[str, Sum]:
        """Return the metrics of an evaluation in addition to the loss, as sums and counts."""
        return {}

    def collate(self, samples: Sequence[Any]) -> Any:
        """Collate a list of samples into one batch; by default with torch's `default_collate`."""
        from torch.utils.data import default_collate

        return default_collate(list(samples))

    def state_dict(self) -> dict[str, Any] | None:
        """Return state that the task keeps from step to step, made of tensors and plain values, for checkpoints.

        There is none by default; plain attributes that change during the run are saved without it.
        """
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def prepare_data(self) -> None:
        """Download or unpack what the data needs. Called on one rank of each host, before any other method."""

    def describe(self, model: "nn.Module") -> str | None:
        """Return text to show before training starts (a model summary), or None. Called on rank 0 only."""
        return None


def _has_written_init(cls: type) -> bool:
    """Return whether a class has an `__init__` that was written by hand."""
    is_generated = issubclass(cls, Task) and not vars(cls).get("_has_own_init", True)
    return "__init__" in vars(cls) and cls.__module__ not in ("builtins", "abc", "typing") and not is_generated
