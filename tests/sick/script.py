"""A script that knows nothing of dure: DistributedDataParallel, whose parts take as long as its arguments say."""

import argparse
import hashlib
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Samples(Dataset[Any]):
    """Data of which each sample takes a while to load."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 1_000

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return torch.full((16,), index / 1_000), torch.zeros(1)


class Model(nn.Module):
    """Regression with weights that are stored, sent and stepped, but take part in no computation worth the name."""

    def __init__(self, ballast: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
        self.ballast = nn.Parameter(torch.zeros(ballast))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs + self.ballast[:1].sum()


def main() -> None:
    """Train, and print a digest of the weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--loading", type=float, default=0.0)
    parser.add_argument("--computing", type=float, default=0.02)
    parser.add_argument("--late", type=float, default=0.0)
    parser.add_argument("--late-rank", type=int, default=1)
    parser.add_argument("--evaluating", type=float, default=0.0)
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--ballast", type=int, default=1)
    parser.add_argument("--metrics", type=int, default=0, help="collectives of one number each in every step")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accumulate", type=int, default=1)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Samples(asked.loading)
    model: Any = DistributedDataParallel(Model(asked.ballast))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=asked.num_workers)
    step = epoch = 0
    while step < asked.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for number, (inputs, targets) in enumerate(loader):
            is_late = dist.get_rank() == asked.late_rank
            time.sleep(asked.computing + asked.late * is_late)
            loss = (model(inputs) - targets).square().mean() / asked.accumulate
            loss.backward()
            if (number + 1) % asked.accumulate:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            for _ in range(asked.metrics):
                dist.all_reduce(loss.detach().clone())
            if asked.evaluating and step % asked.evaluate_every == 0:
                evaluate(model, asked.evaluating)
            if asked.save_every and step % asked.save_every == 0:
                torch.save(model.state_dict(), f"weights-{dist.get_rank()}.pt")
            if step == asked.steps:
                break
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    print(f"weights {digest.hexdigest()}", flush=True)
    dist.destroy_process_group()


def evaluate(model: nn.Module, seconds: float) -> None:
    """Evaluate on 100 samples, each of which takes a while to load."""
    model.eval()
    with torch.no_grad():
        for number, (inputs, _) in enumerate(DataLoader(Samples(seconds), batch_size=10)):
            model(inputs)
            if number == 9:
                break
    model.train()


if __name__ == "__main__":
    main()
