"""Order of samples, independent of the machines."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dure.errors import SpecInvalid
from dure.spec import RunSpec


class GlobalBatch(NamedTuple):
    """Samples of one optimiser step, over all ranks."""

    epoch: int
    indices: np.ndarray
    """Data indices `(B,)`; the last batch of an epoch may be shorter."""
    samples_seen: int
    """Number of samples of the run up to and including this batch."""
    epoch_samples: int
    """Number of samples of this epoch up to and including this batch."""


def total_samples(spec: RunSpec, order: "SampleOrder") -> int:
    """Return the number of samples of a run."""
    return spec.samples or max(1, round((spec.epochs or 1.0) * order.epoch_samples))


class SampleOrder:
    """Order of samples as a function of (data length, global batch size, seed, epoch) and nothing else.

    The permutation of epoch `e` comes from `(seed, e)` alone; step `t` takes its positions `[t*B, (t+1)*B)`. A position
    in the run is a number of samples, so a checkpoint needs only that number to continue.
    """

    def __init__(
        self, num_samples: int, global_batch_size: int, *, seed: int, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch_samples = num_samples - num_samples % global_batch_size if drop_last else num_samples
        """Number of samples used per epoch."""
        if self.epoch_samples == 0:
            raise SpecInvalid(
                [
                    f"--drop-last with {num_samples} training samples and a global batch of {global_batch_size} leaves "
                    f"nothing: use a global batch of at most {num_samples}, or keep the short batch"
                ]
            )

    def permutation(self, epoch: int) -> np.ndarray:
        """Return the data indices of an epoch in order, `(num_samples,)` int64.

        Philox (Salmon et al. 2011) is counter-based: epoch `e` does not require the epochs before it. The order is
        derived from its raw bits, which NumPy guarantees to keep; the output of a `Generator` may change (NEP 19).
        """
        if not self.shuffle:
            return np.arange(self.num_samples)
        return np.random.Philox(key=[self.seed, epoch]).random_raw(self.num_samples).argsort(kind="stable")

    def batches(self, samples_seen: int, total_samples: int) -> Iterator[GlobalBatch]:
        """Yield the batches from a position to the end of the run; the last one is cut to end exactly there."""
        while samples_seen < total_samples:
            epoch, offset = divmod(samples_seen, self.epoch_samples)
            indices = self.permutation(epoch)
            while offset < self.epoch_samples and samples_seen < total_samples:
                size = min(self.global_batch_size, self.epoch_samples - offset, total_samples - samples_seen)
                offset += size
                samples_seen += size
                yield GlobalBatch(epoch, indices[offset - size : offset], samples_seen, offset)

    def batch_sizes(self, samples_seen: int, total_samples: int) -> set[int]:
        """Return the sizes of the batches from a position to the end of the run."""
        sizes = set()
        while samples_seen < total_samples:
            left = min(self.epoch_samples - samples_seen % self.epoch_samples, total_samples - samples_seen)
            num_whole, short = divmod(left, self.global_batch_size)
            sizes |= {self.global_batch_size} if num_whole else set()
            sizes |= {short} if short else set()
            samples_seen += left
        return sizes
