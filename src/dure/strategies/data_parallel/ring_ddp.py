"""Data parallelism with dure's own reducer: one flat gradient buffer, buckets, any all-reduce algorithm.

It does what torch's DDP does (Li et al. 2020), in Python over `dure.comm`. Gradients are views into one flat buffer.
Backward fills its buckets in reverse order, and they are reduced while backward still runs: on the CPU by another
thread, on an accelerator by asynchronous calls. Apex's options have their own names here: `message_size`,
`delay_allreduce`, `allreduce_always_fp32`, `gradient_average`, `gradient_predivide_factor`. The simple counterpart is
`naive_ddp`.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from dure.comm.algorithms.base import AllReduce, ReduceOp
from dure.comm.buckets import Bucket, FlatGradients
from dure.comm.choice import open_chosen
from dure.errors import TaskInvalid
from dure.spec import RunSpec
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.replica_state import whole_replica
from dure.strategies.contract.step_facts import Requests, StepFacts
from dure.strategies.contract.strategy import Strategy
from dure.strategies.contract.watch.parameter_watch import Freezing
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.data_parallel.compression import Compression, check_compression, open_compression
from dure.strategies.data_parallel.gradient_sums import add_up_gradients
from dure.strategies.data_parallel.options import RingDDPOptions
from dure.torchcompat.gradients import run_backward

NUM_FACTS = 4


class RingDDP(Strategy):
    """One process per device; flat gradients, reduced in buckets by an algorithm of `dure.comm`."""

    options: RingDDPOptions

    rules = WeightRules(changes_in_step_only=True, sparse_gradients="none")

    @classmethod
    def check_model(cls, model: nn.Module, spec: RunSpec) -> list[str]:
        """Refuse sparse gradients, which cannot be views into a flat buffer, and options that exclude each other."""
        faults = []
        options = RingDDPOptions.of(spec)
        if options.compression == "powersgd":
            faults.append("compression powersgd is a hook of torch's DDP: use --strategy ddp, or topk or int8 here")
        if options.compression and (not options.gradient_average or options.gradient_predivide_factor != 1.0):
            faults.append("a compression divides by itself: leave gradient_average and gradient_predivide_factor out")
        return faults + [
            f"{name} gives sparse gradients (sparse=True), which have no place in a flat buffer: use ddp or naive_ddp"
            for name, module in model.named_modules()
            if getattr(module, "sparse", False) is True
        ]

    def distribute(self) -> None:
        """Send rank 0's weights to all ranks, and lay out the buffer."""
        super().distribute()
        options, world_size = self.options, self.group.world_size
        if self.traits.nonlinear_gradients and options.compression is None:
            # gradients that are nonlinear in the loss change if the losses are multiplied
            options = options.model_copy(update={"gradient_average": False, "gradient_predivide_factor": 1.0})
        self.group.broadcast([*self.model.parameters(), *self.model.buffers()])
        # a gradient is a weighted sum over ranks: losses are multiplied by the divisor of the options
        self.gradient_divisor = world_size if options.gradient_average else options.gradient_predivide_factor
        # a separate group: synchronised BatchNorm uses the default one while buckets are being reduced
        self._process_group = self.group.subgroup() if world_size > 1 else None
        check_compression(options.compression, self.model, self.precision.scaler is not None)
        algorithm = open_chosen(self.spec.comm, self.device.type, self.group, self._process_group)
        self.gradients = FlatGradients(
            self.trainable,
            bucket_elements=options.message_size,
            tail_elements=NUM_FACTS + len(self.trainable),
            zeros=algorithm.zeros,
        )
        self._late: list[nn.Parameter] = []
        """Parameters that were unfrozen during the run."""
        self._facts = self.gradients.tail[:NUM_FACTS]
        self._used = self.gradients.tail[NUM_FACTS:]
        # On an accelerator the host only queues calls. Another thread would queue them among those of autograd's thread
        # (synchronised BatchNorm), in an order that differs between ranks: a deadlock.
        has_thread = self.device.type == "cpu"
        self.compression = self.carried = self._open_compression()
        self.reducer = BucketReducer(algorithm, options, world_size, self.compression, has_thread=has_thread)
        self._is_overlapped = len(self.gradients.buckets) > 1 and not options.delay_allreduce
        self._reached: list[nn.Parameter] = []
        """Parameters to which backward has given a gradient in this step."""
        self._launches = OrderedLaunches(self.gradients.buckets, self.reducer.launch, "--ring-ddp.delay-allreduce")
        self._is_last = False
        self._is_all_reached = True
        for position, parameter in enumerate(self.trainable):
            keep = self.gradients.keeper(position, self._reached)
            hook = self._arrival_hook(position, keep) if self._is_overlapped else keep
            parameter.register_post_accumulate_grad_hook(hook)

    def _open_compression(self) -> Compression | None:
        options = self.options
        if options.compression is None or self.group.world_size == 1:
            return None
        compression = open_compression(
            options.compression,
            self._process_group,
            fraction=options.compression_fraction,
            can_undo=self.spec.on_nonfinite == "skip",
        )
        compression.measures_error = options.compression_error
        return compression

    def describe(self) -> list[str]:
        """Return the name of the algorithm that sums the gradients."""
        num_buckets = len(self.gradients.buckets)
        when = "while backward runs" if self._is_overlapped else "after backward"
        return [
            f"gradients in {num_buckets} bucket{'s' if num_buckets > 1 else ''} through {self.reducer.algorithm.name} "
            f"(--comm {self.spec.comm}), {when}"
        ]

    # backward

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Accumulate without communication; the last microstep's backward launches the buckets that it fills."""
        self.sums.begin(requests)
        self._reached.clear()
        self._launches.begin()
        if self.compression is not None:
            self.compression.begin_step(self.expectation)
        pending = iter(microbatches)
        microbatch: Microbatch | None = next(pending)
        while microbatch is not None:
            term = self.loss_term(self.model, microbatch, global_samples)
            following = next(pending, None)
            self._is_last = following is None
            run_backward(self.precision.scale(term.root))
            self.sums.add(term)
            microbatch = following
        self._is_last = False

    def _arrival_hook(self, position: int, keep: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:

        def note(parameter: nn.Parameter) -> None:
            keep(parameter)
            if self._is_last:
                self._launches.arrived(position)

        return note

    # communication

    def sync_gradients(self) -> StepFacts:
        """Send the remaining buckets, the facts with the last, and wait for all of them."""
        self._write_tail()
        rest = self._launches.rest
        if len(rest) == len(self.gradients.buckets):
            for bucket in rest:
                self.reducer.reduce(bucket)
        else:
            for bucket in rest:
                self.reducer.launch(bucket)
            self.reducer.wait()
        if self.compression is not None:
            self.compression.unit = self.expectation
        self._take_others()
        add_up_gradients(self._late, self.group)
        for parameter in self._late:
            if parameter.grad is not None:
                parameter.grad /= self.gradient_divisor
        if self.device.type != "cpu":
            summed = self._facts * self.gradient_divisor
            self.sums.count = summed[1]
            return StepFacts(summed, self.sums.terms)
        known = [fact * self.gradient_divisor for fact in self._facts.tolist()]
        self.sums.count = known[1]
        return StepFacts(known, self.sums.terms)

    def _write_tail(self) -> None:
        facts = self.sums.facts()
        self._facts.copy_(facts if isinstance(facts, Tensor) else torch.tensor(facts, dtype=self._facts.dtype))
        reached = {id(parameter) for parameter in self._reached}
        self._is_all_reached = len(reached) == len(self.trainable)
        if self._is_all_reached:
            self._used.fill_(1.0)
        else:
            self._used.copy_(torch.tensor([float(id(p) in reached) for p in self.trainable], dtype=self._used.dtype))
            for parameter, view in zip(self.trainable, self.gradients.views, strict=True):
                if id(parameter) not in reached:
                    view.zero_()  # it contains values of the step before

    def _take_others(self) -> None:
        """Take gradients that only other ranks had. Unused parameters get none: a zero would apply momentum."""
        if self._is_all_reached:
            return  # used by this rank at least; no need to wait for an accelerator
        used = self._used.tolist()
        for parameter, view, by_any in zip(self.trainable, self.gradients.views, used, strict=True):
            parameter.grad = view if by_any else None

    def follow_freezing(self, freezing: Freezing) -> None:
        """Reduce the gradients of unfrozen parameters one by one: they are in no bucket."""
        in_buckets = {id(parameter) for parameter in self.trainable}
        self._late = [p for p in self.model.parameters() if p.requires_grad and id(p) not in in_buckets]

    def zero_gradients(self) -> None:
        """Drop all gradients, also those of parameters that were unfrozen during the run."""
        super().zero_gradients()
        for parameter in self._late:
            parameter.grad = None

    def skip_step(self) -> None:
        """Skip the step, and discard the errors of compression too."""
        super().skip_step()
        if self.compression is not None:
            self.compression.undo_step()

    replica = whole_replica

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes that the algorithm sends for all buckets, after compression if there is one."""
        compressed = 0 if self.compression is None else self.compression.step.sent_bytes
        return compressed + sum(self.reducer.sent_bytes_for(bucket) for bucket in self.gradients.buckets)

    def measured(self) -> "dict[str, float] | Callable[[], dict[str, float]] | None":
        """Return the savings and the error of compression; on an accelerator a function that reads them later."""
        return None if self.compression is None else self.compression.measured(self.device)

    def close(self) -> None:
        """Stop the thread, and close the algorithm."""
        self.reducer.close()


class OrderedLaunches:
    """Buckets of one backward, launched in their order as they are filled; the last one waits for its tail."""

    def __init__(self, buckets: Sequence[Bucket], launch: Callable[[Bucket], None], cure: str) -> None:
        """Prepare for buckets.

        Args:
            buckets: Buckets, in the order in which every rank reduces them.
            launch: Starts to reduce one.
            cure: Option that sends nothing before backward has ended, for a model that needs that.
        """
        self._buckets, self._launch, self._cure = buckets, launch, cure
        self._bucket_of = {position: number for number, bucket in enumerate(buckets) for position in bucket.positions}
        self._waiting: list[set[int]] = []
        self._launched = 0

    @property
    def rest(self) -> Sequence[Bucket]:
        """Buckets that are not launched yet."""
        return self._buckets[self._launched :]

    def begin(self) -> None:
        """Begin a backward, in which no bucket is launched yet."""
        self._waiting = [set(bucket.positions) for bucket in self._buckets]
        self._launched = 0

    def arrived(self, position: int) -> None:
        """Note that a parameter has its gradient, and launch the buckets that are full.

        Raises:
            TaskInvalid: Its bucket was launched before.
        """
        bucket, last = self._bucket_of[position], len(self._buckets) - 1
        if bucket == last:
            return  # it carries the tail, which is known after backward
        if bucket < self._launched:
            raise TaskInvalid(
                "a parameter got a second gradient after its bucket had been sent (a part of the model runs its "
                f"backward twice, as reentrant activation checkpointing does): pass {self._cure}"
            )
        self._waiting[bucket].discard(position)
        # every rank must reduce in the same order, so a full bucket waits for those before it
        while self._launched < last and not self._waiting[self._launched]:
            self._launch(self._buckets[self._launched])
            self._launched += 1


class BucketReducer:
    """Reducer that sums buckets over all ranks, in the order in which they are launched."""

    def __init__(
        self,
        algorithm: AllReduce,
        options: RingDDPOptions,
        world_size: int,
        compression: Compression | None,
        *,
        has_thread: bool = True,
    ) -> None:
        """Prepare the reducer.

        Args:
            algorithm: All-reduce algorithm.
            options: Options for dividing and widening gradients.
            world_size: Number of ranks.
            compression: Reduces in place of the algorithm, if there is one.
            has_thread: Reduce launched buckets in another thread; otherwise only the algorithm's calls are
                asynchronous.
        """
        self.algorithm = algorithm
        self.compression = compression
        self._is_widened = options.allreduce_always_fp32
        self._predivide = options.gradient_predivide_factor
        self._world_size = world_size
        self._postdivide = world_size / self._predivide if options.gradient_average else 1.0
        # the plain mean is left to the algorithm, in which a rank divides its shard only instead of the whole vector
        is_mean = options.gradient_average and self._predivide == 1.0
        self._op: ReduceOp = "mean" if is_mean else "sum"
        self._launched: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._num_under_way = 0
        self._has_thread = has_thread
        self._finishes: list[Callable[[], None]] = []
        """Functions that finish the reductions begun in the caller's thread."""
        self._thread: threading.Thread | None = None

    def launch(self, bucket: Bucket) -> None:
        """Start to reduce a bucket in the background; it may not be touched until `wait`."""
        if not self._has_thread:
            self._finishes.append(self._begin(bucket))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="dure-reducer", daemon=True)
            self._thread.start()
        self._num_under_way += 1
        self._launched.put(bucket)

    def wait(self) -> None:
        """Wait for all launched buckets.

        Raises:
            RuntimeError: A peer is gone.
        """
        finishes, self._finishes = self._finishes, []
        for finish in finishes:
            finish()
        errors = [self._done.get() for _ in range(self._num_under_way)]
        self._num_under_way = 0
        for error in errors:
            if error is not None:
                raise error

    def _work(self) -> None:
        while (bucket := self._launched.get()) is not None:
            error: BaseException | None = None
            try:
                self.reduce(bucket)
            except BaseException as raised:
                error = raised
            self._done.put(error)

    def reduce(self, bucket: Bucket) -> None:
        """Reduce a bucket now, in this thread."""
        self._begin(bucket)()

    def _begin(self, bucket: Bucket) -> Callable[[], None]:
        """Start to reduce a bucket, and return a function that finishes it."""
        if self.compression is not None:
            self.compression.reduce_mean(bucket.gradients, bucket.index)
            return self.algorithm.start(bucket.tail, "mean") if bucket.tail.numel() else lambda: None
        vector = self._as_sent(bucket.vector)
        if self._predivide != 1.0:
            vector.div_(self._predivide)
        op = self._op
        if op == "mean" and vector.dtype is torch.float16:  # the sum of scaled gradients would be infinite
            vector.div_(self._world_size)
            op = "sum"
        wait = self.algorithm.start(vector, op)

        def finish() -> None:
            wait()
            if self._op == "sum" and self._postdivide != 1.0:
                vector.div_(self._postdivide)
            if vector is not bucket.vector:
                bucket.vector.copy_(vector)

        return finish

    def _as_sent(self, vector: Tensor) -> Tensor:
        is_half = vector.dtype in (torch.float16, torch.bfloat16)
        return vector.float() if self._is_widened and is_half else vector

    def sent_bytes_for(self, bucket: Bucket) -> int:
        """Return the bytes that this rank sends for a bucket."""
        vector = bucket.vector if self.compression is None else bucket.tail
        is_half = vector.dtype in (torch.float16, torch.bfloat16)
        width = 4 if self._is_widened and is_half else vector.element_size()
        return self.algorithm.sent_bytes_for(vector.numel(), width)

    def close(self) -> None:
        """Stop the thread after the launched buckets."""
        if self._thread is not None:
            self._launched.put(None)
            self._thread.join()
        self.algorithm.close()
