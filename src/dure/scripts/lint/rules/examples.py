"""Scripts that have each fault, and the same scripts without it."""

_DDP = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank)
"""
_END = "dist.destroy_process_group()\n"


def _ddp(text: str) -> str:
    """Return a script that opens a process group first and destroys it at its end."""
    return f"{_DDP}{text}{_END}"


_SAMPLER_BAD = """\
loader = DataLoader(train_set, batch_size=global_batch // dist.get_world_size(), shuffle=True)
for images, labels in loader:
    loss = criterion(model(images.to(device)), labels.to(device))
    loss.backward()
    optimizer.step()
"""
_EPOCHS = """\
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=global_batch // dist.get_world_size(), sampler=sampler)
for epoch in range(10):
    for images, labels in loader:
        criterion(model(images.to(device)), labels.to(device)).backward()
        optimizer.step()
"""
_PEEK_BAD = """\
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=global_batch // dist.get_world_size(), sampler=sampler)
for epoch in range(10):
    print(len(next(iter(loader))[0]))
    sampler.set_epoch(epoch)
    for images, labels in loader:
        criterion(model(images.to(device)), labels.to(device)).backward()
        optimizer.step()
"""
_SAVED_BAD = """\
model = DDP(model.to(device))
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
"""
_REPLICAS_BAD = """\
import torch

model = torch.nn.DataParallel(model).cuda()
for images, labels in loader:
    criterion(model(images.cuda()), labels.cuda()).backward()
    optimizer.step()
"""
_BARRIER_BAD = """\
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
    dist.barrier()
"""
_STOP_BAD = """\
model = DDP(model.to(device))
for images, labels in loader:
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and time_is_up():
        break
"""
_STOP_GOOD = """\
model = DDP(model.to(device))
for images, labels in loader:
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    stop = torch.tensor(float(time_is_up()), device=device)
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if stop > 0:
        break
"""
_HANDLER_BAD = """\
try:
    train_epoch(model, loader)
except RuntimeError:
    save_what_is_left(model)
    dist.barrier()
"""
_HANDLER_GOOD = """\
try:
    train_epoch(model, loader)
except RuntimeError:
    save_what_is_left(model)
    raise
"""
_MODULE_BAD = """\
model = DDP(model.to(device))
for images, labels in loader:
    loss = criterion(model.module(images), labels)
    loss.backward()
    optimizer.step()
"""
_MEANS_BAD = """\
model.eval()
total = 0.0
with torch.no_grad():
    for images, labels in loader:
        total += criterion(model(images.to(device)), labels.to(device))
mean = total / len(loader)
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
"""
_MEANS_GOOD = """\
model.eval()
both = torch.zeros(2, device=device)
with torch.no_grad():
    for images, labels in loader:
        loss = criterion(model(images.to(device)), labels.to(device))
        both += torch.stack([loss * len(labels), torch.tensor(float(len(labels)), device=device)])
dist.all_reduce(both)
mean = both[0] / both[1]
"""
_REDUCED_BAD = """\
loader = DataLoader(test_set, batch_size=64, sampler=DistributedSampler(test_set, shuffle=False))
correct = 0
with torch.no_grad():
    for images, labels in loader:
        correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
print("accuracy", correct / len(test_set))
"""
_ONE_RANK_BAD = """\


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            record(model(images.to(device)), labels)


for epoch in range(10):
    train_epoch(model, train_loader)
    if dist.get_rank() == 0:
        evaluate(model, test_loader)
"""
_ALL_BAD = """\
test_loader = DataLoader(test_set, batch_size=64)
model.eval()
with torch.no_grad():
    for images, labels in test_loader:
        record(model(images.to(device)), labels)
"""
_LOAD_BAD = """\
checkpoint = torch.load("checkpoint.pt")
model.load_state_dict(checkpoint["model"])
"""
_READ_BAD = """\
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "start.pt")
model.load_state_dict(torch.load("start.pt", map_location=device))
"""
_NORM_BAD = """\
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten())
model = model.to(device)
model = DDP(model, device_ids=[local_rank])
for images, labels in loader:
    criterion(model(images), labels).backward()
    optimizer.step()
"""
_RATE_BAD = """\
loader = DataLoader(train_set, batch_size=32, sampler=DistributedSampler(train_set))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for images, labels in loader:
    criterion(model(images.to(device)), labels.to(device)).backward()
    optimizer.step()
