"""Context in which a strategy is constructed: its row, the ranks, the devices and the settings."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dure.comm.groups import Group
from dure.spec import RunSpec
from dure.strategies.contract.info import StrategyInfo
from dure.strategies.contract.precision import Precision


@dataclass(frozen=True, slots=True)
class StrategyContext:
    """Arguments with which a strategy is constructed."""

    info: StrategyInfo
    """Row of the strategy in the table."""
    group: Group
    """All ranks of the run."""
    devices: Sequence[torch.device]
    """Devices of this process."""
    precision: Precision
    spec: RunSpec
    """Settings of the run."""
