"""Step counts at which an optimiser of a user's own may behave differently."""

import torch
from torch import nn
from torch.optim import SGD

from dure.strategies.division.late_steps import landmarks_of

INTERVAL = 500


class Seldom(SGD):
    """Names numbers of every kind."""

    warm_up, huge, nothing, endless, flag, half = 200.0, 10**400, float("nan"), float("inf"), True, 300.5

    def step(self, closure=None):
        if self.param_groups[0]["every"] % INTERVAL == 3_000:
            return None
        return super().step(closure)


def test_numbers_in_settings_and_code_then_those_that_can_be_step_counts_are_landmarks():
    optimizer = Seldom([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["every"] = 1_000
    assert landmarks_of(optimizer, 128) == [200, 500, 1_000, 3_000]
