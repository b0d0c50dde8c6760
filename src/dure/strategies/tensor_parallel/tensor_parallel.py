"""Tensor parallelism: layers divided over ranks that work on the same samples.

Shoeybi et al. 2019 (Megatron-LM), section 3, by DTensor and `parallelize_module`. Ranks of a tensor group hold parts of
the weights and compute parts of each layer's output; partial results are summed inside forward and backward. With
`--mesh data=D,tensor=T` there are D such groups, each with its share of the batch, whose gradients are summed over the
data axis.

Parameters that are not divided are plain tensors that every rank of a group has and changes in the same way. Their
gradient is the same on all of them, because it is computed from the same whole values, or is made the same if kernels
are not deterministic. The optimiser gets them together with the local parts of the divided ones (see
`strategies/division/local_shards.py`). As DTensors, they would send every operation of the model through DTensor's
dispatch, without a benefit.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dure.comm.mesh import Mesh, coordinate_of
from dure.spec import RunSpec
from dure.spec.mesh import parse_mesh
from dure.strategies.contract.batch_parts import DataShare
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.declarations import Findings
from dure.strategies.contract.reduced_facts import reduced_facts
from dure.strategies.contract.step_facts import Requests, StepFacts
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.division.local_shards import ShardedStrategy, share_bytes, whole_bytes
from dure.strategies.tensor_parallel.gradient_messages import bytes_of, exchange_gradients, messages_of
from dure.strategies.tensor_parallel.options import TensorParallelOptions
from dure.strategies.tensor_parallel.plan import nothing_to_divide, plan_of
from dure.strategies.tensor_parallel.tensor_division import TensorDivision
from dure.torchcompat.gradients import gradient_hooks_of, run_backward
from dure.torchcompat.tensors import give_data
from dure.units import format_bytes

AXES = ("data", "tensor")


class TensorParallel(ShardedStrategy):
    """Layers divided over the tensor axis, batches over the data axis."""

    options: TensorParallelOptions

    rules = WeightRules(
        changes_in_step_only=True,
        follows_groups=False,
        holds_memory=True,
        divides_gradients=True,
        divides_state=True,
        divides_groups=True,
    )

    @classmethod
    def check_model(cls, model: nn.Module, spec: RunSpec) -> list[str]:
        """Refuse a model with nothing to divide, and a plan that does not fit it."""
        axes = parse_mesh(spec.mesh, AXES, spec.num_devices)
        num_ranks = axes["tensor"]
        plan = plan_of(model, num_ranks, TensorParallelOptions.of(spec).plan)
        plan.faults += [
            f"{name} gives sparse gradients (sparse=True), which are not added up over the data axis: set sparse=False"
            for name, module in model.named_modules()
            if getattr(module, "sparse", False) is True and axes["data"] > 1
        ]
        plan.faults += [
            f"{name} has a hook on its gradient, which would get the gradient of one data rank's samples: use a mesh "
            "of tensor ranks alone, or remove the hook"
            for name, parameter in model.named_parameters()
            if axes["data"] > 1 and gradient_hooks_of(parameter)
        ]
        return plan.faults or nothing_to_divide(model, plan, num_ranks)

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._axes = parse_mesh(self.spec.mesh, AXES, self.group.world_size)
        index, position = (coordinate_of(self._axes, axis, self.group.rank) for axis in ("data", "tensor"))
        self.take_share(DataShare(index=index, count=self._axes["data"], leads=position == 0))

    def place(self, model: nn.Module) -> nn.Module:
        """Divide the layers of the plan, and send rank 0's values to all ranks.

        Communication: a broadcast of each parameter and buffer over all ranks; one is whole on the device at a time.
        """
        self.mesh = Mesh(self._axes, self.group, self.device, divides_tensors=True)
        self.shard_groups = {"tensor": self.mesh.group("tensor")}
        self.random_stream = self.mesh.coordinate("data")
        plan = plan_of(model, self.mesh.size("tensor"), self.options.plan)
        self.division = TensorDivision(
            plan, self.mesh, self.group, self.device, is_sequence_parallel=self.options.sequence_parallel
        )
        self.division.divide(model)
        self._place_rest(model)
        return model

    def _place_rest(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if not isinstance(parameter, DTensor):
                give_data(parameter, parameter.data.to(self.device))
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))
        rest: list[Tensor] = [p.data for p in model.parameters() if not isinstance(p, DTensor)]
        self.group.broadcast([*rest, *(buffer for buffer in model.buffers() if buffer.numel())])

    def distribute(self) -> None:
        """Pass this rank's parts to the optimiser, and group the gradients into messages for the data axis."""
        super().distribute()
        self._messages = list(messages_of(self.trainable, self.options.bucket_bytes))
        undivided = [parameter for parameter in self.trainable if not self.shards.axes_of(parameter)]
        self.division.watch_undivided(undivided, self.options.bucket_bytes)

    # forward and backward

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Accumulate gradients of the parts; ranks of a tensor group compute the same microbatches together.

        Communication: that of the layers in each forward and backward, over the tensor group.
        """
        self.sums.begin(requests)
        self.division.traffic.sent_bytes = 0
        for microbatch in microbatches:
            term = self.loss_term(self.model, microbatch, global_samples)
            with self.division.differentiating():
                run_backward(self.precision.scale(term.root))
            self.sums.add(term)

    def computed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the task, which may use divided weights and values, and return its result undivided."""
        return self.division.computed(function, *args)

    def sync_gradients(self) -> StepFacts:
        """Sum gradients over the data axis, and the facts over all ranks."""
        self.shards.take_gradients()
        flags = [float(parameter.grad is not None) for parameter in self.trainable]
        # filled on the device where that is possible: a copy of a list would wait for it
        drawn = torch.full((1,), self.division.draws(), dtype=self.sums.dtype, device=self.device)
        used = drawn.new_ones(len(flags)) if all(flags) else drawn.new_tensor(flags)
        beside = torch.cat([drawn, used])
        facts = reduced_facts(self, beside)
        if self.mesh.size("data") > 1:
            self._add_up_over_data()
        self.division.keep_alike()
        if not all(flags):
            # a parameter that no rank used has no gradient: a zero would still apply weight decay and momentum
            for parameter, by_any in zip(self.trainable, beside[1:].tolist(), strict=True):
                if not by_any:
                    parameter.grad = None
        self.division.check_draws(beside[:1])
        return facts

    def _add_up_over_data(self) -> None:
        """Sum gradients. Communication: one blocking all_reduce per `bucket_bytes` of gradients over the data axis."""
        exchange_gradients(self._messages, self.mesh.group("data").all_reduce_sum)

    # declarations, description, closing

    def declared_by_row(self, found: Findings) -> list[str]:
        """Return the row's declarations: with one data rank batches and draws are those of one device."""
        texts = super().declared_by_row(found)
        is_inside = {text: text.startswith("random numbers inside") for text in texts}
        have_own = self.division.values.have_own_draws
        return [text for text in texts if (have_own if is_inside[text] else self.share.count > 1)]

    def describe(self) -> list[str]:
        """Return lines about the divided layers, and those that are not."""
        own, everything = share_bytes(self.model.parameters()), whole_bytes(self.model.parameters())
        lines = [
            f"{self.mesh.size('tensor')} ranks of a tensor group hold {format_bytes(own)} each of "
            f"{format_bytes(everything)} of parameters"
            + (f", in {self.share.count} groups" if self.share.count > 1 else "")
        ]
        return lines + self.division.describe(self.model)

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes sent by the layers in this step, the gradients' sum over the data axis, and the facts."""
        data, everyone = self.mesh.size("data"), self.group.world_size
        facts = (4 + 1 + len(self.trainable)) * self.sums.dtype.itemsize
        return (
            self.division.sent_bytes()
            + 2 * (data - 1) * bytes_of(self._messages) // data
            + 2 * (everyone - 1) * facts // everyone
        )

    def close(self) -> None:
        """Restore torch's settings."""
        self.division.close()
