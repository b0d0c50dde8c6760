"""DataParallel with its two known faults mended: the fuller first device and the gathered loss.

In `dp` the first device also holds the optimiser's state, all outputs and the loss, so it runs out of memory while the
others have room. Here every replica computes the loss and the backward of its own samples, and the first device gets a
smaller share of them.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dure.machine import available_memory_bytes, total_memory_bytes
from dure.measure.shares import shares
from dure.strategies.batches import Microbatch, split_batch, to_device
from dure.strategies.replicas import DeviceThreads, build_replicas, copy_state
from dure.strategies.single import LocalSums
from dure.strategies.step_facts import LossTerm, Requests


class BalancedDataParallel(LocalSums):
    """One process, many devices, the loss on the replicas, device 0 with a share of its own."""

    changes_in_step_only = True

    def distribute(self) -> None:
        """Build the replicas, their threads and the shares."""
        super().distribute()
        self._replicas = build_replicas(self.model, self.devices)
        in_order = self.options.deterministic and self.device.type == "cpu"
        self._threads = DeviceThreads(self.devices, in_order=in_order)
        first = self.options.device0_share
        self.fractions = self._fractions(device0_share_by_memory(self) if first is None else first)

    def _fractions(self, first: float) -> list[float]:
        others = len(self.devices) - 1
        return [1.0] if others == 0 else [first] + [(1 - first) / others] * others

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Compute every device's gradients of its own samples, then add them up on device 0."""
        self.begin_step(requests)
        copy_state(self.model, self._replicas[1:])
        for microbatch in microbatches:
            counts = shares(microbatch.num_samples, len(self.devices), self.fractions)
            parts = split_batch(microbatch.batch, counts)
            calls = [self._call(i, parts[i], counts[i], global_samples) for i in range(len(parts))]
            for term in self._threads.run(calls):
                if term is not None:
                    self.add_term(term)
        self._reduce_gradients()

    def _call(self, index: int, part: Any, count: int, global_samples: int) -> Callable[[], LossTerm | None]:
        def forward_backward() -> LossTerm | None:
            if count == 0:
                return None
            microbatch = Microbatch(batch=to_device(part, self.devices[index]), num_samples=count)
            term = self.loss_term(self._replicas[index], microbatch, global_samples)
            self.precision.scale(term.root).backward()
            return term

        return forward_backward

    def _reduce_gradients(self) -> None:
        for replica in self._replicas[1:]:
            for ours, theirs in zip(self.model.parameters(), replica.parameters(), strict=True):
                if theirs.grad is None:
                    continue
                arrived = theirs.grad.to(ours.device)
                ours.grad = arrived if ours.grad is None else ours.grad.add_(arrived)
                theirs.grad = None

    def sent_bytes(self, num_microsteps: int) -> int:
        """Parameters and buffers out from device 0 and gradients back, once a step."""
        others = len(self.devices) - 1
        state = [*self.model.parameters(), *self.model.buffers()]
        out = sum(t.numel() * t.element_size() for t in state)
        back = sum(p.numel() * p.element_size() for p in self.trainable)
        return others * (out + back)

    def parts_of(self, num_samples: int) -> list[int]:
        """Return the samples of each device in each microbatch."""
        sizes = super().parts_of(num_samples)
        return [part for size in sizes for part in shares(size, len(self.devices), self.fractions) if part]

    def process_microbatch_size(self, microbatch_size: int) -> int:
        """The device with the largest share must get no more than `microbatch_size`."""
        return max(1, int(microbatch_size / max(self.fractions)))

    def device_microbatch_size(self, num_samples: int) -> int:
        """The device with the largest share of the microbatch."""
        return max(shares(num_samples, len(self.devices), self.fractions))

    def evaluation_models(self) -> list[nn.Module]:
        """Return the replicas with device 0's parameters and buffers."""
        copy_state(self.model, self._replicas[1:])
        return self._replicas

    def close(self) -> None:
        """End the threads."""
        self._threads.close()


def device0_share_by_memory(strategy: BalancedDataParallel) -> float:
    """Find the fraction of a batch for which all devices fill up at the same batch size.

    What a device has left for activations is its free memory less what will still come: on every device the
    gradients, on the first also the optimiser's state. What others use comes and goes, and the shares with it: a
    deterministic run counts all memory as free.
    """
    devices = strategy.devices
    if len(devices) == 1:
        return 1.0
    is_all_counted = strategy.options.deterministic
    if strategy.device.type == "cuda":
        free = [float(torch.accelerator.get_memory_info(device)[is_all_counted]) for device in devices]
    else:
        free = [(total_memory_bytes() if is_all_counted else available_memory_bytes()) / len(devices)] * len(devices)
    gradient_bytes = sum(p.numel() * p.element_size() for p in strategy.trainable)
    state_bytes = gradient_bytes * state_tensors_per_parameter(strategy.optimizer)
    left = [max(0.0, available - gradient_bytes) for available in free]
    left[0] = max(0.0, left[0] - state_bytes)
    return left[0] / sum(left) if sum(left) else 1 / len(devices)


def state_tensors_per_parameter(optimizer: Optimizer) -> int:
    """Return how many parameter-sized tensors the optimiser keeps, by stepping one of its kind on a small tensor."""
    probe = torch.nn.Parameter(torch.zeros(2))
    probe.grad = torch.zeros(2)
    # defaults may hold more than the constructor takes (AdamW's do)
    known = inspect.signature(type(optimizer)).parameters
    twin = type(optimizer)([probe], **{name: value for name, value in optimizer.defaults.items() if name in known})
    twin.step()
    state = twin.state.get(probe, {})
    return sum(isinstance(value, torch.Tensor) and value.shape == probe.shape for value in state.values())
