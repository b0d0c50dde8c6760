"""DistributedDataParallel by hand for torchrun, with a checkpoint every second: says when each step was done."""

import os
import sys
import time
from pathlib import Path

import tiny_model
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

PAUSE_SECONDS = 0.018


def main() -> None:
    """Train for as many steps as asked, from the last checkpoint."""
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = DistributedDataParallel(tiny_model.build_model())
    optimizer = tiny_model.build_optimizer(model)
    inputs, labels = tiny_model.build_data(4096)
    checkpoint, begin = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"]
    with (folder / f"steps{rank}").open("a") as steps:
        for step in range(begin, num_steps):
            rows = torch.arange(step, step + tiny_model.BATCH) % 4096
            time.sleep(PAUSE_SECONDS)
            tiny_model.loss(model, (inputs[rows], labels[rows])).backward()
            optimizer.step()
            optimizer.zero_grad()
            print(time.time(), step, file=steps, flush=True)
            if rank == 0 and step % 50 == 49:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, f"{checkpoint}.new")
                Path(f"{checkpoint}.new").replace(checkpoint)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
