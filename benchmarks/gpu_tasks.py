"""Small tasks of the checks on a GPU, and the loops by hand that they are compared with."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

import dure
from dure.data import TensorData
from dure.training.seeds import seed_everything
from dure.training.session.sample_order import SampleOrder

TOKENS, WIDTH = 5, 16


class Regression(dure.Task):
    """Learns a fixed map of random vectors; with `tokens`, rows count by their uneven masks."""

    kind: Literal["mean", "tokens"] = "mean"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    dtype: str = "float64"
    num_samples: int = 44
    poisoned: int = -1
    """A sample that is no number."""

    def build_model(self) -> nn.Module:
        dtype = getattr(torch, self.dtype)
        return nn.Sequential(
            nn.Linear(WIDTH, 64, dtype=dtype), nn.Tanh(), nn.Linear(64, 64, dtype=dtype), nn.Tanh(),
            nn.Linear(64, WIDTH, dtype=dtype),
        )  # fmt: skip

    def train_data(self) -> TensorData:
        return self._data(self.num_samples, 1)

    def eval_data(self) -> TensorData:
        return self._data(23, 2)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        if self.optimizer == "adamw":
            return AdamW(model.parameters(), lr=0.01)
        return SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Tensor | dure.Sum:
        x, y, mask = batch
        error = functional.mse_loss(model(x), y, reduction="none").mean(2)
        return error.mean() if self.kind == "mean" else dure.Sum((error * mask).sum(), mask.sum())

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, dure.Sum]:
        x, y, mask = batch
        return {"absolute_error": dure.Sum(((model(x) - y).abs().mean(2) * mask).sum(), mask.sum())}

    def _data(self, num_samples: int, seed: int) -> TensorData:
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        x = torch.randn(num_samples, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
        y = torch.sin(2 * x.roll(1, 2))
        lengths = torch.randint(1, TOKENS + 1, (num_samples,), generator=generator)
        if seed == 1 and self.poisoned >= 0:
            x[self.poisoned] = torch.nan
        return TensorData(x.to(dtype), y.to(dtype), torch.arange(TOKENS) < lengths[:, None])


def by_hand(
    task: Regression, file: Path, *, device: str, precision: str = "fp32", microbatch_size: int | None = None,
    global_batch_size: int, samples: int, clip_norm: float, seed: int,
) -> None:  # fmt: skip
    """Train as one writes it without dure, on one device, and write the weights."""
    seed_everything(seed)
    model = task.build_model().to(device)
    optimizer = task.build_optimizer(model)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    data = task.train_data()
    for batch in SampleOrder(task.num_samples, global_batch_size, seed=seed).batches(0, samples):
        rows = torch.from_numpy(batch.indices.copy())
        whole = [column[rows].to(device) for column in data.tensors]
        count = float(whole[2].sum()) if task.kind == "tokens" else len(rows)
        size = microbatch_size or len(rows)
        for columns in zip(*(column.split(size) for column in whole), strict=True):
            with torch.autocast(device, dtype=dtype) if dtype else nullcontext():
                loss = task.loss(model, columns)
            total = loss.total if isinstance(loss, dure.Sum) else loss * len(columns[0])
            scaler.scale(total / count).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    save_file({name: value.cpu().contiguous() for name, value in model.state_dict().items()}, file)
