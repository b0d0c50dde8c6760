"""Removal of the hooks that code registers in a trial."""

from collections import defaultdict

from torch import nn
from torch.optim import SGD, Optimizer

from dure.strategies.state.hooks import without_new_hooks


class Wrapper(Optimizer):
    """Steps by another optimiser, without `Optimizer.__init__`, as copies of Lookahead do."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = defaultdict(dict)


def test_hooks_of_an_optimiser_that_are_registered_inside_are_removed():
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters())
    with without_new_hooks(model, optimizer, Wrapper(optimizer)):
        optimizer.register_step_post_hook(lambda *_: None)
    assert not optimizer._optimizer_step_post_hooks
