"""Backend of `torch.distributed` over shared memory."""
