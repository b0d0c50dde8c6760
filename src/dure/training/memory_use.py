"""Memory of a rank: bytes of what it holds, and the largest use of its devices so far."""

import resource
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dure.host.device_kinds import memory_of, peak_memory_of
from dure.host.devices import total_memory_bytes
from dure.records.events import DeviceMemory, RankMemory
from dure.strategies.contract.strategy import Strategy
from dure.torchcompat.tensors import local_tensor

_FIRST_STEPS = 3
"""Steps after which gradients are measured: later ones have as many."""


class MemoryUse:
    """Memory of this rank under a strategy."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._num_steps = 0
        self._gradients = 0

    def note_step(self) -> None:
        """Measure the gradients, which a step has computed and not yet used."""
        if self._num_steps < _FIRST_STEPS:
            self._num_steps += 1
            gradients = [
                parameter.grad for parameter in self._strategy.model.parameters() if parameter.grad is not None
            ]
            self._gradients = max(self._gradients, num_bytes_of(gradients))

    def now(self, rank: int) -> RankMemory:
        """Return the bytes of parameters, gradients, optimiser state and buffers, and the peak of each device."""
        strategy = self._strategy
        optimizers = (strategy.optimizer, strategy.built_optimizer, strategy.stepped)
        states = [state for optimizer in optimizers for state in optimizer.state.values() if isinstance(state, dict)]
        return RankMemory(
            rank=rank,
            parameters=num_bytes_of(strategy.model.parameters()),
            gradients=self._gradients,
            optimizer=num_bytes_of(value for state in states for value in state.values()),
            buffers=num_bytes_of(strategy.model.buffers()),
            devices=tuple(_devices(strategy.devices)),
        )


def num_bytes_of(values: Iterable[object]) -> int:
    """Return the bytes of the tensors among some values on this rank, each once."""
    tensors = {id(value): local_tensor(value) for value in values if isinstance(value, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values() if not tensor.is_meta)


def _devices(devices: Sequence[torch.device]) -> Iterable[DeviceMemory]:
    if all(device.type == "cpu" for device in devices):
        # kilobytes on Linux, and bytes on macOS
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        yield DeviceMemory(device="cpu", peak=resident, total=total_memory_bytes())
        return
    for device in devices:
        memory, peak = memory_of(device), peak_memory_of(device)
        if memory is not None and peak is not None:
            yield DeviceMemory(device=str(device), peak=peak, total=memory[1])
