"""A schedule that does more than give a factor: asking it beforehand changes nothing."""

import pytest
from torch import nn

from tests.conformance.cases import largest_difference, train_case, weights_of
from tests.conformance.tasks import Regression


class Frozen(Regression):
    """Begins with its first layer frozen."""

    def build_model(self):
        self.model = super().build_model()
        next(self.model.parameters()).requires_grad_(False)
        return self.model


class Late(Frozen):
    """Unfreezes it when nothing is left to train."""

    def build_schedule(self, optimizer, total_samples):
        def factor(seen):
            if seen >= total_samples:
                next(self.model.parameters()).requires_grad_(True)
            return 1.0

        return factor


class Resetting(Frozen):
    """Draws its last weights anew at the end."""

    def build_schedule(self, optimizer, total_samples):
        def factor(seen):
            if seen >= total_samples:
                nn.init.normal_([*self.model.parameters()][-1])
            return 1.0

        return factor


class Falling(Regression):
    """Remembers in a closure how far it was."""

    def build_schedule(self, optimizer, total_samples):
        furthest = 0

        def factor(seen):
            nonlocal furthest
            furthest = max(furthest, seen)
            return 1.0 - 0.9 * furthest / total_samples

        return factor


class ByHand(Falling):
    """The same without a memory."""

    def build_schedule(self, optimizer, total_samples):
        return lambda seen: 1.0 - 0.9 * seen / total_samples


class Plain(Frozen):
    """Frozen as the one that resets, with a schedule that does nothing."""

    def build_schedule(self, optimizer, total_samples):
        return None


STEPS = {"global_batch_size": 8, "epochs": 2}


@pytest.mark.parametrize(("task", "same"), [(Resetting, Plain), (Falling, ByHand)])
def test_schedule_that_changes_things_at_the_end_changes_nothing_when_it_is_asked(task, same, tmp_path):
    one, other = (weights_of(train_case(tmp_path, kind(), **STEPS)) for kind in (task, same))
    assert largest_difference(one, other) == 0


def test_schedule_that_unfreezes_at_the_end_trains_nothing_before(tmp_path):
    weights = weights_of(train_case(tmp_path, Late(), **STEPS))
    plain = weights_of(train_case(tmp_path, Plain(), **STEPS))
    assert largest_difference(weights, plain) == 0
