"""The mended program under one of the wrappers of `dure.parallel`. See docs/four-forms.md.

dure run --nproc 2 examples/four_forms/wrapped.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from dure.parallel import RingDDP


def digits(train: bool):
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32).flatten(1)
    is_train = torch.arange(len(images)) % 5 > 0
    return TensorDataset(images[is_train == train], torch.tensor(data.target)[is_train == train])


def train(model, loader, criterion, optimizer):
    model.train()
    total = torch.zeros(())
    for images, labels in loader:
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(labels)
    return total


def test(model, loader):
    """Return the accuracy over all samples of all ranks."""
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for images, labels in loader:
            right[0] += (model(images).argmax(1) == labels).sum()
            right[1] += len(labels)
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 10))
    model = RingDDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    train_data, test_data = digits(train=True), digits(train=False)
    sampler = DistributedSampler(train_data, drop_last=True)
    train_loader = DataLoader(train_data, batch_size=64 // world_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(Subset(test_data, range(rank, len(test_data), world_size)), batch_size=64)
    best = 0.0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = train(model, train_loader, criterion, optimizer)
        dist.all_reduce(total)
        accuracy = test(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch}  loss {total / len(train_loader) / 64:.4f}  accuracy {accuracy:.3f}")
            if accuracy > best:
                torch.save(model.module.state_dict(), "best.pt")
        best = max(best, accuracy)
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
