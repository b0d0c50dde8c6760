"""The same training as a task: the loop, ranks, samplers, reductions, checkpoints and logs are dure's.

dure train examples/four_forms/task.py:Digits --nproc 2
"""

from torch import Tensor, nn, optim
from torch.nn import functional

import dure
import dure.data


class Digits(dure.Task):
    """Ten classes of handwritten digits, 64 pixels each."""

    defaults = {"epochs": 3, "global_batch_size": 64}  # noqa: RUF012 - declared a ClassVar by dure.Task

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 10))

    def train_data(self) -> dure.data.TensorData:
        return dure.data.digits(train=True)

    def eval_data(self) -> dure.data.TensorData:
        return dure.data.digits(train=False)

    def build_optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, dure.Sum]:
        images, labels = batch
        return {"accuracy": dure.Sum((model(images).argmax(1) == labels).sum(), len(labels))}
