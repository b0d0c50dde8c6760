"""DataParallel without its two known faults: the fuller first device and the gathered loss.

In `dp` the first device also holds the optimiser's state, all outputs and the loss, so it runs out of memory while the
others have room. Here every replica computes loss and backward of its own samples, and the first device gets fewer of
them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dure.data.partition import shares
from dure.data.randomness import kept_global_randomness
from dure.errors import TaskInvalid, message_of
from dure.strategies.contract.batch_layout import Layout, Role, layout_of
from dure.strategies.contract.batch_parts import BatchParts
from dure.strategies.contract.batches import Microbatch, split_batch, to_device
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.step_facts import LossTerm, Requests
from dure.strategies.data_parallel.device_replicas import DeviceReplicas
from dure.strategies.data_parallel.device_shares import (
    device0_share_by_memory,
    fractions_of,
    state_tensors_per_parameter,
)
from dure.strategies.data_parallel.loss_replicas import Loss, LossReplicas, same_everywhere
from dure.strategies.data_parallel.options import BalancedOptions
from dure.strategies.division.divided_calls import check_parameters
from dure.strategies.state.forward_state import ForwardAttributes
from dure.strategies.state.module_replicas import Replica, replicate
from dure.torchcompat.gradients import gradient_hooks_of


class UnevenParts(BatchParts):
    """Parts of microbatches of which each device gets its own fraction."""

    fractions: Sequence[float] = (1.0,)
    """Fraction of each device; a placeholder until `distribute`."""

    def of(self, num_samples: int) -> list[int]:
        """Return the samples of each device in each microbatch."""
        return [part for size in self.microbatches(num_samples) for part in self.divided(size) if part]

    def divided(self, num_samples: int) -> list[int]:
        """Return the samples of each device in one microbatch."""
        return shares(num_samples, len(self.fractions), self.fractions)

    def process_size(self, microbatch_size: int) -> int:
        """Return the samples of a microbatch of which no device gets more than `microbatch_size`."""
        return max(1, int(microbatch_size / max(self.fractions)))

    def device_size(self, num_samples: int) -> int:
        """Return the samples of the device with the largest share of the microbatch."""
        return max(self.divided(num_samples))


class BalancedDataParallel(DeviceReplicas):
    """One process with many devices: the loss is on the replicas, and device 0 has its own share of samples."""

    rules = replace(DeviceReplicas.rules, divides_state=True)  # the state is that of the first device's parameters

    options: BalancedOptions
    parts: UnevenParts

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.parts = UnevenParts(self.spec, self.share.count)

    def distribute(self) -> None:
        """Start the threads, and compute the devices' shares."""
        super().distribute()
        self._layout: Layout | None = None
        first = self.options.device0_share
        self.parts.fractions = fractions_of(len(self.devices), self._share_by_memory() if first is None else first)

    def _share_by_memory(self) -> float:
        gradient_bytes = sum(p.numel() * p.element_size() for p in self.trainable)
        return device0_share_by_memory(
            self.devices,
            gradient_bytes=gradient_bytes,
            state_bytes=gradient_bytes * state_tensors_per_parameter(self.optimizer),
            counts_all=self.spec.deterministic,
        )

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Compute the gradients of every device's own samples, then add them up on device 0."""
        self.sums.begin(requests)
        self._check_hooks()
        attributes = ForwardAttributes(self.model)
        losses = LossReplicas(self.loss, self.model, len(self.devices))
        replicas = replicate(self.model, self.devices[1:], linked=False)
        models = [self.model, *(replica.model for replica in replicas)]
        used: set[int] = set()
        for microbatch in microbatches:
            counts = self.parts.divided(microbatch.num_samples)
            parts = split_batch(microbatch.batch, counts, self._known_layout(microbatch.num_samples))
            calls = [
                self._call(
                    losses.losses[i], models[i], self.devices[i], Microbatch(parts[i], counts[i]), global_samples
                )
                for i in range(len(parts))
            ]
            try:
                with losses.running():
                    terms = self._threads.run(calls)
            except TaskInvalid:
                raise
            except Exception as error:
                if max(counts) < microbatch.num_samples:
                    self._check_whole(microbatch, error)
                raise
            for term in terms:
                if term is not None:
                    self.sums.add(term)
            used |= {i for i, count in enumerate(counts) if count}
        self._reduce_gradients(replicas)
        losses.settle(sorted(used))
        if min(used) > 0:
            # device 0 has no share: changes by a forward pass or a loss are made on another device
            replicas[min(used) - 1].give_back()
        check_parameters([replica for i, replica in enumerate(replicas, 1) if i in used])
        self._take_over(attributes, replicas, sorted(used))

    def _check_whole(self, microbatch: Microbatch, error: Exception) -> None:
        """Refuse a loss that failed on a part of a batch, if it can be computed for the whole of it.

        Raises:
            TaskInvalid: It can, so that the division is the reason.
        """
        try:
            with kept_global_randomness(*self.devices):
                self.watched(self.loss, self.model, to_device(microbatch.batch, self.device))
        except Exception:  # the first error says more
            return
        raise TaskInvalid(
            f"the loss can be computed for a batch and not for the part of one device ({type(error).__name__}: "
            f"{message_of(error)}): it expects rows, or a length to which samples were padded, that the part does not "
            "have; use ddp, which collates the samples of each rank"
        ) from error

    def _call(
        self, loss: Loss, model: nn.Module, device: torch.device, microbatch: Microbatch, global_samples: int
    ) -> Callable[[], LossTerm | None]:
        def forward_backward() -> LossTerm | None:
            if microbatch.num_samples == 0:
                return None
            there = microbatch._replace(batch=to_device(microbatch.batch, device))
            term = self.loss_term(model, there, global_samples, loss)
            self.precision.scale(term.root).backward()
            return term

        return forward_backward

    def _reduce_gradients(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            for ours, theirs in replica.pairs():
                if theirs.grad is None:
                    continue
                arrived = theirs.grad.to(ours.device)
                ours.grad = arrived if ours.grad is None else ours.grad.add_(arrived)
                theirs.grad = None

    def _take_over(self, attributes: ForwardAttributes, replicas: Sequence[Replica], used: list[int]) -> None:
        """Set on the model the attributes that a step has set on its replicas, if all replicas with samples agree."""
        changes = attributes.changes([None, *replicas])
        for name in changes[0]:
            values = [changes[device][name] for device in used]
            try:
                found = same_everywhere(name, self.device).of(values)
            except TaskInvalid as error:
                found = attributes.disowned(name, values[0], str(error))
            attributes.put(name, found)

    def _check_hooks(self) -> None:
        names = [name for name, parameter in self.model.named_parameters() if gradient_hooks_of(parameter)]
        if names and len(self.devices) > 1:
            raise TaskInvalid(
                f"{names[0]} has a hook on its gradient, which would get the part of one device under balanced_dp: "
                "use dp, whose hooks get the whole gradient, or --strategy single"
            )

    def _known_layout(self, num_samples: int) -> Layout:
        """Return the roles of a batch's values, from two small batches of the training data."""
        if self._layout is None and num_samples > 1:
            self._layout = {} if self.example is None else _layout_of_examples(self.example, num_samples)
        return self._layout or {}

    def zero_gradients(self) -> None:
        """Drop all gradients, also those of parameters that a replica's loss has just unfrozen."""
        self.train_all()
        super().zero_gradients()

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes of parameters and buffers sent by device 0 and of gradients sent back, once per step."""
        return self.bytes_between_devices()


def _layout_of_examples(example: Callable[[int], Any], num_samples: int) -> Layout:
    sizes = (2, 3) if num_samples > 2 else (1, 2)
    try:
        with kept_global_randomness():
            layout = layout_of([(size, example(size)) for size in sizes])
    except Exception:  # the collate accepts batches of one size only: roles then follow from a single batch
        return {}
    return layout if Role.SAMPLES in layout.values() else {}
