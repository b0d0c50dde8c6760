"""Parts of the batch of a step: the share of a rank, and the parts on which model and loss are called."""

import math
from dataclasses import dataclass

from dure.data.partition import shares
from dure.spec import RunSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class DataShare:
    """Share of every batch that a rank computes. Several ranks may have the same share."""

    index: int
    """Index of this rank's share, from 0."""
    count: int
    """Number of shares into which a batch is divided over the ranks."""
    takes_samples: bool = True
    """True if this rank computes on batches; False if it only stores parameters."""
    leads: bool = True
    """True if this rank counts for its share: its losses enter the sums, and its samples the records."""
    is_joint: bool = False
    """True if every forward pass needs all ranks, so that all must make the same number of passes."""

    def evaluated(self, num_batches: int) -> list[int]:
        """Return the batches that this rank evaluates; some results are discarded if all ranks must join in each."""
        if not self.takes_samples:
            return []
        mine = list(range(self.index, num_batches, self.count))
        most = math.ceil(num_batches / self.count)
        return mine + [0] * (most - len(mine)) if self.is_joint else mine

    def num_counted(self, num_batches: int) -> int:
        """Return how many of these batches count; of ranks with the same share, only the first one's do."""
        return len(range(self.index, num_batches, self.count)) if self.leads else 0


class BatchParts:
    """Sizes of microbatches, and the parts into which they divide a batch."""

    def __init__(self, spec: RunSpec, num_shares: int) -> None:
        self.spec = spec
        self.num_shares = num_shares
        """Number of shares into which a batch is divided over the ranks."""

    def process_size(self, microbatch_size: int) -> int:
        """Return the samples of one microbatch of this process if a device takes at most `microbatch_size`."""
        return microbatch_size

    def device_size(self, num_samples: int) -> int:
        """Return the most samples of one microbatch of this process that a single device computes."""
        return num_samples

    def default_size(self) -> int | None:
        """Return the samples of one microbatch of this process if the user set no limit; None for a whole share."""
        return None

    def microbatches(self, num_samples: int) -> list[int]:
        """Return the samples of each microbatch of all processes in a batch; a padding microbatch has one."""
        counts = shares(num_samples, self.num_shares)
        size = self.spec.microbatch_size
        most = self.process_size(size) if size else self.default_size() or counts[0]
        num_microbatches = -(-counts[0] // most)
        return [max(1, part) for count in counts for part in shares(count, num_microbatches)]

    def of(self, num_samples: int) -> list[int]:
        """Return the samples of each part of a batch on which model and loss are called."""
        return self.microbatches(num_samples)

    def of_loss(self, num_samples: int) -> list[int]:
        """Return the samples of each part of a batch on which the loss is called; the model may be called on less."""
        return self.of(num_samples)

    def of_model(self, num_samples: int) -> list[int]:
        """Return the samples of each part of the model's call for one microbatch; none if such calls are whole."""
        return []

    def calls_per_step(self) -> int:
        """Return the maximum number of times that this process calls the loss in one step."""
        return -(-len(self.of_loss(self.spec.global_batch_size)) // self.num_shares)
