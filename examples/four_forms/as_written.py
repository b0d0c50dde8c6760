"""Training on several devices as many tutorials write it. See docs/four-forms.md for what is wrong with it.

python examples/four_forms/as_written.py
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def digits(train: bool):
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32).flatten(1)
    is_train = torch.arange(len(images)) % 5 > 0
    return TensorDataset(images[is_train == train], torch.tensor(data.target)[is_train == train])


def train(model, loader, criterion, optimizer, rank):
    model.train()
    for images, labels in loader:
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print("loss", loss.item())


def test(model, loader, rank, best):
    model.eval()
    right, batches = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            right += (model(images).argmax(1) == labels).float().mean().item()
            batches += 1
    accuracy = right / batches
    if accuracy > best:
        torch.save(model.state_dict(), "best.pt")
        dist.barrier()
    print("rank", rank, "accuracy", accuracy)
    return max(best, accuracy)


def worker(rank, world_size):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:23456", rank=rank, world_size=world_size)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = DistributedDataParallel(model, find_unused_parameters=True)
    criterion = nn.CrossEntropyLoss()
    train_loader = DataLoader(digits(train=True), batch_size=64, shuffle=True)
    test_loader = DataLoader(digits(train=False), batch_size=64)
    best = 0.0
    for _epoch in range(3):
        train(model, train_loader, criterion, optimizer, rank)
        best = test(model, test_loader, rank, best)


if __name__ == "__main__":
    mp.spawn(worker, args=(2,), nprocs=2)
