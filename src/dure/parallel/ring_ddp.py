"""Module that averages the gradients of a model over ranks, by the buckets and algorithms of `ring_ddp`."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dure.comm.buckets import FlatGradients
from dure.comm.choice import open_chosen
from dure.comm.groups import ProcessGroup
from dure.errors import TaskInvalid
from dure.parallel.wrapping import RankWrapper, Trained, check_alike, only_device, send_tensors
from dure.strategies.data_parallel.options import RingDDPOptions
from dure.strategies.data_parallel.ring_ddp import BucketReducer, OrderedLaunches
from dure.torchcompat.gradients import call_after_backward


def _is_over() -> bool:
    return False


class RingDDP(RankWrapper):
    """Model whose gradients are averaged over the ranks of a group while backward runs.

    It is used as `torch.nn.parallel.DistributedDataParallel` is: build it after `init_process_group` and after the
    model is on its device, call it in place of the model, and step an optimiser of the model's parameters. All ranks
    begin with the weights and buffers of rank 0. Parameters that take no part in a backward need no option: those
    that no rank has used get no gradient, and the others the mean, in which a rank without a gradient counts as zero.

    Gradients are sums in another order than DDP's, so they equal its own up to rounding. They are views into one buffer
    for each dtype. `optimizer.zero_grad()` may drop or zero them.

    A copy, also a pickled one, can be called and not trained: it has no connection to other ranks.

    Source: NVIDIA's Apex (`apex.parallel.DistributedDataParallel`) for the options; Li et al. 2020 for the buckets.
    """

    _of_rank = frozenset(
        {"_group", "_hooks", "_is_running", "_launches", "_parameters_reduced", "_reached", "_reducer", "_trained"}
        | {"gradients"}
    )

    def __init__(
        self,
        module: nn.Module,
        *,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        allreduce_always_fp32: bool = False,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        broadcast_buffers: bool = True,
        comm: str = "auto",
        process_group: dist.ProcessGroup | None = None,
        bucket_ends: Iterable[nn.Parameter] | None = None,
    ) -> None:
        """Send rank 0's weights to all ranks, and prepare the buckets.

        Args:
            module: Model, on one device.
            message_size: Gradient elements from which a bucket is full.
            delay_allreduce: Whether nothing is sent before backward has ended, for backwards within each other
                (reentrant activation checkpointing).
            allreduce_always_fp32: Whether halves are sent and added in float32.
            gradient_average: Whether the sum over ranks is divided by their number. Without that, only one backward may
                be made for a step: a second one would add up sums again.
            gradient_predivide_factor: Divisor before adding up; the sum is divided by the rest of the number of ranks.
            broadcast_buffers: Whether buffers are those of rank 0 at the start, at each forward in training, and after
                each backward.
            comm: All-reduce algorithm: `auto` or a name of `dure bench`.
            process_group: Ranks that average; None for all.
            bucket_ends: Parameters at which a bucket ends, in place of `message_size`.

        Raises:
            EnvironmentLacks: There is no process group yet.
            TaskInvalid: The model has no trained parameters, or parameters on several devices or with sparse
                gradients.
        """
        super().__init__(module)
        self._trained = Trained(module, type(self).__name__)
        self._parameters_reduced = self._trained.parameters
        device = only_device(module, self._parameters_reduced, "RingDDP")
        self._group = ProcessGroup(device, process_group)
        check_alike(self._group, module, "RingDDP")
        options = RingDDPOptions(
            message_size=message_size,
            delay_allreduce=delay_allreduce,
            allreduce_always_fp32=allreduce_always_fp32,
            gradient_average=gradient_average,
            gradient_predivide_factor=gradient_predivide_factor,
        )
        self._broadcasts_buffers = broadcast_buffers
        with torch.no_grad():
            buffers = module.buffers() if broadcast_buffers else ()
            self._group.broadcast([each.detach() for each in itertools.chain(module.parameters(), buffers)])
        # a group of its own: synchronised BatchNorm uses the other one while buckets are being reduced
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        own = dist.new_group(ranks, use_local_synchronization=process_group is not None)
        algorithm = open_chosen(comm, device.type, self._group, own)
        self.gradients = FlatGradients(
            self._parameters_reduced,
            bucket_elements=options.message_size,
            tail_elements=len(self._parameters_reduced),
            bucket_ends=None if bucket_ends is None else frozenset(map(id, bucket_ends)),
            zeros=algorithm.zeros,
        )
        self._reducer = BucketReducer(algorithm, options, self._group.world_size, None, has_thread=device.type == "cpu")
        self._is_overlapped = len(self.gradients.buckets) > 1 and not options.delay_allreduce
        self._is_averaged = options.gradient_average
        self._is_called = False
        """True if the model was called after the last backward."""
        self._reached: list[nn.Parameter] = []
        self._is_running: Callable[[], bool] = _is_over
        """Function that tells whether the backward in which gradients arrive has not ended."""
        self._launches = OrderedLaunches(self.gradients.buckets, self._reducer.launch, "delay_allreduce=True")
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._arrival_hook(position))
            for position, parameter in enumerate(self._parameters_reduced)
        ]

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the model; in training its buffers are made those of rank 0 first.

        Communication: a broadcast of the buffers of each dtype.

        Raises:
            TaskInvalid: The wrapper is closed, or does not know a parameter that is trained now.
        """
        if torch.is_grad_enabled() and not self._is_copy:
            self._check_call()
            if self._broadcasts_buffers and self.training and self._synchronises and self._is_open:
                send_tensors(self._group, list(self.module.buffers()))
        return self.module(*inputs, **keywords)

    def _check_call(self) -> None:
        if self._is_open:
            self._trained.check(self.module)
        elif self.training:
            raise TaskInvalid(f"{type(self).__name__} is closed, and averages no more: train its module, or wrap it")
        self._is_called = True

    def close(self) -> None:
        """Take the hooks off, and end the thread that reduces; the gradients stay. A second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        for hook in self._hooks:
            hook.remove()
        self._reducer.close()

    # backward

    def _arrival_hook(self, position: int) -> Callable[[nn.Parameter], None]:
        keep = self.gradients.keeper(position, self._reached)

        def note(parameter: nn.Parameter) -> None:
            keep(parameter)
            if not self._synchronises:
                return
            if not self._is_running():
                self._begin_backward()
            if self._is_overlapped:
                self._launches.arrived(position)

        return note

    def _begin_backward(self) -> None:
        self._reducer.wait()  # an error may have ended the backward before
        if not self._is_averaged and not self._is_called and self._has_sums():
            raise TaskInvalid(
                "with gradient_average=False a second backward would add up the sums of the first: drop the gradients "
                "between them, and use activation checkpointing with use_reentrant=False"
            )
        self._launches.begin()
        self._is_running = call_after_backward(self._end_backward)

    def _has_sums(self) -> bool:
        reached = set(map(id, self._reached))
        pairs = zip(self._parameters_reduced, self.gradients.views, strict=True)
        return any(each.grad is view and id(each) not in reached for each, view in pairs)

    def _end_backward(self) -> None:
        """Reduce what is left, and give every parameter its mean."""
        try:
            self._note_used()
            for bucket in self._launches.rest:
                self._reducer.launch(bucket)
            self._reducer.wait()
            self._take_others()
            if self._broadcasts_buffers:  # so that an evaluation has the same on all ranks, without communication
                send_tensors(self._group, list(self.module.buffers()))
        finally:
            self._is_running = _is_over
            self._is_called = False
            self._reached.clear()

    def _note_used(self) -> None:
        """Write into the tail which parameters have a gradient, now or from an accumulation before."""
        used = [parameter.grad is not None for parameter in self._parameters_reduced]
        self.gradients.tail.copy_(torch.tensor(used, dtype=self.gradients.tail.dtype))
        for parameter, view in zip(self._parameters_reduced, self.gradients.views, strict=True):
            if parameter.grad is None:
                view.zero_()  # it contains values of a step before
            elif parameter.grad is not view:  # set by the user, or from before the model was wrapped
                view.copy_(parameter.grad)

    def _take_others(self) -> None:
        by_any = self.gradients.tail.tolist()
        for parameter, view, used in zip(self._parameters_reduced, self.gradients.views, by_any, strict=True):
            parameter.grad = view if used else None
