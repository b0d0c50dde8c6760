"""Running statistics of a model's BatchNorm layers, and whether training uses those of batches."""

from collections.abc import Container

from torch import Tensor, nn

from dure.strategies.state.trial import is_equal
from dure.torchcompat import BatchNorm


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of all BatchNorm layers by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        if isinstance(module, BatchNorm)
        for name, buffer in module.named_buffers(recurse=False)
    }


def learns_statistics(model: nn.Module, changed: Container[str]) -> bool:
    """Return whether a BatchNorm may have used the statistics of a batch in calls of the model.

    Args:
        model: Model.
        changed: Names of the buffers that the calls changed.
    """
    without_count = any(isinstance(m, BatchNorm) and m.num_batches_tracked is None for m in model.modules())
    return without_count or any(name in changed for name in statistics_of(model))


class FrozenStatistics:
    """Statistics of BatchNorm layers that training should leave as they are."""

    def __init__(self, model: nn.Module) -> None:
        """Record the current statistics."""
        self._model = model
        self._values = {name: buffer.clone() for name, buffer in statistics_of(model).items()}

    def have_changed(self) -> bool:
        """Return whether a layer has other statistics now."""
        now = statistics_of(self._model)
        return now.keys() != self._values.keys() or any(
            not is_equal(now[name], value) for name, value in self._values.items()
        )
