"""DataParallel: one process, a thread per device, outputs gathered on device 0.

The classic of PyTorch's first years. Every microstep has five phases: *replicate* (parameters to all devices),
*scatter* (the microbatch), *parallel apply* (forward), *gather* (outputs to device 0, where the loss is computed), and,
in backward, *reduce* (gradients to device 0).
"""

from collections.abc import Iterable

from dure.data.partition import shares
from dure.spec import RunSpec
from dure.strategies.contract.batch_parts import BatchParts
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.step_facts import Requests
from dure.strategies.data_parallel.device_replicas import DeviceReplicas
from dure.strategies.division.divided_calls import DividedCalls
from dure.torchcompat.gradients import run_backward


class EvenParts(BatchParts):
    """Parts of microbatches that are divided evenly over devices."""

    def __init__(self, spec: RunSpec, num_shares: int, num_devices: int) -> None:
        super().__init__(spec, num_shares)
        self._num_devices = num_devices

    def of(self, num_samples: int) -> list[int]:
        """Return the samples of each device in each microbatch."""
        return [part for size in self.microbatches(num_samples) for part in shares(size, self._num_devices) if part]

    def of_loss(self, num_samples: int) -> list[int]:
        """Return the samples of each microbatch: the loss itself is computed on device 0 alone."""
        return self.microbatches(num_samples)

    def of_model(self, num_samples: int) -> list[int]:
        """Return the samples of each device in the first microbatch."""
        return [part for part in shares(self.of_loss(num_samples)[0], self._num_devices) if part]

    def process_size(self, microbatch_size: int) -> int:
        """Return the samples of a microbatch of which every device gets `microbatch_size`."""
        return microbatch_size * self._num_devices

    def device_size(self, num_samples: int) -> int:
        """Return the samples of the first device, which has as many as any other."""
        return -(-num_samples // self._num_devices)


class DataParallel(DeviceReplicas):
    """One process with many devices; the loss is computed on device 0."""

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.parts = EvenParts(self.spec, self.share.count, len(self.devices))

    def distribute(self) -> None:
        """Start the threads, and intercept the calls of the model by the task's loss."""
        super().distribute()
        self._calls = DividedCalls(self.model, self.devices, self._threads, self.traits.supposed_buffers)

    def not_preserved(self) -> list[str]:
        """Return the declarations, with those of buffers that devices have set to different values."""
        self.traits = self.traits.learning(self._calls.strayed())
        return super().not_preserved()

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Accumulate the gradients of all microbatches on device 0."""
        self.sums.begin(requests)
        for microbatch in microbatches:
            with self._calls.of_batch(microbatch.num_samples):
                term = self.loss_term(self.model, microbatch, global_samples)
            run_backward(self.precision.scale(term.root))
            self.sums.add(term)

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes of parameters and buffers sent by device 0 and of gradients sent back, every microstep."""
        return num_microsteps * self.bytes_between_devices()

    def close(self) -> None:
        """Stop the threads, and restore the model's forward."""
        self._calls.close()
        super().close()
