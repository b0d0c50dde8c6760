"""A debugger on one rank, with a terminal at which nobody sits."""

import os
import pdb
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    _, keyboard = os.openpty()  # ours is /dev/null, at whose end a debugger gives up
    pdb.Pdb(stdin=os.fdopen(keyboard), stdout=sys.stdout).set_trace()
    value = 1  # at: 1
dist.all_reduce(torch.ones(1))  # at: 0 2
