"""DataParallel: one process, a thread per device, outputs gathered on device 0.

The classic of PyTorch's first years. Every microstep has five phases: *replicate* (parameters to all devices),
*scatter* (the microbatch), *parallel apply* (forward), *gather* (outputs to device 0, where the loss is computed), and,
in backward, *reduce* (gradients to device 0).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dure.measure.shares import shares
from dure.strategies.batches import Microbatch, split_batch, to_device
from dure.strategies.parameter_watch import Freezing
from dure.strategies.replicas import BroadcastParameters, DeviceThreads, build_replicas, copy_state, gather
from dure.strategies.single import LocalSums
from dure.strategies.step_facts import Requests


class DividedModel(nn.Module):
    """The model as the task's loss sees it: a call runs on all devices and answers on device 0."""

    def __init__(self, model: nn.Module, strategy: "DataParallel") -> None:
        super().__init__()
        self.model = model
        self._strategy = [strategy]  # in a list: a module must not be owned by what owns it
        self.num_samples = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Divide the call's tensors by samples, run the replicas, gather their outputs."""
        return self._strategy[0].divided_call(args, kwargs, self.num_samples)

    def __getattr__(self, name: str) -> Any:
        """Answer everything but a call from the model itself, on device 0."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


class DataParallel(LocalSums):
    """One process, many devices, loss on device 0."""

    changes_in_step_only = True

    def distribute(self) -> None:
        """Build the replicas and their threads."""
        super().distribute()
        self._replicas = build_replicas(self.model, self.devices)
        in_order = self.options.deterministic and self.device.type == "cpu"
        self._threads = DeviceThreads(self.devices, in_order=in_order)
        self._divided = DividedModel(self.model, self)

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Accumulate the gradients of all microbatches on device 0."""
        self.begin_step(requests)
        for microbatch in microbatches:
            self._divided.num_samples = microbatch.num_samples
            term = self.loss_term(self._divided, microbatch, global_samples)
            self.precision.scale(term.root).backward()
            self.add_term(term)

    def divided_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], num_samples: int) -> Any:
        """Replicate, scatter, apply in parallel, gather."""
        counts = [count for count in shares(num_samples, len(self.devices)) if count]
        if len(counts) == 1:
            return self.model(*args, **kwargs)
        # replicate
        copies = self._copied_parameters(len(counts) - 1)
        # scatter
        parts = [to_device(p, d) for p, d in zip(split_batch((args, kwargs), counts), self.devices, strict=False)]

        # parallel apply
        def call(index: int) -> Any:
            part_args, part_kwargs = parts[index]
            with self.precision.autocast():
                if index == 0:
                    return self.model(*part_args, **part_kwargs)
                return torch.func.functional_call(self._replicas[index], copies[index - 1], part_args, part_kwargs)

        outputs = self._threads.run([lambda index=index: call(index) for index in range(len(counts))])  # type: ignore[misc]
        # gather
        return gather(outputs, self.device)

    def _copied_parameters(self, num_copies: int) -> list[dict[str, torch.Tensor]]:
        copy_state(self.model, self._replicas[1 : num_copies + 1], buffers_only=True)
        named = dict(self.model.named_parameters())
        flat = BroadcastParameters.apply(self.devices[1 : num_copies + 1], *named.values())  # type: ignore[no-untyped-call]
        width = len(named)
        return [dict(zip(named, flat[i * width : (i + 1) * width], strict=True)) for i in range(num_copies)]

    def follow_freezing(self, freezing: Freezing) -> None:
        """Train what is unfrozen from here on."""
        self.train_all()

    def sent_bytes(self, num_microsteps: int) -> int:
        """Parameters and buffers out from device 0 and gradients back, every microstep."""
        others = len(self.devices) - 1
        state = [*self.model.parameters(), *self.model.buffers()]
        out = sum(t.numel() * t.element_size() for t in state)
        back = sum(p.numel() * p.element_size() for p in self.trainable)
        return num_microsteps * others * (out + back)

    def parts_of(self, num_samples: int) -> list[int]:
        """Return the samples of each device in each microbatch."""
        return [part for size in super().parts_of(num_samples) for part in shares(size, len(self.devices)) if part]

    def calls_per_step(self) -> int:
        """Return the microbatches: the loss itself is computed on device 0 alone."""
        return len(super().parts_of(self.options.global_batch_size))

    def process_microbatch_size(self, microbatch_size: int) -> int:
        """Every device gets its part of what the process gets."""
        return microbatch_size * len(self.devices)

    def device_microbatch_size(self, num_samples: int) -> int:
        """The first device has as many as any."""
        return -(-num_samples // len(self.devices))

    def evaluation_models(self) -> list[nn.Module]:
        """Return the replicas with device 0's parameters and buffers."""
        copy_state(self.model, self._replicas[1:])
        return self._replicas

    def close(self) -> None:
        """End the threads."""
        self._threads.close()
