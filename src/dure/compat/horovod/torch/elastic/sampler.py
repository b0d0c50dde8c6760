"""Sampler that divides the samples of an epoch that are not processed yet."""

import random
from collections.abc import Iterator
from typing import Any

import torch

from dure.compat.horovod.common.basics import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Sampler of this rank's share, which continues an epoch with other ranks after a reset."""

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        """Begin the first epoch.

        Args:
            dataset: Dataset of fixed size.
            shuffle: Whether samples are shuffled, in another order in each epoch.
            seed: Seed of the order, the same on all ranks.
        """
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; called at the end of the one before."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch."""
        self.processed_num += batch_size * self.num_replicas

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Return to a position."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Divide what is not processed yet among the ranks."""
        self.num_replicas = size()
        self.rank = rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Return this rank's samples. As in Horovod, the first ones fill up an uneven division."""
        missing = self.total_size - len(self.remaining_indices)
        filled = self.remaining_indices + self.remaining_indices[:missing]
        while 0 < len(filled) < self.total_size:
            filled += filled[: self.total_size - len(filled)]
        return iter(filled[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        """Return the number of this rank's samples."""
        return self.num_samples
