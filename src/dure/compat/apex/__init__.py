"""Interface of NVIDIA's Apex for data parallelism, by its names."""

from dure.compat.apex import parallel

__all__ = ["parallel"]
