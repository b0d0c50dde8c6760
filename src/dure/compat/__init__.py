"""Interfaces of other libraries, by their names, over torch.distributed: scripts written for them run unchanged."""
