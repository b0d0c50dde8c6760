"""A tiny task in float64 that fails in any way, at any place, on any rank: failures as data."""

import ctypes
import io
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

import dure
from dure.data import TensorData


def fail(kind: str) -> None:
    """Go wrong."""
    if kind == "raise":
        raise ValueError("a planned failure")
    if kind == "sys_exit":
        sys.exit(7)
    if kind == "exit":
        os._exit(3)
    if kind == "exit_0":
        os._exit(0)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "hang":
        time.sleep(3600)
    if kind == "out_of_memory":
        torch.empty(2**60)
    if kind == "gpu":
        # as torch 2.13 words it
        raise torch.AcceleratorError(
            "CUDA error: uncorrectable ECC error encountered\nSearch for `cudaErrorECCUncorrectable' in "
            "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\nFor more "
            "detailed error information, run with CUDA_LOG_FILE=stderr\nCompile with `TORCH_USE_CUDA_DSA` to enable "
            "device-side assertions."
        )
    if kind == "talk":
        lines = (f"a line that is about as long as lines of logs are: {number:05d}\n" for number in range(20_000))
        sys.stdout.write("".join(lines))
    if kind == "term_self":
        os.kill(os.getpid(), signal.SIGTERM)


def is_tried() -> bool:
    """Return whether a loss is only tried before training: what it prints is discarded then."""
    return isinstance(sys.stdout, io.StringIO)


class Pixels(TensorData):
    """Samples that fail when a certain one is fetched."""

    def __init__(self, *tensors: Tensor, kind: str, index: int) -> None:
        super().__init__(*tensors)
        self.kind, self.index = kind, index

    def __getitems__(self, indices: Any) -> Any:
        if self.index in list(indices) and not is_tried():
            fail(self.kind)
        return super().__getitems__(indices)


class Faulty(dure.Task):
    fault: str = "none"
    """Kind of the fault."""
    place: str = "loss"
    """Place of the fault: `loss`, `eval`, `late eval`, `build_model`, `train_data`, `prepare_data`, `dataset`,
    `backward`, `each loss` or `none`."""
    rank: int = 0
    step: int = 3
    """The rank's microstep that goes wrong, counted in each of its processes."""
    once: str = ""
    """A file that is written the first time: after that nothing goes wrong any more."""
    num_samples: int = 97
    pause_seconds: float = 0.0
    """Per training batch."""
    paused_until: str = ""
    """A file: when it is there, there is no pause any more."""
    rank_without_pause: int = -1
    eval_pause_seconds: float = 0.0
    prepare_seconds: float = 0.0
    dropout: float = 0.0
    adam: bool = False
    width: int = 8

    def __post_init__(self) -> None:
        self.num_losses = 0

    def at(self, place: str) -> None:
        if place == self.place and not is_tried() and int(os.environ.get("RANK", "0")) == self.rank and self.is_due():
            fail(self.fault)

    def is_due(self) -> bool:
        if not self.once:
            return True
        if Path(self.once).exists():
            return False
        Path(self.once).write_text(str(time.time()))
        return True

    def prepare_data(self) -> None:
        if self.prepare_seconds:
            Path("preparing").touch()
            time.sleep(self.prepare_seconds)
        self.at("prepare_data")

    def build_model(self) -> nn.Module:
        self.at("build_model")
        layers = [nn.Linear(4, self.width), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(self.width, 1)]
        return nn.Sequential(*layers).double()

    def data(self, seed: int, num_samples: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
        return x, x.sin().sum(1, keepdim=True)

    def train_data(self) -> TensorData:
        self.at("train_data")
        x, y = self.data(1, self.num_samples + self.is_longer())
        if self.place == "nan" and self.fault == "nan":
            x[self.step] = float("nan")
        if self.place == "dataset":
            return Pixels(x, y, kind=self.fault, index=self.step)
        return TensorData(x, y)

    def is_longer(self) -> bool:
        """Return whether this rank alone has one sample more."""
        return self.fault == "longer" and int(os.environ.get("RANK", "0")) == self.rank and self.is_due()

    def eval_data(self) -> TensorData:
        return TensorData(*self.data(2, 30))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        if self.adam:
            return AdamW(model.parameters(), lr=0.01)
        return SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        if not torch.is_grad_enabled():
            time.sleep(self.eval_pause_seconds)
            self.at("late eval" if self.num_losses else "eval")  # a few samples are evaluated before training
            return functional.mse_loss(model(x), y)
        self.num_losses += 1
        if is_tried():
            return functional.mse_loss(model(x), y)
        is_quick = int(os.environ.get("RANK", "0")) == self.rank_without_pause
        if not is_quick and not (self.paused_until and Path(self.paused_until).exists()):
            time.sleep(self.pause_seconds)
        self.at("each loss")
        if self.num_losses == self.step:
            self.at("loss")
        predicted = model(x)
        if self.num_losses == self.step and self.place == "backward":
            hidden = predicted.exp()
            loss = hidden.sum()
            hidden.add_(1)
            return loss
        return functional.mse_loss(predicted, y)
