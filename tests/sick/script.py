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

    def __init__(self, ballast: int, num_layers: int, width: int) -> None:
        super().__init__()
        more = [layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(16, width), nn.ReLU(), *more, nn.Dropout(0.1), nn.Linear(width, 1))
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
    parser.add_argument("--layers", type=int, default=0, help="further layers")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--search", action="store_true", help="find_unused_parameters")
    parser.add_argument("--batch", type=int, nargs="+", default=[8], help="samples of a batch, by rank")
    parser.add_argument("--uneven", type=float, default=0.0, help="seconds that every fourth batch takes longer")
    parser.add_argument("--evaluates", type=int, default=-1, help="the rank that evaluates; -1 for all")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accumulate", type=int, default=1)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Samples(asked.loading)
    model: Any = DistributedDataParallel(
        Model(asked.ballast, asked.layers, asked.width),
        bucket_cap_mb=asked.bucket_mb,
        find_unused_parameters=asked.search,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    batch = asked.batch[min(dist.get_rank(), len(asked.batch) - 1)]
    loader = DataLoader(data, batch_size=batch, sampler=sampler, num_workers=asked.num_workers)
    step = epoch = 0
    while step < asked.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for number, (inputs, targets) in enumerate(loader):
            is_late = dist.get_rank() == asked.late_rank
            is_uneven = (number + dist.get_rank()) % 4 == 0
            time.sleep(asked.computing * batch / 8 + asked.late * is_late + asked.uneven * is_uneven)
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
            does_evaluate = asked.evaluates in (-1, dist.get_rank())
            if asked.evaluating and step % asked.evaluate_every == 0 and does_evaluate:
                evaluate(model, asked.evaluating)
            if asked.save_every and step % asked.save_every == 0:
                torch.save(model.state_dict(), f"weights-{dist.get_rank()}.pt")
            if step == asked.steps:
                break
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    # the group is not destroyed: torch frees it with the model, at the end of this function, and then waits for its
    # threads with Python's lock held, which they need too (one run of ten hangs, under torchrun as well)
    print(f"weights {digest.hexdigest()}", flush=True)


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