"""
_OTHER_BAD = """\
model = build(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = build(config)
for images, labels in loader:
    criterion(model(images.to(device)), labels.to(device)).backward()
    optimizer.step()
"""
_ORDER_BAD = """\
from torch.distributed.fsdp import fully_shard

model = build(config).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fully_shard(model)
"""
_UNUSED_BAD = """\


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.second(self.first(x).relu())


model = DDP(Net().to(device), find_unused_parameters=True)
"""
_SEED_BAD = """\
from torchvision import transforms

torch.manual_seed(0)
model = DDP(build().to(device))
train_set.transform = transforms.Compose([transforms.RandomCrop(32), transforms.ToTensor()])
"""
_SEED_GOOD = """\
from torchvision import transforms

torch.manual_seed(0)
model = DDP(build().to(device))
torch.manual_seed(dist.get_rank())
train_set.transform = transforms.Compose([transforms.RandomCrop(32), transforms.ToTensor()])
"""
_WEIGHTS_BAD = """\
torch.manual_seed(dist.get_rank())
model = build().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for images, labels in loader:
    criterion(model(images), labels).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
"""
_ITEM_BAD = """\
total = 0.0
for images, labels in loader:
    loss = criterion(model(images.to(device)), labels.to(device))
    loss.backward()
    optimizer.step()
    total += loss.item()
"""
_ACCUMULATION_BAD = """\
model = DDP(model.to(device))
for step, (images, labels) in enumerate(loader, 1):
    (criterion(model(images), labels) / 4).backward()
    if step % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
_ACCUMULATION_GOOD = """\
model = DDP(model.to(device))
for step, (images, labels) in enumerate(loader, 1):
    with contextlib.nullcontext() if step % 4 == 0 else model.no_sync():
        (criterion(model(images), labels) / 4).backward()
    if step % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
_CLIP_BAD = """\
for images, labels in loader:
    scaler.scale(criterion(model(images), labels)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
_START_BAD = """\
import os
import torch.distributed as dist

os.environ["MASTER_ADDR"] = "localhost"
dist.init_process_group("gloo", rank=rank, world_size=2)
dist.destroy_process_group()
"""
_PORT_BAD = """\
import os
import torch.distributed as dist

os.environ["MASTER_PORT"] = "12355"
dist.init_process_group("gloo", rank=rank, world_size=2)
dist.destroy_process_group()
"""
_ARGUMENT_BAD = """\
import argparse
import os
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
torch.cuda.set_device(args.local_rank)
dist.init_process_group("nccl")
dist.destroy_process_group()
"""
_WORKERS_BAD = """\
loader = DataLoader(train_set, batch_size=32, sampler=DistributedSampler(train_set), num_workers=os.cpu_count())
"""

BAD = {
    "DURE101": _ddp(_SAMPLER_BAD),
    "DURE102": _ddp("loader = DataLoader(train_set, shuffle=True, sampler=DistributedSampler(train_set))\n"),
    "DURE103": _ddp(_EPOCHS),
    "DURE104": _ddp(_PEEK_BAD),
    "DURE201": _ddp(_BARRIER_BAD),
    "DURE202": _ddp(_STOP_BAD),
    "DURE203": _ddp(_HANDLER_BAD),
    "DURE204": _ddp(_MODULE_BAD),
    "DURE301": _ddp(_MEANS_BAD),
    "DURE302": _ddp(_REDUCED_BAD),
    "DURE303": _ddp(_ONE_RANK_BAD),
    "DURE304": _ddp(_ALL_BAD),
    "DURE401": _ddp('torch.save(model.state_dict(), "model.pt")\n'),
    "DURE402": _ddp(_READ_BAD),
    "DURE403": _ddp(_LOAD_BAD),
    "DURE404": _ddp(_SAVED_BAD),
    "DURE501": _ddp(_NORM_BAD),
    "DURE502": _ddp(_RATE_BAD),
    "DURE503": _ddp(_OTHER_BAD),
    "DURE504": _ddp("model = DDP(build(), device_ids=[local_rank]).to(device)\n"),
    "DURE505": _ddp(_ORDER_BAD),
    "DURE506": _ddp("model = DDP(build().to(device))\nmodel = torch.nn.DataParallel(model)\n"),
    "DURE507": _ddp(_UNUSED_BAD),
    "DURE508": _ddp(_SEED_BAD),
    "DURE509": _ddp(_WEIGHTS_BAD),
    "DURE510": _REPLICAS_BAD,
    "DURE601": _ddp(_ITEM_BAD),
    "DURE602": _ddp(_ACCUMULATION_BAD),
    "DURE603": _ddp(_CLIP_BAD),
    "DURE701": _START_BAD,
    "DURE702": _PORT_BAD,
    "DURE703": _ARGUMENT_BAD,
    "DURE704": _DDP + "train(model)\n",
    "DURE705": _ddp(_WORKERS_BAD),
}
"""Script with the fault of each rule."""

GOOD = {
    "DURE101": BAD["DURE101"].replace("shuffle=True", "sampler=DistributedSampler(train_set)"),
    "DURE102": BAD["DURE102"].replace("shuffle=True", "shuffle=False"),
    "DURE103": BAD["DURE103"].replace("range(10):\n", "range(10):\n    sampler.set_epoch(epoch)\n"),
    "DURE104": BAD["DURE104"].replace("    print(len(next(iter(loader))[0]))\n", "    print(loader.batch_size)\n"),
    "DURE201": BAD["DURE201"].replace("    dist.barrier()", "dist.barrier()"),
    "DURE202": _ddp(_STOP_GOOD),
    "DURE203": _ddp(_HANDLER_GOOD),
    "DURE204": BAD["DURE204"].replace("model.module(images)", "model(images)"),
    "DURE301": _ddp(_MEANS_GOOD),
    "DURE302": BAD["DURE302"].replace("print(", "dist.all_reduce(correct)\nprint("),
    "DURE303": BAD["DURE303"]
    .replace("    if dist.get_rank() == 0:\n", "")
    .replace("        evaluate(model, test", "    evaluate(model, test"),
    "DURE304": BAD["DURE304"].replace(
        "DataLoader(test_set, batch_size=64)",
        "DataLoader(test_set, batch_size=64, sampler=DistributedSampler(test_set, shuffle=False))",
    ),
    "DURE401": _ddp('if dist.get_rank() == 0:\n    torch.save(model.state_dict(), "model.pt")\n'),
    "DURE402": BAD["DURE402"].replace("model.load_state", "dist.barrier()\nmodel.load_state"),
    "DURE403": BAD["DURE403"].replace('"checkpoint.pt"', '"checkpoint.pt", map_location="cpu"'),
    "DURE404": BAD["DURE404"].replace("model.state_dict()", "model.module.state_dict()"),
    "DURE501": BAD["DURE501"].replace(
        "model = model.to(device)", "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)"
    ),
    "DURE502": BAD["DURE502"].replace("lr=0.1)", "lr=0.1 * dist.get_world_size())"),
    "DURE503": _ddp(
        _OTHER_BAD.replace("model = build(config)\n", "", 1)
        .replace("optimizer = ", "model = build(config)\noptimizer = ", 1)
        .replace("lr=0.1)\nmodel = build(config)\n", "lr=0.1)\n")
    ),
    "DURE504": _ddp("model = DDP(build().to(device), device_ids=[local_rank])\n"),
    "DURE505": _ddp(
        "from torch.distributed.fsdp import fully_shard\n\nmodel = build(config).to(device)\nfully_shard(model)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    ),
    "DURE506": _ddp("model = DDP(build().to(device))\n"),
    "DURE507": BAD["DURE507"].replace(", find_unused_parameters=True", ""),
    "DURE508": _ddp(_SEED_GOOD),
    "DURE509": BAD["DURE509"].replace("torch.manual_seed(dist.get_rank())", "torch.manual_seed(0)"),
    "DURE510": _ddp(
        _REPLICAS_BAD.partition("\n\n")[2].replace("torch.nn.DataParallel(model).cuda()", "DDP(model.cuda())")
    ),
    "DURE601": _ddp(_ITEM_BAD.replace("loss.item()", "loss.detach()")),
    "DURE602": _ddp("import contextlib\n\n" + _ACCUMULATION_GOOD),
    "DURE603": BAD["DURE603"].replace("    torch.nn.utils", "    scaler.unscale_(optimizer)\n    torch.nn.utils"),
    "DURE701": BAD["DURE701"].replace('os.environ["MASTER_ADDR"] = "localhost"\n', ""),
    "DURE702": BAD["DURE702"].replace(
        'os.environ["MASTER_PORT"] = "12355"\n', 'os.environ["MASTER_PORT"] = free_port\n'
    ),
    "DURE703": BAD["DURE703"].replace("default=0", 'default=int(os.environ.get("LOCAL_RANK", 0))'),
    "DURE704": _DDP + "train(model)\n" + _END,
    "DURE705": _ddp(
        "share = os.cpu_count() // torch.cuda.device_count()\n" + _WORKERS_BAD.replace("os.cpu_count()", "share")
    ),
}
"""Scripts without these faults."""
