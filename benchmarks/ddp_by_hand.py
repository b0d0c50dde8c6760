"""The script that people write: DistributedDataParallel by hand, for torchrun. Says when its first step was done."""

import os
import time
from pathlib import Path

import tiny_model
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train for eight steps."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(tiny_model.build_model())
    optimizer = tiny_model.build_optimizer(model)
    inputs, labels = tiny_model.build_data(4096)
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(0))[rank::world_size]
    for step in range(8):
        rows = order[step * tiny_model.BATCH : (step + 1) * tiny_model.BATCH]
        loss = tiny_model.loss(model, (inputs[rows], labels[rows]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        if step == 0 and rank == 0:
            Path(os.environ["FIRST_STEP_FILE"]).write_text(repr(time.time()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
