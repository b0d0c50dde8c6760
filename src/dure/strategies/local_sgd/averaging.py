"""Local SGD: every rank trains independently, and every H steps the parameters are averaged (parameter averaging).

Stich 2019, algorithm 1. A rank's steps are those of a separate run: the mean loss of its own share of every global
batch, the norm of its own gradient, its own optimiser. Nothing is sent between averagings, so no rank waits for a slow
link or a slow rank; ranks learn from each other at the next averaging.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dure.comm.choice import open_chosen
from dure.data.partition import shares
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.reduced_facts import reduced_facts
from dure.strategies.contract.replica_state import whole_replica
from dure.strategies.contract.step_facts import NO_REQUESTS, Requests, StepFacts
from dure.strategies.contract.strategy import Strategy
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.data_parallel.gradient_sums import add_up_gradients
from dure.strategies.local_sgd.averaged_state import average_optimizer_state
from dure.strategies.local_sgd.options import AveragingOptions
from dure.strategies.state.saved_state import StateSource, StrategyState
from dure.torchcompat.gradients import run_backward
from dure.torchcompat.modules import BatchNorm
from dure.torchcompat.tensors import copy_all


class Averaging(Strategy):
    """Independent steps on every rank, then their weighted mean; during `warmup_steps`, `naive_ddp`.

    The mean is weighted by the items (samples, or what the loss counts) that each rank used since the last averaging.
    Averaged after every step of plain SGD without clipping, it is the step of the global batch.

    Steps are counted over the whole run, including resumes: step t averages if (t - warmup_steps) is a multiple of H.
    An evaluation or a checkpoint averages the weights before it reads them. Momentum and other state of the optimiser
    stay local to each rank; a checkpoint averages that too.
    """

    options: AveragingOptions

    is_synchronous = False
    rules = WeightRules(changes_in_step_only=True)

    replica = whole_replica

    def distribute(self) -> None:
        """Send rank 0's weights to all ranks, at the first step of the run."""
        self.group.broadcast([*self.model.parameters(), *self.model.buffers()])
        self._all_reduce = open_chosen(self.spec.comm, self.device.type, self.group)
        self.average_every = self.options.average_every
        self._step = 0
        self._num_apart = 0
        """Steps since the ranks' parameters were last equal; the same number on every rank."""
        self._items: Tensor | float = 0.0
        """Number of items in this rank's losses of those steps."""
        self._weight: Tensor | float = 1.0
        self._has_own_state = False
        normalised = [module for module in self.model.modules() if isinstance(module, BatchNorm)]
        statistics = [tensor for module in normalised for tensor in (module.running_mean, module.running_var)]
        self._averaged: dict[torch.dtype, list[Tensor]] = {}
        for tensor in [*self.trainable, *(tensor for tensor in statistics if tensor is not None)]:
            self._averaged.setdefault(tensor.dtype, []).append(tensor)
        self._flat = {
            dtype: self._all_reduce.zeros(sum(tensor.numel() for tensor in tensors), dtype, self.device)
            for dtype, tensors in self._averaged.items()
        }

    def describe(self) -> list[str]:
        """Return lines about when ranks communicate, and with which algorithm."""
        before = f"after {self.options.warmup_steps} synchronous steps, " if self.options.warmup_steps else ""
        every = f"every {self.average_every} steps" if self.average_every > 1 else "every step"
        return [f"{before}parameters averaged {every} through {self._all_reduce.name} (--comm {self.spec.comm})"]

    @property
    def is_warming_up(self) -> bool:
        """Return whether this step is one of the warm-up."""
        return self._step <= self.options.warmup_steps

    @property
    def is_averaging(self) -> bool:
        """Return whether this step ends with an averaging."""
        return not self.is_warming_up and (self._step - self.options.warmup_steps) % self.average_every == 0

    # a step

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Compute the gradient of the mean loss over this rank's own share."""
        self._step += 1
        if self.is_warming_up:
            super().forward_backward(microbatches, global_samples=global_samples, requests=requests)
            return
        # a rank must not act alone on a request that no other rank receives; it is repeated in every step
        self.sums.begin(requests if self.is_averaging else NO_REQUESTS)
        own_samples = shares(global_samples, self.share.count)[self.share.index]
        for microbatch in microbatches:
            if not microbatch.is_padding:
                term = self.loss_term(self.model, microbatch, own_samples)
                run_backward(self.precision.scale(term.root))
                self.sums.add(term)

    def sync_gradients(self) -> StepFacts:
        """Return this rank's own facts; if an averaging follows, those of all ranks.

        Communication: in a step that averages one blocking all_reduce of 5 float64 (float32 on MPS), otherwise none.
        """
        if self.is_warming_up:
            add_up_gradients(self.trainable, self.group, self._all_reduce.all_reduce)
            return reduced_facts(self)
        own = self.sums.facts() if self.sums.terms else (0.0, 0, *self.sums.requests)
        count = own[1]
        # a loss that counts no items has a gradient of zero, whatever the divisor
        self.sums.count = torch.where(count > 0, count, 1.0) if isinstance(count, Tensor) else count or 1.0
        self._items = self._items + count
        if not self.is_averaging:
            return StepFacts(own, self.sums.terms, is_local=True)
        facts = torch.cat([self._on_its_way(own), self._on_its_way(self._items).view(1)])
        self._weigh(facts)
        return StepFacts(facts[:4], self.sums.terms)

    def _on_its_way(self, numbers: Tensor | float | Sequence[float]) -> Tensor:
        return torch.as_tensor(numbers, dtype=self.sums.dtype, device=self.device)

    def _weigh(self, facts: Tensor) -> None:
        """Sum facts, the last of which is the items, and derive this rank's weight in the mean."""
        self.group.all_reduce_sum(facts)
        total = facts[-1].item() if self.device.type == "cpu" else facts[-1]
        evenly = 1 / self.group.world_size
        if isinstance(total, Tensor):
            self._weight = torch.where(total > 0, self._items / total, evenly)
        else:
            self._weight = self._items / total if total else evenly

    def optimizer_step(self) -> None:
        """Step with this rank's own gradient, if it had samples, and average if it is due."""
        if self.is_warming_up:
            super().optimizer_step()
            return
        if self.sums.terms:
            super().optimizer_step()
        self._num_apart += 1
        self._has_own_state = True
        if self.is_averaging:
            self.average()

    # averaging

    @torch.no_grad()
    def average(self) -> None:
        """Replace every rank's parameters and running statistics of BatchNorm by their weighted mean over all ranks.

        Communication: one blocking all_reduce over all ranks for each dtype, W bytes together: 2 (P-1)/P W bytes sent
        by a ring.
        """
        for dtype, tensors in self._averaged.items():
            flat = self._flat[dtype]
            split = flat.split([tensor.numel() for tensor in tensors])
            places = [place.view(tensor.shape) for place, tensor in zip(split, tensors, strict=True)]
            for tensor, place in zip(tensors, places, strict=True):
                torch.mul(tensor, self._weight, out=place)
            self._all_reduce.all_reduce(flat)
            copy_all(tensors, places)
        self._num_apart, self._items = 0, 0.0

    def before_reading(self) -> None:
        """Average, unless the weights are already equal; all other buffers become rank 0's."""
        if self._num_apart:
            self._weigh(self._on_its_way(self._items).view(1).clone())
            self.average()
        super().before_reading()

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes of the warm-up's gradients, or of the averaging; zero between averagings."""
        if self.is_warming_up:
            return sum(self._all_reduce.sent_bytes_for(p.numel(), p.element_size()) for p in self.trainable)
        if not self.is_averaging:
            return 0
        lengths = {dtype: sum(tensor.numel() for tensor in tensors) for dtype, tensors in self._averaged.items()}
        return sum(self._all_reduce.sent_bytes_for(length, dtype.itemsize) for dtype, length in lengths.items())

    # checkpoints

    def state_dict(self) -> StrategyState:
        """Return weights and the mean of the optimiser states, which also becomes the state of every rank.

        Communication: over all ranks, after local steps, two gathered JSON messages of about 100 bytes per tensor and
        all_reduce of the state.
        """
        if self._has_own_state:
            average_optimizer_state(self.model, self.optimizer, self.group)
            # each rank derived scale and count from its own steps; from now on all have rank 0's
            common = self.group.all_gather_json([self.precision.state(), self.expectation])[0]
            self.precision.load_state(common[0])
            self.expectation = common[1]
            self._has_own_state = False
        return super().state_dict()

    def load_state_dict(self, source: StateSource) -> None:
        """Load weights and the optimiser's state, and continue to count steps from there."""
        super().load_state_dict(source)
        self._step = source.position.step

    def close(self) -> None:
        """Close the algorithm."""
        self._all_reduce.close()
