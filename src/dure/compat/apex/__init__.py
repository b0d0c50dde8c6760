"""Interface of NVIDIA's Apex for data parallelism and mixed precision, by its names."""

from dure.compat.apex import amp, normalization, optimizers, parallel

__all__ = ["amp", "normalization", "optimizers", "parallel"]
