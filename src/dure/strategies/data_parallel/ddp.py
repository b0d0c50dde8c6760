"""DistributedDataParallel: one process per device, gradients all-reduced in buckets during backward.

The engine is torch's DDP (Li et al. 2020, section 3.2). dure adds that the step's facts (loss sum, count, stop request)
travel inside the first gradient bucket, so that exact weights and an agreed stop cost no message of their own.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dure.errors import TaskInvalid, UnusedParameters
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.replica_state import whole_replica
from dure.strategies.contract.step_facts import NO_REQUESTS, LossTerm, Requests, StepFacts
from dure.strategies.contract.strategy import Strategy
from dure.strategies.contract.watch.parameter_watch import Freezing
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.data_parallel.compression import Compression, check_compression
from dure.strategies.data_parallel.gradient_sums import add_up_gradients, sum_of_sparse
from dure.strategies.data_parallel.options import DDPOptions
from dure.terminal import few
from dure.torchcompat.collectives import buffer_option, check_reduction
from dure.torchcompat.gradients import run_backward, without_gradient_hooks
from dure.torchcompat.modules import BatchNorm
from dure.torchcompat.script_calls import ReplicaClock

_SEVERAL_PARTS = (
    "static_graph takes the graph from the first backward that ends a step, and this step has several microbatches: "
    "leave it out, or microbatch_size"
)
_OTHER_GRAPHS = {
    "mark a variable ready only once": (
        "a parameter gets its gradient more than once in a backward pass, as with reentrant checkpoints of a module "
        "that is called twice: pass --{flag}.static-graph=true if each step is like the first, or use "
        "torch.utils.checkpoint with use_reentrant=False, or the strategy naive_ddp"
    ),
    "training graph has changed": (
        "this step uses other parameters than the first one, or uses one more often, and static_graph takes all steps "
        "to be alike: pass --{flag}.find-unused-parameters=true instead"
    ),
}
"""Cures by words of errors of torch's DDP."""


