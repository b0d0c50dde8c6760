"""Record of a model's buffers, for their comparison and restoration."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dure.strategies.state.trial import is_equal


class KeptBuffers:
    """Current buffers of a model, and their values: code may write to a buffer, or put another one in its place."""

    def __init__(self, model: nn.Module, is_kept: Callable[[str], bool] = lambda name: True) -> None:
        """Record the buffers, or those selected by name."""
        self._model = model
        self._is_kept = is_kept
        self._registers = [(path, module, module._buffers.copy()) for path, module in model.named_modules()]
        self._values = {name: (buffer, buffer.clone()) for name, buffer in self.now().items()}

    def now(self) -> dict[str, Tensor]:
        """Return the buffers that the model has now."""
        return {name: buffer for name, buffer in self._model.named_buffers() if self._is_kept(name)}

    def changed(self) -> list[str]:
        """Return the names of the buffers that have other values now, are new or are gone."""
        now = self.now()
        other = [name for name, (_, value) in self._values.items() if name not in now or not is_equal(now[name], value)]
        return [*other, *(name for name in now if name not in self._values)]

    def put_back(self) -> None:
        """Restore the same buffers with their values."""
        for path, module, before in self._registers:
            for leaf in [*module._buffers, *before]:
                if not self._is_kept(f"{path}.{leaf}" if path else leaf):
                    continue
                if leaf in before:
                    module._buffers[leaf] = before[leaf]
                else:
                    module._buffers.pop(leaf, None)
        with torch.no_grad():
            for buffer, value in self._values.values():
                if not is_equal(buffer, value):  # a write to one that a graph has saved would be an error in backward
                    buffer.copy_(value)
