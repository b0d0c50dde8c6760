"""Parts in which model and loss see the batch of a step."""

from collections.abc import Callable

from dure.data.partition import shares
from dure.spec import RunSpec
from dure.strategies.contract.data_share import DataShare


class BatchParts:
    """Sizes of microbatches, and the parts that a batch falls into by them."""

    def __init__(self, spec: RunSpec, share: Callable[[], DataShare]) -> None:
        """Take the settings, and a function that returns the rank's share."""
        self.spec = spec
        self._share = share

    @property
    def num_shares(self) -> int:
        """Number of shares into which a batch is divided over the ranks."""
        return self._share().count

    def process_size(self, microbatch_size: int) -> int:
        """Return the samples of one microbatch of this process when a device takes at most `microbatch_size`."""
        return microbatch_size

    def device_size(self, num_samples: int) -> int:
        """Return how many samples of a microbatch of this process the device computes that gets most of it."""
        return num_samples

    def default_size(self) -> int | None:
        """Return the samples of one microbatch of this process when the user set no bound; None for a whole share."""
        return None

    def microbatches(self, num_samples: int) -> list[int]:
        """Return the samples of each microbatch of all processes in a batch; a stand-in has one."""
        counts = shares(num_samples, self.num_shares)
        size = self.spec.microbatch_size
        most = self.process_size(size) if size else self.default_size() or counts[0]
        num_microbatches = -(-counts[0] // most)
        return [max(1, part) for count in counts for part in shares(count, num_microbatches)]

    def of(self, num_samples: int) -> list[int]:
        """Return the samples of each part in which model and loss see a batch."""
        return self.microbatches(num_samples)

    def calls_per_step(self) -> int:
        """Return how often this process calls the loss in one step, at most."""
        return -(-len(self.of(self.spec.global_batch_size)) // self.num_shares)
