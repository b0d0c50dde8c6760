"""Share of every batch that a rank works on."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DataShare:
    """Share of every batch that a rank works on. Ranks of one share work on the same samples."""

    index: int
    """Index of this rank's share, from 0."""
    count: int
    """Number of shares into which a batch is divided over the ranks."""
    takes_samples: bool = True
    """True if this rank computes on batches; False for one that only keeps parameters."""
    leads: bool = True
    """True if this rank counts for its share: its losses enter the sums, its samples the records."""
    is_joint: bool = False
    """True if every forward pass needs all ranks, so that all must make the same number of them."""

    def evaluated(self, num_batches: int) -> list[int]:
        """Return the batches that this rank evaluates; where all must take part in each, some of them in vain."""
        if not self.takes_samples:
            return []
        mine = list(range(self.index, num_batches, self.count))
        most = math.ceil(num_batches / self.count)
        return mine + [0] * (most - len(mine)) if self.is_joint else mine

    def num_counted(self, num_batches: int) -> int:
        """Return how many of them count: of ranks that share their samples only the first's do."""
        return len(range(self.index, num_batches, self.count)) if self.leads else 0
