"""Modules around a model, for loops that are written by hand: the strategies' own ways to reduce and to divide."""

from dure.parallel.balanced import BalancedDataParallel, DataParallelCriterion
from dure.parallel.parameter_server import ParameterServerDDP
from dure.parallel.ring_ddp import RingDDP

__all__ = ["BalancedDataParallel", "DataParallelCriterion", "ParameterServerDDP", "RingDDP"]
