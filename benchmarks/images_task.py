"""ResNet-50 on made-up images in host memory, as a task of dure and as functions for the loops by hand."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from resnet50 import build_resnet50
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, Optimizer
from torch.utils.data import Dataset

import dure

NUM_CLASSES = 10
NUM_IMAGES = 2048
"""Images kept in memory; a longer epoch repeats them."""
LEARNING_RATE = 1e-3


class Images(Dataset[Any]):
    """Bytes `(3, S, S)` with labels, as many as asked for."""

    def __init__(self, num_samples: int, image_size: int, num_images: int = NUM_IMAGES) -> None:
        generator = torch.Generator().manual_seed(0)
        self.num_samples = num_samples
        shape = (num_images, 3, image_size, image_size)
        self.images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(NUM_CLASSES, (num_images,), generator=generator)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[0] for column in self.__getitems__([index]))

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.rows(torch.as_tensor(indices))

    def rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Fetch a batch by one index operation per tensor."""
        rows = rows % len(self.labels)
        return self.images.index_select(0, rows), self.labels.index_select(0, rows)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor], memory_format: torch.memory_format) -> Tensor:
    """Return the mean cross entropy of bytes that are normalised where they are."""
    images, labels = batch
    pixels = (images.to(memory_format=memory_format).float() - 127.5) / 64.0
    return functional.cross_entropy(model(pixels), labels)


class ResNet50(dure.Task):
    """channels_last and a fused Adam; the precision is the run's."""

    num_samples: int
    image_size: int = 224
    num_images: int = NUM_IMAGES
    is_fused: bool = True
    memory_file: str = ""
    """File for the peak of allocated memory in bytes, written at the end; empty for none."""

    def build_model(self) -> nn.Module:
        return build_resnet50(NUM_CLASSES).to(memory_format=torch.channels_last)

    def train_data(self) -> Images:
        return Images(self.num_samples, self.image_size, self.num_images)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=LEARNING_RATE, fused=self.is_fused)

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Callable[[int], float] | None:
        # a schedule is asked at every step, in the process and at the time where memory can be read
        return self._note_memory if self.memory_file else None

    def _note_memory(self, samples_seen: int) -> float:
        Path(self.memory_file).write_text(json.dumps(torch.cuda.max_memory_allocated()))
        return 1.0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch, torch.channels_last)
