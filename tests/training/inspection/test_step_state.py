"""State that a hook on the optimiser's step changes: once a step, by whichever ranks, and so no difference."""

import copy
import json

import pytest
import torch

from tests.conformance.cases import train_case
from tests.conformance.tasks import Regression


class Averaged(Regression):
    """An average of the weights, and a count, that a hook keeps."""

    def build_optimizer(self, model):
        self.average, self.count = copy.deepcopy(model), 0
        optimizer = super().build_optimizer(model)
        optimizer.register_step_post_hook(lambda *_: self.follow(model))
        return optimizer

    @torch.no_grad()
    def follow(self, model):
        self.count += 1
        for mine, theirs in zip(self.average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


class Late(Averaged):
    """The loss keeps something too, late enough to be seen by no trial."""

    num_calls = 0

    def loss(self, model, batch):
        self.num_calls += 1
        if self.num_calls > 60:
            self.late = self.num_calls
        return super().loss(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "told"), [(Averaged, []), (Late, ["late"])])
def test_state_that_a_hook_on_the_step_changes_is_not_said_to_be_changed_by_each_part(task, told, tmp_path):
    run = train_case(tmp_path, task(), "ddp", 2, epochs=20, global_batch_size=8)
    texts = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert not any("average" in text or "self.count" in text for text in texts)
    assert all(any(word in text for text in texts) for word in told)
