"""Real handwritten digits with a small convolutional network: 98 to 99 % in a few seconds on two cores.

dure train examples/digits.py:Digits --nproc 2
"""

import math
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

import dure
import dure.data


class Digits(dure.Task):
    """Ten classes of 8 x 8 pixels; learns from 1,442 images, is measured on 355 others."""

    width: int = 32
    """Channels of the first convolution; the second has twice as many."""
    learning_rate: float = 3e-3
    augment: bool = False
    """Shift each training image by up to one pixel."""

    defaults = {"epochs": 15, "global_batch_size": 64}  # noqa: RUF012 - declared a ClassVar by dure.Task

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, self.width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(self.width, 2 * self.width, 3, padding=1),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * self.width * 4 * 4, 10),
        )

    def train_data(self) -> dure.data.TensorData:
        shift = dure.data.random_flip_and_crop(padding=1, flip=False)
        return dure.data.digits(train=True, transform=shift if self.augment else None)

    def eval_data(self) -> dure.data.TensorData:
        return dure.data.digits(train=False)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.learning_rate)

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Callable[[int], float]:
        def warm_up_then_half_cosine(samples: int) -> float:
            warm_up = min(1.0, samples / (0.05 * total_samples) + 0.05)
            return warm_up * 0.5 * (1 + math.cos(math.pi * min(1.0, samples / total_samples)))

        return warm_up_then_half_cosine

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, dure.Sum]:
        images, labels = batch
        return {"accuracy": dure.Sum((model(images).argmax(1) == labels).sum(), len(labels))}