def _summed(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket to the sum over ranks."""
    if bucket.buffer().is_sparse and bucket.buffer().device.type != "cpu":
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(sum_of_sparse(bucket.buffer(), group))
        return done
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return summed


class ObjectiveModule(nn.Module):
    """Task's loss as a module, so that DDP wraps the objective and the task gets the plain model.

    `carrier` is a parameter outside the optimiser. Backward starts from it too, with the step's facts as its gradient.
    DDP then adds them up over ranks and microsteps like any gradient.
    """

    def __init__(self, strategy: "DDP", model: nn.Module) -> None:
        super().__init__()
        self.model = model
        dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
        # the model's own dtype keeps the carrier in a bucket with other gradients; half precision is too coarse for
        # counts
        dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64} else torch.float32
        self.carrier = nn.Parameter(torch.zeros(4, dtype=dtype, device=strategy.device))
        self._strategy = [strategy]  # in a list: the strategy is no submodule

    def forward(self, microbatch: Microbatch | None, global_samples: int) -> tuple[Tensor, Tensor]:
        """Return the tensors that backward starts from: the objective and the carrier."""
        strategy = self._strategy[0]
        # if DDP searches the outputs for what is used, it must find an operation on the carrier
        carried = self.carrier.view(-1) if strategy.finds_unused else self.carrier
        if microbatch is None:
            return self._rehearsal(), carried
        term = strategy.loss_term(self.model, microbatch, global_samples)
        strategy.sums.add(term)
        return strategy.precision.scale(term.root), carried

    def _rehearsal(self) -> Tensor:
        """Return a zero from which every trainable parameter gets a gradient, the last parameter first."""
        sums = [p.sum() for p in self.model.parameters() if p.requires_grad]
        parts = [(each.real if each.is_complex() else each).to(self.carrier) for each in sums]
        return torch.stack(parts).sum() * 0.0


class DDP(Strategy):
    """torch's DistributedDataParallel over the objective."""

    options: DDPOptions

    rules = WeightRules(changes_in_step_only=True, sparse_gradients="of layers")

    def check_traits(self, model: nn.Module) -> list[str]:
        """Refuse sparse gradients that are compressed, or added to dense ones, which torch's DDP does not expect."""
        faults = super().check_traits(model)
        modules = dict(model.named_modules())
        sparse = {name: module for name, module in modules.items() if getattr(module, "sparse", False) is True}
        used_by_others = {
            id(p) for name in modules.keys() - sparse.keys() for p in modules[name].parameters(recurse=False)
        }
        for name, module in sparse.items():
            if any(id(p) in used_by_others for p in module.parameters(recurse=False)):
                faults.append(
                    f"{name} gives sparse gradients (sparse=True) and shares its weight with a layer that gives dense "
                    "ones, which torch's DDP cannot reduce: set sparse=False, or use naive_ddp"
                )
            elif self.options.compression is not None:
                faults.append(
                    f"{name} gives sparse gradients (sparse=True), which cannot be compressed: set sparse=False, or "
                    f"leave out --{self.info.flag}.compression"
                )
        return faults

    def distribute(self) -> None:
        """Wrap the objective in DDP, which also sends rank 0's parameters to all ranks."""
        has_sparse_gradients = any(getattr(module, "sparse", False) is True for module in self.model.modules())
        # torch's DDP divides by the world size, so the losses are multiplied by it; not if gradients are nonlinear in
        # the loss, or sparse: it divides these in place, and those of two tables whose rows are added share memory
        is_sum = (self.traits.nonlinear_gradients or has_sparse_gradients) and self.options.compression is None
        self.gradient_divisor = 1 if is_sum else self.group.world_size
        self.finds_unused = self.options.find_unused_parameters or self.options.static_graph
        """True if DDP searches for the parameters that a backward uses."""
        self._fixed_facts: dict[tuple[float, Requests], tuple[Tensor, Tensor]] = {}
        self.objective = ObjectiveModule(self, self.model)
        self._carrier = self.objective.carrier
        self.engine = DistributedDataParallel(
            self.objective,
            bucket_cap_mb=self.options.bucket_bytes / 2**20,
            gradient_as_bucket_view=self.options.gradient_as_bucket_view,
            find_unused_parameters=self.options.find_unused_parameters,
            static_graph=self.options.static_graph,
            **buffer_option(sends_in_forward=self.options.broadcast_buffers),
        )
        # on an accelerator its reducer would wait for events
        does_search = self.options.find_unused_parameters and self.device.type == "cpu" and self.group.world_size > 1
        self._search = ReplicaClock(self.engine) if does_search else None
        if not (self.finds_unused or has_sparse_gradients):
            # when it searches for unused parameters DDP keeps its first order; a rehearsal has no sparse gradients, and
            # would be the step that a static graph is taken from
            self._rehearse()
        if is_sum and self.group.world_size > 1:
            self.engine.register_comm_hook(self.engine.process_group, _summed)
        self.compression = self.carried = self._hook_compression()
        self._reduced_bytes = sum(p.numel() * p.element_size() for p in [self._carrier, *self.trainable])
        self._in_buckets = {id(parameter) for parameter in self.trainable}
        self._late: list[nn.Parameter] = []
        """Parameters that were unfrozen during the run."""
        self._is_first_step = True
        self._arrivals: list[nn.Parameter] = []
        # on an accelerator the host runs ahead: its clock does not show when a gradient was ready
        self._arrival_hooks = (
            [p.register_post_accumulate_grad_hook(self._arrivals.append) for p in self.trainable]
            if self.device.type == "cpu"
            else []
        )

    def _hook_compression(self) -> "Compression | None":
        options = self.options
        check_compression(options.compression, self.model, self.precision.scaler is not None)
        if options.compression is None or self.group.world_size == 1:
            return None
        from dure.strategies.data_parallel.compression_hooks import hook_compression  # half a second of imports

        compression = hook_compression(
            self.engine,
            options.compression,
            fraction=options.compression_fraction,
            rank=options.compression_rank,
            can_undo=self.spec.on_nonfinite == "skip",
        )
        compression.measures_error = options.compression_error
        return compression

    def _rehearse(self) -> None:
        """Fix the order of DDP's buckets by a backward without data.

        DDP orders its buckets again after its first backward. The position of a gradient in its bucket decides in which
        order the ranks' values are added. A resumed run, whose first step is another one, would round differently.

        Communication: one all_reduce of the gradients.
        """
        zero, carried = self.engine(None, 1)
        with without_gradient_hooks([*self.model.parameters()]):  # the task's own may count, or average, gradients
            run_backward(zero, (carried, torch.zeros_like(carried)))
        for parameter in self.objective.parameters():
            parameter.grad = None

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Accumulate without communication; the last microstep's backward starts the all-reduce."""
        self.sums.begin(requests)
        self.last_gradient_time = None
        if self.compression is not None:
            self.compression.begin_step(self.expectation)
            self._own_facts = torch.zeros_like(self._carrier)
        pending = iter(microbatches)
        microbatch: Microbatch | None = next(pending)
        while microbatch is not None:
            following = next(pending, None)
            is_last = following is None
            if self._is_first_step and self.options.static_graph and not is_last:
                raise TaskInvalid(_SEVERAL_PARTS)
            with nullcontext() if is_last else self.engine.no_sync():
                self._backward(microbatch, global_samples, requests if is_last else NO_REQUESTS)
            microbatch = following
        if self._is_first_step:
            self._after_first_backward()
        try:
            check_reduction(self.engine)
        except RuntimeError as error:
            raise UnusedParameters(
                "a parameter got no gradient from a rank's last microbatch, and ddp waits for all of them: "
                f"{self._unused_cure()}"
            ) from error

    def _backward(self, microbatch: Microbatch, global_samples: int, requests: Requests) -> None:
        root, carried = self.engine(microbatch, global_samples)
        facts = self._facts(self.sums.terms[-1], requests)
        if self.compression is not None:
            # compressed buckets cannot carry exact numbers
            self._own_facts += facts
            facts = torch.zeros_like(facts)
        try:
            run_backward(root, (carried, facts))
        except RuntimeError as error:
            cure = next((cure for words, cure in _OTHER_GRAPHS.items() if words in str(error)), None)
            if cure is None:
                raise
            raise TaskInvalid(cure.format(flag=self.info.flag)) from error

    def _facts(self, term: LossTerm, requests: Requests) -> Tensor:
        """Return a microbatch's `[loss sum, count, stop, save]`."""
        carrier, count = self._carrier, term.count
        loss = term.value.to(carrier.dtype)
        if isinstance(count, Tensor) or count != term.factor:
            count = count.to(carrier, non_blocking=True) if isinstance(count, Tensor) else torch.full_like(loss, count)
            return torch.stack([loss * term.factor, count, *(torch.full_like(loss, request) for request in requests)])
        # a mean over samples has the same few counts in every step, so the constants are made once
        if (count, requests) not in self._fixed_facts:
            self._fixed_facts[count, requests] = (
                torch.tensor([0.0, count, *requests], dtype=carrier.dtype, device=carrier.device),
                torch.tensor([count, 0.0, 0.0, 0.0], dtype=carrier.dtype, device=carrier.device),
            )
        base, unit = self._fixed_facts[count, requests]
        return torch.addcmul(base, unit, loss)

    def _unused_cure(self) -> str:
        instead = ", and no static_graph" if self.options.static_graph else ""
        return (
            f"pass --{self.info.flag}.find-unused-parameters=true{instead}, use their output in the loss, or freeze "
            "them (requires_grad=False)"
        )

    def _after_first_backward(self) -> None:
        self._is_first_step = False
        if not self.finds_unused:
            unused = [name for name, p in self.model.named_parameters() if id(p) in self._in_buckets and p.grad is None]
            if unused:
                raise UnusedParameters(
                    f"{len(unused)} parameter(s) got no gradient in the first step, and ddp waits for all of them: "
                    f"{few(unused, 8)}; {self._unused_cure()}"
                )
        for hook in self._arrival_hooks:
            hook.remove()
        if self._arrivals:
            # autograd's order is the same in every step: a hook on the last gradient is enough
            self._arrivals[-1].register_post_accumulate_grad_hook(self._note_arrival)
        self._arrivals.clear()

    def _note_arrival(self, parameter: Tensor) -> None:
        self.last_gradient_time = time.perf_counter()

    def sync_gradients(self) -> StepFacts:
        """Read the facts that came with the gradients; DDP has waited for both at the end of backward.

        Communication: in addition to DDP's own, one all_reduce for each gradient of a parameter that was unfrozen
        during the run.
        """
        if self._late:
            self._reduce_late()
        facts = self._carrier.grad
        assert facts is not None
        if self.compression is not None:
            self.compression.unit = self.expectation
            self.group.all_reduce_sum(self._own_facts)
            facts = self._own_facts / self.gradient_divisor
        if self.device.type == "cpu":
            known = [fact * self.gradient_divisor for fact in facts.tolist()]
            self.sums.count = known[1]
            return StepFacts(known, self.sums.terms)
        summed = facts * self.gradient_divisor
        self.sums.count = summed[1]
        return StepFacts(summed, self.sums.terms)

    def _reduce_late(self) -> None:
        add_up_gradients(self._late, self.group)
        for parameter in self._late:
            if parameter.grad is not None:
                parameter.grad /= self.gradient_divisor

    def follow_freezing(self, freezing: Freezing) -> None:
        """Reduce the gradients of unfrozen parameters one by one: they are in no bucket of DDP.

        Raises:
            TaskInvalid: Parameters were frozen, and DDP waits for all of them.
        """
        if self.rules.freezing == "refused":  # zero1
            super().follow_freezing(freezing)
        if freezing.frozen and not self.options.find_unused_parameters:
            raise TaskInvalid(
                f"the task's loss froze {', '.join(freezing.frozen[:4])} during the run, and {self.info.name} waits "
                f"for all gradients that it began with: pass --{self.info.flag}.find-unused-parameters=true, or use "
                "naive_ddp"
            )
        self.train_all()
        self._late = [p for p in self.trainable if id(p) not in self._in_buckets]

    def skip_step(self) -> None:
        """Skip the step, and discard the errors of compression too."""
        super().skip_step()
        if self.compression is not None:
            self.compression.undo_step()

    def zero_gradients(self) -> None:
        """Drop the carrier's gradient too."""
        super().zero_gradients()
        self._carrier.grad = None

    def not_preserved(self) -> list[str]:
        """Return the differences from the one-device run; those of buffers that are not sent only if there are any."""
        texts = super().not_preserved()
        has_batchnorm = any(isinstance(module, BatchNorm) for module in self.model.modules())
        learns = self.traits.learned_buffers or (has_batchnorm and self.traits.learns_statistics)
        if learns and not self.options.broadcast_buffers and self.group.world_size > 1:
            texts.append(
                "broadcast_buffers is off: what a forward in training reads of buffers, as of BatchNorm in eval mode, "
                "is what its own rank has learned"
            )
        return texts

    replica = whole_replica

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return 2 (P-1)/P of the gradients' bytes, as a bandwidth-optimal all-reduce sends; less if compressed."""
        if self.compression is not None:
            return self.compression.step.sent_bytes
        world_size = self.group.world_size
        return 2 * (world_size - 1) * self._reduced_bytes // world_size

    def measured(self) -> "dict[str, float] | Callable[[], dict[str, float]] | None":
        """Return the savings and the error of compression, and the bytes of parameters that were found to be unused.

        On an accelerator it is a function that reads them later.
        """
        if self.compression is not None:
            return self.compression.measured(self.device)
        reduced = None if self._search is None else self._search.last_reduction()
        return None if reduced is None or reduced.unused_bytes is None else {"unused_bytes": reduced.unused_bytes}

    def close(self) -> None:
        """Destroy DDP's reducer before the process group."""
        self.sums.begin(NO_REQUESTS)
        del self.engine
